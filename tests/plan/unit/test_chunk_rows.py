"""`plan` knows how many rows of logits a run has at a time on a device of some size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from finetune.models.assemble import assemble, skeleton
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.loss_model import CausalLMWithLoss
from finetune.plan.micro_batch import How, model_at
from finetune.recipe import load_recipe


def test_a_run_s_chunks_follow_the_memory_of_its_device(
    recipe: dict[str, Any], write_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_recipe(write_recipe(recipe))
    base = Base.of(loaded)
    config = base.config
    attention, cuda = attention_for(loaded, config, "cpu"), torch.device("cuda")
    rows = []
    for gib in (23.5, 79.1):
        properties = SimpleNamespace(total_memory=int(gib * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device, it=properties: it)
        wrapped = assemble(skeleton(loaded, base, attention), loaded, cuda, has_scores=False, only_sums=True)
        rows.append(cast(CausalLMWithLoss, wrapped)._rows)
    assert rows[0] == rows[1] // 2
    planned = [model_at(loaded, config, attention, How(small=small))[0]._rows for small in (True, False)]
    assert planned == rows
