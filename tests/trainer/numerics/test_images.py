"""Packed documents with images against plain transformers on each alone; parts; towers in forwards without images."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from bitsandbytes.functional import dequantize_4bit
from transformers import AutoConfig, AutoModelForImageTextToText
from usual import usual

from finetune.data.media.family_table import FAMILIES, family_of
from finetune.errors import UserError
from finetune.models.attention import AttentionChoice, isolation, per_document
from finetune.models.attention.isolation import ImageTrial, isolation_problem
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.head.token_loss import TokenLoss
from finetune.models.loss_model import CausalLMWithLoss, TargetTokens
from finetune.models.tiny_config import tiny_whole
from finetune.models.towers import TowerPart, freeze_parts, part_of, part_sizes, targets_in_parts
from finetune.models.weights import Placement, load_model
from finetune.recipe import load_recipe
from finetune.recipe.schema import Lora
from finetune.utils import unwrap_peft

NAMES = tuple(name for name, family in FAMILIES.items() if family.kind == "image")


def config_of(name: str) -> Any:
    if name == "idefics3":
        return AutoConfig.for_model(**{**tiny.MULTIMODAL["smolvlm"], **tiny.AS_IDEFICS3})
    return AutoConfig.for_model(**tiny.MULTIMODAL[name])


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_with_images_are_as_each_alone(name: str) -> None:
    assert isolation_problem(config_of(name)) is None


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_the_trial_sees_what_a_family_needs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without M-RoPE's positions, or with images that are read from left to right, a model is refused."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(isolation, "row_positions", lambda config: None)
    monkeypatch.setattr(isolation, "with_whole_images", lambda *arguments: None)
    why = isolation_problem(config_of(name))
    assert why is not None
    assert "differs from that of each document alone" in why


def test_a_trial_that_has_passed_is_kept_and_one_that_has_not_is_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    config = config_of("qwen2_5_vl")
    with monkeypatch.context() as broken:
        broken.setattr(isolation, "row_positions", lambda config: None)
        assert "differs" in str(isolation_problem(config))
    assert not [*tmp_path.rglob("*.json")]
    assert isolation_problem(config) is None
    with monkeypatch.context() as broken:
        broken.setattr(isolation, "row_positions", lambda config: None)
        assert isolation_problem(config) is None
        config.text_config.rms_norm_eps = 1e-3  # another model
        assert "differs" in str(isolation_problem(config))


def own_pixels(trial: ImageTrial, document: int) -> torch.Tensor | None:
    """Mask of the pixels of a document's images among all; None if it has no images."""
    marked = copy.copy(trial)
    marked.pictures = {name: tensor.detach().clone() for name, tensor in trial.pictures.items()}
    marked.pictures["pixel_values"].zero_()
    if not (views := marked.pictures_of(document)):
        return None
    views["pixel_values"].fill_(1)
    return marked.pictures["pixel_values"].bool()


@pytest.mark.parametrize("name", NAMES)
def test_pixels_move_their_own_document_only(name: str) -> None:
    trial = ImageTrial(tiny_whole(config_of(name)), per_document.DOCUMENTS)
    trial.pictures["pixel_values"].requires_grad_(True)
    losses = trial.losses(trial.row_logits())
    moved = []
    for loss in losses:
        (gradient,) = torch.autograd.grad(
            loss.sum(), trial.pictures["pixel_values"], retain_graph=True, allow_unused=True
        )
        moved.append(torch.zeros(()) if gradient is None else gradient)
    for i, gradient in enumerate(moved):
        if (own := own_pixels(trial, i)) is None:
            assert not gradient.any()
        else:
            assert not torch.where(own, 0.0, gradient).any()
            assert gradient[own].abs().max() > 0


def test_another_family_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"'mllama' is not among the models .* cross attention"):
        family_of(config_of("mllama"))
    with pytest.raises(UserError, match="'llama' is not among"):
        family_of(AutoConfig.for_model(**tiny.MODELS["llama"]))


def tiny_model(name: str) -> Any:
    torch.manual_seed(0)
    attention = {"": "sdpa", "text_config": per_document.DOCUMENTS, "vision_config": "sdpa"}
    config = config_of(name)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation=attention)


