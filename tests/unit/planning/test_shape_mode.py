"""A timeline on our fake tensors is that on torch's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from finetune.planning.estimate.micro_batch import HeaviestBatch, How
from finetune.planning.estimate.shape_mode import IN_PLACE, NEW, VIEWS, ShapeMode
from finetune.planning.estimate.timeline import _timeline, timeline_of
from finetune.recipe import load_recipe

LORA = ("mode=lora", "lora={rank: 4, alpha: 8}")


@pytest.mark.parametrize(
    ("name", "overrides", "how"),
    [
        ("llama", (*LORA, "train.activation_checkpointing=true"), How(casts_weights=True)),
        ("llama", (*LORA, "lora.dropout=0.1"), How(casts_weights=True, tensor=2)),
        ("llama", ("train.activation_checkpointing=selective",), How(keeps_inputs_alone=True, gradients_there=True)),
        ("qwen3", ("mode=qlora", "lora={rank: 4, alpha: 8}", "quantization={type: nf4}"), How()),
        ("mixtral", LORA, How(expert=2)),
        ("qwen3_5", (), How(device="cpu", gradients_there=True)),
    ],
    ids=["lora", "tensor parallel", "full", "qlora", "experts", "hybrid"],
)
def test_a_timeline_is_that_of_torch(
    name: str, overrides: tuple[str, ...], how: How, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "run": {"name": "run", "dir": str(tmp_path)},
        "model": {"name": "not/here"},
        "mode": "full",
        "data": {"train": [{"path": "rows.jsonl", "format": "messages"}], "max_length": 64},
        "batch": {"rows": 8, "rows_per_device": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 6, "precision": "bf16"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    recipe = load_recipe(tmp_path / "recipe.yaml", list(overrides))
    config, batch = AutoConfig.for_model(**tiny.MODELS[name]), HeaviestBatch((40, 24), 50)
    asked: list[object] = []

    def of_torch(mode: ShapeMode, func: object, *rest: object) -> object:
        asked.append(func)
        return FakeTensorMode.dispatch(mode, func, *rest)  # pyright: ignore[reportArgumentType]

    ours = timeline_of(recipe, config, batch, how)
    monkeypatch.setattr(ShapeMode, "dispatch", of_torch)
    _timeline.cache_clear()
    assert timeline_of(recipe, config, batch, how) == ours
    _timeline.cache_clear()
    assert len(set(asked) & (VIEWS | NEW)) > 12  # what both have computed
    assert IN_PLACE & set(asked)


def test_views_share_their_storage_and_others_do_not() -> None:
    with ShapeMode() as mode:
        x = torch.empty(4, 6)
        storage = x.untyped_storage()._cdata
        views = [x.view(24), x.t(), x.detach(), x[1:], x[0], x[None], x.expand(2, 4, 6), *x.split(2), *x.split([1, 3])]
        assert all(view.untyped_storage()._cdata == storage for view in views)
        for _ in range(2):  # computed, then remembered
            new = [x @ x.t(), x * 2.0, x + x, x.sum(1), x.clone(), x.bfloat16(), torch.cat([x, x])]
            assert all(one.untyped_storage()._cdata != storage for one in new)
            assert [tuple(one.shape) for one in new] == [(4, 4), (4, 6), (4, 6), (4,), (4, 6), (4, 6), (8, 6)]
            assert [one.dtype for one in new] == [torch.float32] * 5 + [torch.bfloat16, torch.float32]
        assert x.mul_(x) is x
        assert all(one.fake_mode is mode and one.device.type == "cpu" for one in [*views, *new])  # pyright: ignore


def test_a_number_that_is_known_stays_known() -> None:
    with ShapeMode():
        number = torch.tensor(3)
        assert (number + 1).item() == 4
        assert number.view(1).item() == 3
