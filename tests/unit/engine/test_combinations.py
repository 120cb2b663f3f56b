"""What ways of dividing the work are refused with, before a model loads."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from finetune.engine.launch import Kind, Launch
from finetune.engine.parallelism_rules import Architecture, check_combination
from finetune.errors import UserError
from finetune.recipe import load_recipe

LLAMA = {"model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
GPT2 = {"model_type": "gpt2"}


def launch(kind: Kind, processes: int, **sizes: int) -> Launch:
    block = {f"parallelism_config_{key}_size": size for key, size in sizes.items()}
    return Launch(kind, processes, "it.yaml", {"parallelism_config": block})


@pytest.mark.parametrize(
    ("where", "model", "changes", "says"),
    [
        (launch("zero", 4, dp_replicate=2), LLAMA, {}, "DeepSpeed shards over all ranks here: use hsdp"),
        (launch("replicated", 4, dp_shard=2), LLAMA, {}, "MULTI_GPU` shards nothing: use fsdp2 or hsdp"),
        (launch("zero", 2, tp=2), LLAMA, {}, "DeepSpeed needs unsharded matrices: use fsdp2_tp or tp"),
        (
            launch("fsdp2", 4, tp=4),
            LLAMA,
            {},
            "the 12 attention heads and the 6 key-value heads: set it to 3 or 6",
        ),
        (launch("fsdp2", 2, tp=2), {**LLAMA, "attention_dropout": 0.1}, {}, "`attention_dropout: 0.1`.*use fsdp2"),
        (launch("fsdp2", 2, tp=2), MIXTRAL, {}, "4 experts cannot be sharded by columns here: .*ep_size`, or fsdp2"),
        (launch("fsdp2", 2, tp=2), GPT2, {}, "transformers has no tensor parallel plan for this model: use fsdp2"),
        (launch("replicated", 2, tp=2), LLAMA, {"optimizer": {"name": "muon"}}, "Muon needs unsharded matrices"),
        (
            launch("fsdp2", 2, tp=2),
            LLAMA,
            {"optimizer": {"in_backward": True, "max_grad_norm": None}, "batch": {"rows": 2}},
            "use fsdp2, or `in_backward: false`",
        ),
        (launch("fsdp2", 2, tp=2), LLAMA, {"mode": "lora", "lora": {"dora": True}}, "DoRA divides by the norms"),
        (
            launch("fsdp2", 2, tp=2),
            LLAMA,
            {"mode": "qlora", "lora": {"rank": 4}, "quantization": {"type": "nf4"}},
            "4-bit blocks run along the rows",
        ),
    ],
)
def test_what_cannot_be_is_said_with_what_would_do(
    recipe: dict[str, Any],
    write_recipe: Any,
    where: Launch,
    model: dict[str, Any],
    changes: dict[str, Any],
    says: str,
) -> None:
    for section, values in changes.items():
        recipe[section] = {**recipe.get(section, {}), **values} if isinstance(values, dict) else values
    loaded = load_recipe(write_recipe(recipe))
    with pytest.raises(UserError, match=f"(?s)it.yaml cannot run recipe.yaml.*{says}"):
        check_combination(loaded, "recipe.yaml", where, AutoConfig.for_model(**model))


@pytest.mark.parametrize(
    "where",
    [launch("fsdp2", 4, dp_replicate=2), launch("fsdp2", 4, tp=2), launch("replicated", 4, tp=2), launch("zero", 4)],
)
def test_what_can_be_is_not_refused(recipe: dict[str, Any], write_recipe: Any, where: Launch) -> None:
    check_combination(load_recipe(write_recipe(recipe)), "recipe.yaml", where, AutoConfig.for_model(**LLAMA))


def test_a_plan_and_dropout_are_read_from_the_config() -> None:
    model = Architecture.of(AutoConfig.for_model(**{**LLAMA, "attention_dropout": 0.1}))
    assert (model.heads, model.kv_heads, model.dropouts) == (12, 6, {"attention_dropout": 0.1})
    assert model.tensor_styles == {"colwise", "rowwise"}
