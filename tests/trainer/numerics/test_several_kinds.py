"""Packed documents with files of several kinds against plain transformers on each alone; towers that have no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import several
import tiny
import torch
from transformers import AutoConfig, AutoModelForMultimodalLM
from usual import usual

from finetune.data.media.family_table import family_of, rows_of
from finetune.models.attention import isolation, per_document
from finetune.models.attention.isolation import isolation_problem
from finetune.models.towers import TowerPart, attention_of_parts, freeze_parts, part_of

ALL = ("image", "audio", "video")
RUNS = {  # of a model: the kinds of files of a run
    "gemma4 image": ("image",),
    "gemma4 video": ("video",),
    "gemma4 image, audio": ("image", "audio"),
    "gemma4 image, audio, video": ALL,
    "gemma4 whole image": ("image",),
    "gemma4 whole image, video": ("image", "video"),
    "qwen2_5_vl image, video": ("image", "video"),
    "qwen3_vl image, video": ("image", "video"),
}


def config_of(name: str) -> Any:
    model, *words = name.split()
    if model == "gemma4":
        return AutoConfig.for_model(**several.gemma4_config(whole="whole" in words))
    return AutoConfig.for_model(**tiny.MULTIMODAL[model])


@pytest.mark.parametrize("name", usual(RUNS, "gemma4 image, audio, video"))
def test_packed_documents_are_as_each_alone(name: str) -> None:
    """Losses to 1e-6 and gradients, those of the towers as well, to 1e-5; see `isolation.compare`."""
    assert isolation_problem(config_of(name), RUNS[name]) is None


@pytest.mark.long
def test_the_trial_sees_what_whole_images_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokens of an image see each other, and in layers with a window only."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    config, right = config_of("gemma4 whole image"), isolation.with_whole_images

    def everywhere(arguments: Any, ids: Any, tokens: Any, in_windows_only: bool) -> None:
        assert in_windows_only
        right(arguments, ids, tokens, False)

    for wrong in (lambda *arguments: None, everywhere):
        monkeypatch.setattr(isolation, "with_whole_images", wrong)
        assert "differs from that of each document alone" in str(isolation_problem(config, "image"))


def test_an_image_longer_than_the_window_is_seen_as_far_back_as_that() -> None:
    """transformers' mask of a sliding layer: a window of what is causal or of the same image."""
    from transformers.models.gemma4.modeling_gemma4 import (
        create_masks_for_vision_model,
        get_block_sequence_ids_for_mask,
    )

    config = AutoConfig.for_model(**several.gemma4_config(whole=True)).text_config
    config._attn_implementation = "eager"
    types = torch.tensor([[0, 0, *[1] * 13, 0, 1, 1, 0, *[2] * 9, 0]])
    masks = create_masks_for_vision_model(
        config=config,
        inputs_embeds=torch.zeros(*types.shape, 4),
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.arange(types.shape[1])[None],
        block_sequence_ids=get_block_sequence_ids_for_mask(types, device=torch.device("cpu")),
    )
    arguments = per_document.prepare((types.shape[1],))
    per_document.with_whole_images(arguments, types, (1, 2), in_windows_only=True)
    documents, count = arguments["documents"], types.shape[1]
    for window, kind in ((config.sliding_window, "sliding_attention"), (None, "full_attention")):
        expected = masks[kind][0, 0] == 0
        assert torch.equal(documents.seen(0, count, window, torch.device("cpu")), expected)
    assert documents.mask(0, count, None, torch.device("cpu")) is None  # causal, for a kernel


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    config = config_of(name)
    attention = attention_of_parts(config, "sdpa")
    return AutoModelForMultimodalLM.from_config(config, attn_implementation=attention)


@pytest.mark.parametrize("name", usual(("gemma4", "qwen3_vl"), "gemma4"))
def test_towers_run_in_one_order_whatever_a_row_has(name: str) -> None:
    """Each kind once, in the order of transformers' forward, and what has no files moves nothing."""
    model = model_of(name)
    base, rows = model.base_model, rows_of(name)
    kinds = [row.kind for row in family_of(model.config, tuple(rows)).each]
    freeze_parts(model, family_of(model.config, kinds), ("language", "projector", "tower"))
    towers, calls = TowerPart(model, always=False, kinds=kinds), list[str]()
    for row in {row.tower: row for row in rows.values()}.values():
        base.get_submodule(row.tower).register_forward_hook(lambda *_, path=row.tower: calls.append(path))
    expected = [rows[kind].tower for kind in kinds]
    for there in [(), *[(kind,) for kind in kinds], tuple(kinds)]:
        ids, inputs = inputs_of(model.config, there)
        plain = model(input_ids=ids, use_cache=False, **inputs).logits
        calls.clear()
        with towers.forward(model, inputs):
            logits = model(input_ids=ids, use_cache=False, **inputs).logits
        assert calls == expected, there
        assert torch.equal(logits, plain)
        model.zero_grad(set_to_none=True)
        logits.sum().backward()
        absent = [path for kind in rows if kind not in there for path in (rows[kind].tower, *rows[kind].projector)]
        shown = [path for kind in there for path in (rows[kind].tower, *rows[kind].projector)]
        for parameter_name, parameter in model.named_parameters():
            if part_of(family_of(model.config, kinds), parameter_name) == "language":
                continue
            assert parameter.grad is not None, parameter_name  # each rank has one, or DDP waits
            of_shown = any(parameter_name.startswith(f"model.{path}.") for path in shown)
            if not of_shown and any(parameter_name.startswith(f"model.{path}.") for path in absent):
                assert not parameter.grad.any(), parameter_name
        assert not set(vars(base)) & {row.call for row in rows.values()}  # nothing is left behind


def inputs_of(config: Any, kinds: tuple[str, ...]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids of a row with a file of each of these kinds, and the inputs of a forward for it."""
    family = family_of(config, kinds)
    inputs, pieces, types = dict[str, Any](), [torch.tensor([5, 6])], [torch.zeros(2)]
    for row in family.each if kinds else ():
        token, files = getattr(config, row.token_id), row.pictures(config, [2])
        of_kind = {"image": 1, "video": 2}.get(row.kind, 0)
        for _ in range(2 if row.kind == "video" else 1):  # places in time, of two tokens each
            pieces += [torch.full((2,), token), torch.tensor([7])]
            types += [torch.full((2,), of_kind), torch.zeros(1)]
        inputs |= files
    if "image" in kinds or "video" in kinds:
        inputs["mm_token_type_ids"] = torch.cat([*types, torch.zeros(2)]).int()[None]
    return torch.cat([*pieces, torch.tensor([8, 9])])[None], inputs