@pytest.mark.parametrize("name", usual(NAMES, "qwen2_5_vl", "gemma3"))
def test_parts_are_all_of_a_model(name: str) -> None:
    model = tiny_model(name)
    family = family_of(model.config)
    freeze_parts(model, family, ("projector",))
    sizes = part_sizes(model)
    assert all(total > 0 for total, _ in sizes.values())
    assert sum(total for total, _ in sizes.values()) == sum(p.numel() for p in model.parameters())
    assert [trained for _, trained in sizes.values()] == [0, sizes["projector"][0], 0]
    for parts in (("language",), ("tower", "language") if name == "gemma3" else ("tower", "projector")):
        targets = targets_in_parts(model, family, parts, Lora())
        assert {part_of(family, path) for path in targets.layers} == {*parts}
    assert targets_in_parts(model, family, ("language",), Lora(targets=("q_proj",))).layers
    with pytest.raises(UserError, match=r"lora\.targets: no target is in 'projector'"):
        targets_in_parts(model, family, ("projector",), Lora(targets=("q_proj",)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trained", [("language",), ("language", "projector", "tower")])
def test_a_forward_without_images_runs_the_tower_and_nothing_moves(name: str, trained: tuple[str, ...]) -> None:
    model = tiny_model(name)
    freeze_parts(model, family_of(model.config), trained)
    ids = torch.randint(3, 300, (1, 9))
    runs: list[Any] = []
    model.base_model.get_submodule(family_of(model.config).tower).register_forward_hook(lambda *call: runs.append(call))
    losses = []
    for images in (None, TowerPart(model, always=True)):
        wrapped = CausalLMWithLoss(model, images=images).train()
        targets = TargetTokens(torch.arange(8), ids[0, 1:], TokenLoss())
        inputs = {"input_ids": ids, "position_ids": torch.arange(9)[None], "use_cache": False}
        losses.append(wrapped(targets=targets, **inputs, **per_document.prepare((9,))).total)
    assert len(runs) == 1
    assert torch.equal(*losses)
    losses[1].backward()
    for parameter_name, parameter in model.named_parameters():
        part = part_of(family_of(model.config), parameter_name)
        if parameter.requires_grad and part != "language":
            assert parameter.grad is not None  # each rank has one, or DDP waits
            assert not parameter.grad.any()


def test_what_is_frozen_drops_nothing() -> None:
    model = tiny_model("qwen2_5_vl")
    freeze_parts(model, family_of(model.config), ("language", "projector"))
    wrapped = CausalLMWithLoss(model, images=TowerPart(model, always=False)).train()
    assert model.base_model.language_model.training
    assert model.base_model.visual.merger.training
    assert not model.base_model.visual.blocks[0].training
    wrapped.eval()
    assert not model.base_model.visual.merger.training


def loaded(base: Path, weights: Any, **changes: Any) -> Any:
    """A recipe's model, all of its parts trained."""
    values = {
        "run": {"name": "run"},
        "model": {"name": str(base), "train": ["language", "projector", "tower"]},
        "data": {"train": [{"path": "rows.jsonl", "format": "messages"}], "max_length": 64, "image": {}},
        "batch": {"rows": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 1, "precision": "fp32"},
        **changes,
    }
    (base / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    recipe = load_recipe(base / "recipe.yaml")
    attention = AttentionChoice("sdpa", "one document", isolates_documents=False)
    return load_model(
        recipe, Base.of(recipe, model_config(recipe.model)), attention, Placement(weights, torch.device("cpu"))
    )


def test_a_head_is_tied_as_in_the_files_on_every_rank(tmp_path: Path) -> None:
    """Mistral 3's class ties it, its files have one of its own: ranks that read none would have another model."""
    base = tiny.save_seeing(tmp_path, "mistral3")
    for weights in ("load", "meta"):
        model = loaded(base, weights, mode="full")
        assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight, weights


@torch.no_grad()
def test_what_qlora_packs_is_the_language_model(tmp_path: Path) -> None:
    base = tiny.save_seeing(tmp_path, "qwen2_5_vl")
    quantised = {"mode": "qlora", "lora": {"rank": 2, "alpha": 4}, "quantization": {"type": "nf4"}}
    model = unwrap_peft(loaded(base, "load", **quantised)).eval()
    plain: Any = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()
    family, packed = family_of(model.config), set()
    for name, module in model.named_modules():
        if hasattr(module, "quant_state") and "lora_" not in name:
            path = name.removesuffix(".base_layer")
            packed.add(path)
            plain.get_submodule(path).weight.copy_(dequantize_4bit(module.weight.detach(), module.quant_state))
    linear = {name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    assert packed == {name for name in linear if part_of(family, name) == "language"} - {"lm_head"}
    assert {part_of(family, name) for name, p in model.named_parameters() if "lora_" in name} == {*sizes_of(model)}
    ids = torch.tensor([[5, 6, *[model.config.image_token_id] * 2, 7, 8, 9]])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == model.config.image_token_id).int()}
    inputs |= family.pictures(model.config, [2])
    torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits, rtol=1e-5, atol=1e-5)


def sizes_of(model: Any) -> dict[str, tuple[int, int]]:
    return {part: sizes for part, sizes in part_sizes(model).items() if sizes[1]}
