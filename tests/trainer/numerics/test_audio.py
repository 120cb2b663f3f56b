"""Packed documents with clips against plain transformers on each alone; towers in forwards without clips."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hearing
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from test_images import loaded
from torch.utils._pytree import tree_leaves  # torch has it under no other name
from transformers import AutoConfig, AutoModelForMultimodalLM

from finetune.data.media.family_table import FAMILIES, family_of
from finetune.errors import UserError
from finetune.models.activations import recompute_activations
from finetune.models.attention import isolation, per_document
from finetune.models.attention.isolation import isolation_problem
from finetune.models.clips_alone import is_run_alone, is_run_in_parts, run_clips_alone
from finetune.models.config import check_scaled_logits, restore_dropout, with_steady_tower
from finetune.models.head.token_loss import TokenLoss
from finetune.models.loss_model import CausalLMWithLoss, TargetTokens
from finetune.models.tiny_config import tiny_whole
from finetune.models.towers import (
    TowerPart,
    attention_of_parts,
    freeze_parts,
    part_of,
    part_sizes,
    patches_in,
    patches_of,
)
from finetune.utils import unwrap_peft

NAMES = hearing.families()


def config_of(name: str, **changes: Any) -> Any:
    return AutoConfig.for_model(**{**hearing.HEARING[name].config, **changes})


def test_every_family_that_hears_is_tried() -> None:
    assert set(hearing.HEARING) == {name for name, family in FAMILIES.items() if family.kind == "audio"}


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_with_clips_are_as_each_alone(name: str) -> None:
    """Losses to 1e-6 and gradients, those of the tower as well, to 1e-5; see `isolation.compare`."""
    assert isolation_problem(config_of(name)) is None


def test_documents_of_phi4_have_their_own_rotations_and_windows() -> None:
    """The published kind of RoPE, whose frequencies change with a document's length, on a part of each head."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors}
    assert isolation_problem(config_of("phi4_multimodal", rope_parameters=rope, sliding_window=262_144)) is None


@torch.no_grad()
def test_clips_of_phi4_end_where_their_mask_says() -> None:
    """Also one with silence, whose frames are zero, and one of more positions than its tower computes at once."""
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config_of("phi4_multimodal")).eval()
    family = family_of(model.config)
    tower, frames = model.base_model.get_submodule(str(family.alone)), (47, 30, 4_100, 4_100)
    clips = [torch.randn(1, count, 8) for count in frames]
    clips[1][:, 20:] = 0
    clips[2][:, 100:200] = 0
    features = torch.cat([torch.nn.functional.pad(clip, (0, 0, 0, 4_100 - clip.shape[1])) for clip in clips])
    mask = torch.arange(4_100) < torch.tensor(frames)[:, None]
    alone, leaking = [tower(clip, None)[0] for clip in clips], tower(features[:2, :47], mask[:2, :47])[1, :4]
    run_clips_alone(model, family)
    together, alike = tower(features, mask), tower(features[2:], None)
    assert [len(one) for one in alone] == [6, 4, 513, 513]
    for ours, theirs in zip([*together, *alike], [*alone, *alone[2:]], strict=True):
        assert torch.equal(ours[: len(theirs)], theirs)
    assert not torch.allclose(leaking, alone[1], atol=1e-4)


def test_the_trial_sees_clips_that_are_exchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    right = isolation.ImageTrial.packed

    def exchanged(trial: Any) -> Any:
        trial.pictures = {key: value.flip(0) for key, value in trial.pictures.items()}
        return right(trial)

    monkeypatch.setattr(isolation.ImageTrial, "packed", exchanged)
    assert "differs from that of each document alone" in str(isolation_problem(config_of("voxtral")))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trained", [("language",), ("language", "projector", "tower")])
def test_a_forward_without_clips_runs_the_tower_and_nothing_moves(name: str, trained: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    config = config_of(name)
    attention = attention_of_parts(config, per_document.DOCUMENTS)
    model: Any = AutoModelForMultimodalLM.from_config(config, attn_implementation=attention)
    family = family_of(model.config)
    freeze_parts(model, family, trained)
    assert sum(total for total, _ in part_sizes(model).values()) == sum(p.numel() for p in model.parameters())
    ids = torch.randint(3, 300, (1, 9))
    runs: list[Any] = []
    model.base_model.get_submodule(family.tower).register_forward_hook(lambda *call: runs.append(call))
    losses = []
    for tower in (None, TowerPart(model, always=True)):
        wrapped = CausalLMWithLoss(model, images=tower).train()
        targets = TargetTokens(torch.arange(8), ids[0, 1:], TokenLoss())
        inputs = {"input_ids": ids, "position_ids": torch.arange(9)[None], "use_cache": False}
        losses.append(wrapped(targets=targets, **inputs, **per_document.prepare((9,))).total)
    assert len(runs) == 1
    assert torch.equal(*losses)
    losses[1].backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad and part_of(family, parameter_name) != "language":
            assert parameter.grad is not None, parameter_name  # each rank has one, or DDP waits
            assert not parameter.grad.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trained", [("language",), ("language", "projector", "tower")], ids=["language", "tower"])
def test_modules_run_in_the_same_order_with_and_without_clips(name: str, trained: tuple[str, ...]) -> None:
    """ZeRO-3 gathers a module's weights as it is called, in the backward those of all that returned a tensor with a
    gradient, and reduces gradients as they come, on all ranks together."""
    trial = isolation.ImageTrial(tiny_whole(config_of(name)), per_document.DOCUMENTS)
    freeze_parts(trial.model, family_of(trial.model.config), trained)
    tower, called = TowerPart(trial.model, always=True), list[str]()
    for path, module in gathered_alone(trial.model):
        module.register_forward_pre_hook(lambda *_, path=path: called.append(path))
        module.register_forward_hook(lambda *call, path=path: called.append(f"{path}: {has_gradient(call[2])}"))
    for path, parameter in trial.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, path=path: called.append(f"gradient of {path}"))
    trial.packed()
    with_clips, row = called.copy(), trial.documents[1]
    called.clear()
    inputs = {"input_ids": row, "position_ids": torch.arange(row.shape[1])[None]}
    with tower.forward(trial.model, inputs):
        logits = trial.model(**inputs, **per_document.prepare((row.shape[1],)), use_cache=False).logits
    logits.sum().backward()
    assert called == with_clips
    assert any(part_of(tower.family, path) == "tower" for path in called)


