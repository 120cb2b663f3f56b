"""Matrices shared by ranks and sharded over others: the loss and every gradient of the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forks
import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.engine.tensor_group import TensorGroup
from finetune.engine.tensor_parallel import parallelize
from finetune.errors import UserError
from finetune.models.weights import add_adapters
from finetune.recipe.schema import Lora

WORKER = Path(__file__).with_name("tensor_worker.py")
CASES = ("llama", "llama_tied lora", "qwen3", "qwen2", "phi3", "phi3 lora", "qwen2 dora", "phi3 dora", "qwen3 dora")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("tensor")
    done = forks.torchrun(4, WORKER, out)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((out / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_full_model(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        assert rank[case]["loss"] < 1e-6
        assert rank[case]["gradient"] < 1e-5  # of the parameter's largest


@pytest.mark.parametrize("case", CASES)
def test_what_tensor_ranks_hold_alike_gets_the_same_gradient(ranks: list[dict[str, Any]], case: str) -> None:
    """Bit by bit, or the copies would drift apart."""
    assert all(rank[case]["copies"] for rank in ranks)


def test_each_rank_holds_its_share(ranks: list[dict[str, Any]]) -> None:
    """A quarter of all that is trained, but for the vectors between the matrices."""
    for rank in ranks:
        assert 0.25 <= rank["llama"]["held"] < 0.26


def test_dora_on_a_shared_embedding_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny.MODELS["llama"]))
    adapted = add_adapters(model, Lora(rank=2, dora=True, targets=["q_proj", "embed_tokens"]), torch.float32)
    with pytest.raises(UserError, match=r"embedding 'embed_tokens'.*leave it out of lora.targets, or use fsdp2"):
        parallelize(adapted.to("meta"), TensorGroup(None, 0, 2))
