"""What the time of a step is made of: operators that are counted without being run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from finetune.data.batch import collate
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.plan.command import shapes_of
from finetune.plan.meter import Meter, OperatorCounter, together
from finetune.plan.micro_batch import (
    HeaviestBatch,
    How,
    attention_at,
    examples_of,
    fill,
    model_at,
    short_model,
)
from finetune.plan.speed import Speeds
from finetune.plan.tables import shipped_config
from finetune.plan.timeline import timeline_of


@pytest.mark.parametrize("recomputes", ["false", "true"])
def test_counted_operators_are_those_of_a_real_micro_batch(
    recipe: dict[str, Any], write_recipe: Any, recomputes: str
) -> None:
    path: Path = write_recipe(recipe)
    loaded = load_recipe(path, [f"train.activation_checkpointing={recomputes}"])
    config, batch = short_model(Base.of(loaded).config), HeaviestBatch((24,), 20)
    parts = timeline_of(loaded, config, batch, How(device="cpu", gradients_there=True))
    layers = [part for _ in range(2) for part in (*parts.layers, *parts.layers_backward)]
    ends = (parts.before, parts.head, parts.head_backward, parts.before_backward)
    counted = together([part.work for part in (*layers, *ends)])
    how = How(device="cpu")
    model, forward = model_at(loaded, config, attention_at(loaded, config, how), how)
    fill(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, std=0.02)
    collated = collate(examples_of(loaded.objective, batch))

    def run() -> None:
        forward.objective.trial_loss(forward(model, collated), collated).backward()

    run()
    counter = OperatorCounter()
    with Meter("cpu", count=counter.count):
        run()
    real = counter.work("")
    assert counted.operators == pytest.approx(real.operators, rel=0.02)
    assert counted.bytes == pytest.approx(real.bytes, rel=0.05)


@pytest.mark.long
def test_widths_that_differ_between_layers_are_averaged() -> None:
    """Gemma 4: five sliding layers of 32 heads and 16 key-value heads of 256, then a full one of 32 and 4 of 512."""
    loaded = load_recipe(ROOT / "recipes" / "gemma4-31b" / "lora.yaml", [])
    config = shipped_config(loaded.model.name or "")
    if config is None or not getattr(config.get_text_config(), "is_heterogeneous", False):
        pytest.skip("this transformers has one config for all layers of Gemma 4")
    shape = shapes_of(loaded, config, on_cpu=False)[False]
    assert (shape.queries, shape.keys) == (32 * (5 * 256 + 512) // 6, (5 * 16 * 256 + 4 * 512) // 6)


def test_bandwidth_is_interpolated_between_measured_sizes() -> None:
    speeds = Speeds(1.0, 1.0, ((10.0, 4.0), (20.0, 2.0)), "here", 1e-6)
    assert [speeds.bandwidth(size) for size in (1.0, 10.0, 15.0, 20.0, 99.0)] == [4.0, 4.0, 3.0, 2.0, 2.0]
