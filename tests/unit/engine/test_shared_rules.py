"""What cannot be where several ranks share the tokens of a row, each said before training with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma2Config, GPT2Config, LlamaConfig, MistralConfig, Qwen3NextConfig

from finetune.data.token_shard import TokenShare
from finetune.engine.context_parallel import apply_context_parallel
from finetune.engine.launch import Launch
from finetune.engine.parallelism import Parallelism
from finetune.engine.parallelism_rules import check_combination
from finetune.errors import UserError
from finetune.models.attention import AttentionChoice
from finetune.recipe import load_recipe

SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
CONTEXT, SEQUENCE = {"cp_size": 2}, {"sp_size": 2}


def check(write_recipe: Any, recipe: dict[str, Any], sizes: dict[str, int], config: Any, *overrides: str) -> None:
    block = {f"parallelism_config_{key}": value for key, value in sizes.items()}
    processes = sizes.get("cp_size", 1) * sizes.get("sp_size", 1)
    launch = Launch("replicated", processes, "it.yaml", {"parallelism_config": block})
    check_combination(load_recipe(write_recipe(recipe), overrides), "recipe.yaml", launch, config)


@pytest.mark.parametrize("sizes", [CONTEXT, SEQUENCE, {"sp_size": 3}, {"cp_size": 4, "sp_size": 2}])
def test_a_plain_model_goes(recipe: dict[str, Any], write_recipe: Any, sizes: dict[str, int]) -> None:
    check(write_recipe, recipe, sizes, LlamaConfig(**SMALL))
    check(write_recipe, recipe, sizes, None)


REFUSED = [
    (
        SEQUENCE | {"sp_size": 4},
        LlamaConfig(**SMALL),
        (),
        "`parallelism_config_sp_size: 4` must divide the 6 attention heads: .*3 or 6",
    ),
    (
        CONTEXT,
        MistralConfig(**SMALL, sliding_window=8),
        (),
        "this model's sliding attention: use .*sp_size",
    ),
    (
        CONTEXT,
        Gemma2Config(**SMALL, head_dim=8),
        (),
        "sliding attention.*soft-capped attention logits.*sp_size",
    ),
    (CONTEXT, Qwen3NextConfig(**SMALL), (), "not support this model's linear attention: remove it"),
    (SEQUENCE, Qwen3NextConfig(**SMALL), (), "has linear attention, which does not keep documents apart: remove it"),
    (CONTEXT, LlamaConfig(**SMALL), ("train.compile=true",), "compiled layers .*set `train.compile: false`, or use"),
    (SEQUENCE, LlamaConfig(**SMALL), ("model.attention=sdpa",), "`model.attention: sdpa`.*set `model.attention: auto`"),
    (CONTEXT, LlamaConfig(**SMALL), ("model.attention=documents",), "has attention of its own.*set `auto`"),
    (CONTEXT, LlamaConfig(**SMALL), ("mode=lora", "lora.dropout=0.1"), r"set `lora.dropout` \(now 0.1\) to 0"),
    (SEQUENCE, GPT2Config(n_head=6, n_embd=48), (), "set the model's `attn_pdrop` to 0"),
]


@pytest.mark.parametrize(("sizes", "config", "overrides", "says"), REFUSED)
def test_what_cannot_be_is_said(
    recipe: dict[str, Any], write_recipe: Any, sizes: dict[str, int], config: Any, overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UserError, match=f"(?s)it.yaml cannot run recipe.yaml:.*{says}"):
        check(write_recipe, recipe, sizes, config, *overrides)


@pytest.mark.parametrize("config", [MistralConfig(**SMALL, sliding_window=8), Gemma2Config(**SMALL, head_dim=8)])
def test_whole_rows_may_have_windows_and_caps(recipe: dict[str, Any], write_recipe: Any, config: Any) -> None:
    check(write_recipe, recipe, SEQUENCE, config)


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (
            AttentionChoice("eager", "Mamba carries state", False),
            "Mamba carries state, so its tokens cannot be sharded",
        ),
        (
            AttentionChoice("eager", "no sdpa", True),
            "transformers' own `eager` here .no sdpa.*use data parallel only",
        ),
    ],
)
def test_attention_that_does_not_know_of_other_ranks_is_refused(choice: AttentionChoice, says: str) -> None:
    with pytest.raises(UserError, match=f"context 2: .*{says}"):
        apply_context_parallel(choice, TokenShare(2), Parallelism(context=2), 0)


def test_one_rank_attends_as_ever() -> None:
    choice = AttentionChoice("eager", "no sdpa", True)
    assert apply_context_parallel(choice, TokenShare(), Parallelism(replicate=4), 0) is choice
