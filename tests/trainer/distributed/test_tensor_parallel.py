"""Matrices shared by ranks and sharded over others: the loss and every gradient of the whole model."""

from __future__ import annotations

import json
from collections import Counter
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
DORA = ("qwen2 dora", "phi3 dora", "qwen3 dora")
QLORA = ("llama_wide qlora", "qwen2 qlora fp8")
# Each rank has some of the tokens.
SPLIT = ("llama", "llama_tied lora", "qwen3", "qwen2", "phi3", "phi3 lora", *DORA, *QLORA)
WHOLE = ("llama whole", "llama_tied lora whole", "llama_wide qlora dora whole")
CASES = (*SPLIT, *WHOLE, "mixtral", "qwen3_moe lora")
LAYERS, HIDDEN, TOKENS = 2, 64, 47


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


@pytest.mark.parametrize("case", SPLIT)
def test_between_matrices_a_rank_has_its_share_of_the_tokens(ranks: list[dict[str, Any]], case: str) -> None:
    """The last norm has all, as the head gathers none."""
    for i, rank in enumerate(ranks):
        norms = Counter(rank[case]["tokens"])
        assert norms == {(24, 23)[i % 2]: 2 * LAYERS, TOKENS: 1}


# In every layer's forward two all-gathers and two reduce-scatters, in its backward as many; the ends of all layers one
# each. The first layer of a model with adapters has no gradient of its input, and two fewer.
PADDED, TARGETS = 2 * 24 * HIDDEN, TOKENS - 1  # ranks send equally much
FULL = {
    ("all_gather_into_tensor", PADDED): 4 * LAYERS + 2,
    ("reduce_scatter_tensor", PADDED): 4 * LAYERS,
    ("all_reduce", TOKENS * HIDDEN): 1,  # the embedding's output
    ("all_reduce", TARGETS * HIDDEN): 1,  # the gradient of the head's input
    ("all_reduce", TARGETS): 1,  # the largest logit of each target
    ("all_reduce", 2 * TARGETS): 1,  # sums
}
OF_LORA = {
    **FULL,
    ("all_gather_into_tensor", PADDED): 4 * LAYERS + 1,
    ("reduce_scatter_tensor", PADDED): 4 * LAYERS - 1,
    ("all_gather_into_tensor", 2 * 24 * 4): 2 * LAYERS,  # of rank 4, after A of row parallel matrices
    ("reduce_scatter_tensor", 2 * 24 * 4): 2 * LAYERS,
}


@pytest.mark.parametrize(
    ("case", "expected"), [("llama", FULL), ("qwen3", FULL), ("qwen2", FULL), ("llama_tied lora", OF_LORA)]
)
def test_all_reduces_of_a_layer_are_sent_in_two_halves(
    ranks: list[dict[str, Any]], case: str, expected: dict[tuple[str, int], int]
) -> None:
    """Nothing else is sent, neither logits nor whole hidden states."""
    for rank in ranks:
        assert Counter((name, elements) for name, elements in rank[case]["sent"]) == expected


def test_experts_send_what_a_feed_forward_does(ranks: list[dict[str, Any]]) -> None:
    """All tokens' hidden states, twice in each direction of a layer; in the backward the weights of two choices too."""
    expected = {
        ("all_reduce", TOKENS * HIDDEN): 4 * LAYERS + 1,
        ("all_reduce", TOKENS * 2): LAYERS,
        ("all_reduce", TARGETS * HIDDEN): 1,
        ("all_reduce", TARGETS): 1,
        ("all_reduce", 2 * TARGETS): 1,
    }
    for rank in ranks:
        assert Counter((name, elements) for name, elements in rank["mixtral"]["sent"]) == expected


def test_dora_on_a_shared_embedding_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny.MODELS["llama"]))
    adapted = add_adapters(model, Lora(rank=2, dora=True, targets=["q_proj", "embed_tokens"]), torch.float32)
    with pytest.raises(UserError, match=r"embedding 'embed_tokens'.*leave it out of lora.targets, or use fsdp2"):
        parallelize(adapted.to("meta"), TensorGroup(None, 0, 2))
