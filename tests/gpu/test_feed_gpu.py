"""Batches on a CUDA device: the same values, and nothing in a micro-batch waits for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data.dataset import build_training
from finetune.data.loader import Loader
from finetune.data.prefetch import fed_steps
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.weights import Placement, load_model
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.recipe import load_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda")


@pytest.fixture
def loaded(recipe: dict[str, Any], write_recipe: Any) -> Any:
    return load_recipe(write_recipe(recipe))


def loader(loaded: Any) -> Loader:
    data = build_training(loaded, Base.of(loaded).renderer(loaded.objective))
    return Loader(data.in_order(loaded), 4, 2, 0, 1, 10**6)


def test_batches_reach_the_device_unchanged_while_it_is_busy(loaded: Any) -> None:
    """Memory of a step that was let go may be given out for the next copies only when nothing reads it any more."""
    rows, busy = loader(loaded), torch.randn(2048, 2048, device=DEVICE)
    sums, expected = [], []
    with fed_steps(rows, range(40), DEVICE) as feed:
        for made in feed:
            for _ in range(20):
                busy = torch.tanh(busy @ busy)  # the copy of a later step overtakes what reads this one
            sums += [tensor.sum() for batch in made.batches for tensor in batch.tensors()]
            del made
    for step in range(40):
        expected += [tensor.sum() for batch in rows.step(step).batches for tensor in batch.tensors()]
    assert [int(value) for value in sums] == [int(value) for value in expected]


def test_a_micro_batch_waits_for_nothing(loaded: Any, tmp_path: Path) -> None:
    config = model_config(loaded.model)
    attention = attention_for(loaded, config, "cuda")
    model = load_model(loaded, Base.of(loaded, config), attention, Placement("load", DEVICE)).to(DEVICE)
    loss_model = CausalLMWithLoss(model, device_type="cuda")
    forward = ForwardPass(attention, make_objective(loaded.objective))
    with fed_steps(loader(loaded), range(3), DEVICE) as feed:
        for number, made in enumerate(feed):
            assert all(tensor.is_cuda for batch in made.batches for tensor in batch.tensors())
            if number == 2:  # the first ones compile, allocate and choose kernels
                torch.cuda.set_sync_debug_mode("error")
            try:
                for batch in made.batches:
                    (forward(loss_model, batch).total / made.counts["target_tokens"]).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
