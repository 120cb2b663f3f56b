"""Which expert parallel launches are refused, and what is said instead."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.engine.launch import Kind, Launch
from finetune.engine.parallelism_rules import check_combination
from finetune.errors import UserError
from finetune.models.adapters import add_adapters
from finetune.models.experts import experts_of
from finetune.recipe import load_recipe
from finetune.recipe.schema import Lora

LORA = ("mode=lora", "lora={rank: 4, alpha: 8}")


def check(path: Any, model: str, sizes: dict[str, int], kind: Kind, processes: int, overrides: tuple[str, ...]) -> None:
    block = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    launch = Launch(kind, processes, "ep.yaml", {"parallelism_config": block})
    check_combination(load_recipe(path, overrides), "r.yaml", launch, AutoConfig.for_model(**tiny.MODELS[model]))


@pytest.mark.parametrize(
    ("model", "sizes", "kind", "processes", "overrides", "says"),
    [
        ("llama", {"ep_size": 2}, "fsdp2", 2, (), "`parallelism_config_ep_size: 2`: the model has no experts: remove"),
        ("mixtral", {"ep_size": 3}, "fsdp2", 6, (), "must divide the model's 8 experts: set it to 2 or 4"),
        ("mixtral", {"ep_size": 4}, "fsdp2", 6, (), "must divide the 6 shards of a model: set it to 3 or 6"),
        ("mixtral", {"ep_size": 2}, "fsdp2", 1, (), "must divide the 1 shards of a model: set it to 1"),
        ("mixtral", {"ep_size": 2}, "replicated", 2, (), "needs FSDP's shards: set `distributed_type: FSDP`"),
        ("mixtral", {"ep_size": 2}, "zero", 2, (), "needs FSDP's shards: set `distributed_type: FSDP`"),
        ("mixtral", {"ep_size": 2}, "fsdp2", 2, ("train.compile=true",), "with `train.compile: true`"),
        ("qwen3_moe", {"ep_size": 2}, "fsdp2", 2, LORA, "with `lora.targets: all-linear`.*name layers"),
        (
            "mixtral",
            {"cp_size": 2},
            "fsdp2",
            2,
            ("objective.router_aux_loss_coef=0.1",),
            "`parallelism_config_cp_size: 2` with `objective.router_aux_loss_coef`: no rank sees",
        ),
        ("mixtral", {"ep_size": 2, "tp_size": 2}, "fsdp2", 4, (), "`parallelism_config_tp_size: 2`: not supported"),
    ],
)
def test_what_cannot_be_is_said(
    recipe: dict[str, Any],
    write_recipe: Any,
    model: str,
    sizes: dict[str, int],
    kind: Kind,
    processes: int,
    overrides: tuple[str, ...],
    says: str,
) -> None:
    with pytest.raises(UserError, match=rf"ep.yaml cannot run r.yaml:\n(.|\n)*{says}"):
        check(write_recipe(recipe), model, sizes, kind, processes, overrides)


def test_models_whose_experts_cannot_be_divided() -> None:
    with pytest.raises(UserError, match="LlamaForCausalLM has no experts that can be divided"):
        experts_of(AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny.MODELS["llama"])))
    mixtral = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny.MODELS["mixtral"]))
    assert list(experts_of(mixtral)) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    adapted = add_adapters(mixtral, Lora(rank=4, alpha=8, targets="all-linear"), torch.float32)
    with pytest.raises(UserError, match=r"lora.targets: .*layers.0.mlp.experts.* has adapters"):
        experts_of(adapted)


@pytest.mark.parametrize("overrides", [(), (*LORA, "lora.targets=[q_proj]"), ("objective.router_aux_loss_coef=0.1",)])
@pytest.mark.parametrize("processes", [2, 4, 6])
def test_what_can_be_is_not_refused(
    recipe: dict[str, Any], write_recipe: Any, processes: int, overrides: tuple[str, ...]
) -> None:
    check(write_recipe(recipe), "mixtral", {"ep_size": 2}, "fsdp2", processes, overrides)