def has_gradient(output: Any) -> bool:
    tensors = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
    return any(one.requires_grad for one in tensors)


def gathered_alone(model: Any) -> Iterator[tuple[str, Any]]:
    """Modules but those inside of a tower that is gathered as a whole."""
    modules = dict(model.named_modules())
    whole = tuple(f"{path}." for path, module in modules.items() if is_run_alone(module) or is_run_in_parts(module))
    yield from ((path, module) for path, module in modules.items() if not (whole and path.startswith(whole)))


@pytest.mark.parametrize("name", NAMES)
def test_positions_of_the_tower_are_those_of_its_layers(name: str) -> None:
    config = config_of(name)
    family = family_of(config)
    cells = [2, 5, 11] if family.tokens is None else [1, 1, 1]
    inputs = family.pictures(config, cells)
    of_each = [family.tokens(config)] * len(cells) if family.tokens else cells
    if name == "gemma3n":  # of clips of fewer tokens than their places
        of_each = [1, 1, 1]
    assert sum(patches_in(config, inputs)) == sum(patches_of(config, of_each))


def test_a_tower_that_drops_at_random_does_not_in_a_run() -> None:
    audio = {**hearing.HEARING["qwen2_audio"].config["audio_config"], "encoder_layerdrop": 0.1, "dropout": 0.2}
    published = config_of("qwen2_audio", audio_config=audio)
    steady = with_steady_tower(published)
    assert (steady.audio_config.encoder_layerdrop, steady.audio_config.dropout) == (0.0, 0.0)
    assert with_steady_tower(steady) is steady
    restore_dropout(steady, published)  # the result has what its base has
    assert (steady.audio_config.encoder_layerdrop, steady.audio_config.dropout) == (0.1, 0.2)
    assert published.audio_config.dropout == 0.2


def test_logits_that_transformers_leaves_unscaled_are_refused() -> None:
    text = hearing.HEARING["granite_speech"].config["text_config"]
    with pytest.raises(UserError, match="GraniteSpeechForConditionalGeneration does not divide logits by 8"):
        check_scaled_logits(config_of("granite_speech", text_config={**text, "logits_scaling": 8.0}))
    for name in ("granite_speech", "gemma4"):
        check_scaled_logits(config_of(name))


def test_layers_that_transformers_does_not_recompute_are_refused() -> None:
    """Granite Speech's class; a run would end at transformers' ValueError."""
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(config_of("granite_speech"))
    with pytest.raises(UserError, match=r"does not recompute layers of GraniteSpeech.*activation_checkpointing: false"):
        recompute_activations(model, True)


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_towers_within_a_text_model_do_not_train_on_text(mode: str, tmp_path: Path) -> None:
    """DDP would wait for their gradients."""
    base = hearing.save_hearing(tmp_path, "phi4_multimodal")
    data = {"train": [{"path": "rows.jsonl", "format": "messages"}], "max_length": 64}
    lora = {"lora": {"rank": 2, "alpha": 4}} if mode == "lora" else {}
    model = unwrap_peft(loaded(base, "load", mode=mode, model={"name": str(base)}, data=data, **lora))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {part_of(family_of(model.config), name) for name in trained} == {"language"}
    assert len({name.partition(".self_attn.")[0] for name in trained if ".self_attn." in name}) == 2


@torch.no_grad()
def test_what_qlora_packs_is_the_language_model(tmp_path: Path) -> None:
    """Tower and projector stay as they are, get adapters, and hear what the packed weights' values would."""
    base = hearing.save_hearing(tmp_path, "qwen2_audio")
    data = {"train": [{"path": "rows.jsonl", "format": "messages"}], "max_length": 64, "audio": {}}
    packing: dict[str, Any] = {"lora": {"rank": 2, "alpha": 4}, "quantization": {"type": "nf4"}}
    model = unwrap_peft(loaded(base, "load", mode="qlora", data=data, **packing)).eval()
    plain: Any = AutoModelForMultimodalLM.from_pretrained(base, dtype=torch.float32).eval()
    family, packed = family_of(model.config), set()
    for name, module in model.named_modules():
        if hasattr(module, "quant_state") and "lora_" not in name:
            path = name.removesuffix(".base_layer")
            packed.add(path)
            plain.get_submodule(path).weight.copy_(dequantize_4bit(module.weight.detach(), module.quant_state))
    linear = {name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    assert packed == {name for name in linear if part_of(family, name) == "language"} - {"lm_head"}
    adapted = {part_of(family, name) for name, _ in model.named_parameters() if "lora_" in name}
    assert adapted == {"language", "projector", "tower"}
    inputs = {"input_ids": torch.tensor([[5, 6, *[model.config.audio_token_id] * 2, 7, 8, 9]])}
    inputs |= family.pictures(model.config, [2])
    torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits, rtol=1e-5, atol=1e-5)
