"""CUDA graphs: a run's own parts with them and without, on the same padded rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import graphed
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LORA = ("mode=lora", "lora={rank: 4, alpha: 8}")
MODES = {
    "full": (),
    "tied": ("model.name={made}/llama_tied",),
    "lora": LORA,
    "qlora": (*LORA, "mode=qlora", "quantization={type: nf4}"),
}
BF16 = 2.0**-7  # two roundings


@pytest.mark.parametrize("padded", [True, "some"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_by_graphs_is_the_run_without(
    recipe: dict[str, Any], write_recipe: Callable[..., Path], made: Path, mode: str, padded: Any
) -> None:
    """To the last bit, unless two runs without differ as well: kernels may sum in any order. `some`: between
    micro-batches of other lengths, which run without."""
    if mode == "qlora":
        pytest.importorskip("bitsandbytes")
    recipe["train"] = {"max_steps": 6, "precision": "bf16", "graphs": "auto"}
    recipe["data"]["max_length"] = 96
    file, overrides = str(write_recipe(recipe)), [one.replace("{made}", str(made)) for one in MODES[mode]]
    mine, without, again = (
        graphed.trained(file, overrides, graphed=graphs, padded=padded) for graphs in (True, False, False)
    )
    assert max(mine.shares) > 0
    if without.losses == again.losses:
        assert (mine.losses, mine.norms) == (without.losses, without.norms)
        assert all(torch.equal(values, without.weights[name]) for name, values in mine.weights.items())
    assert mine.losses == pytest.approx(without.losses, rel=BF16)
