"""Combinations of parallel dimensions, model, recipe and backend that are refused before a model loads."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3NextConfig,
)

from finetune.data.batch import TokenShare
from finetune.engine.context_parallel import apply_context_parallel
from finetune.engine.launch import Kind, Launch
from finetune.engine.parallelism import Parallelism
from finetune.engine.parallelism_rules import Architecture, check_combination
from finetune.errors import UserError
from finetune.models.attention import AttentionChoice
from finetune.models.moe import adapters_of, experts_of
from finetune.models.weights import add_adapters
from finetune.recipe import load_recipe
from finetune.recipe.schema import Lora

HEADS = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6}
LLAMA, ODD = LlamaConfig(**HEADS), LlamaConfig(**HEADS, intermediate_size=255)
DROPOUT = LlamaConfig(**HEADS, attention_dropout=0.1)
MIXTRAL_4 = AutoConfig.for_model("mixtral", **HEADS, num_local_experts=4)
LLAMA_4 = AutoConfig.for_model("llama4_text", **HEADS, num_local_experts=4)
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
SIX_HEADS = LlamaConfig(**SMALL)
SLIDING = MistralConfig(**SMALL, sliding_window=8)
SOFT_CAPPED = Gemma2Config(**SMALL, head_dim=8)
LINEAR = Qwen3NextConfig(**SMALL)
TINY_LLAMA, MIXTRAL, QWEN3_MOE = (AutoConfig.for_model(**tiny.MODELS[m]) for m in ("llama", "mixtral", "qwen3_moe"))
LORA = ("mode=lora", "lora={rank: 4, alpha: 8}")
QLORA = (*LORA, "mode=qlora", "quantization={type: nf4}")
IN_BACKWARD = ("optimizer.in_backward=true", "optimizer.max_grad_norm=null", "batch.rows=2")
BALANCE = ("objective.router_aux_loss_coef=0.1",)
ROLLOUTS = ("rollouts={prompts: 2, samples: 4, max_new_tokens: 8}", "batch.rows=8", "data.packing=false")
GRPO = (*ROLLOUTS, "objective={name: grpo}", "rewards=[{name: exact_match}]")
DISTILL = (*ROLLOUTS, "objective={name: distill, teacher: large}")


def launch(kind: Kind, processes: int, **sizes: int) -> Launch:
    block = {f"parallelism_config_{key}_size": size for key, size in sizes.items()}
    return Launch(kind, processes, "it.yaml", {"parallelism_config": block})


def check(path: Any, where: Launch, config: Any, overrides: tuple[str, ...] = ()) -> None:
    check_combination(load_recipe(path, overrides), "recipe.yaml", where, config)


HSDP, SHARDED = launch("zero", 4, dp_replicate=2), launch("replicated", 4, dp_shard=2)
ZERO_3 = Launch("zero", 2, "it.yaml", {"deepspeed_config": {"zero_stage": 3}})
TENSOR, CONTEXT, SEQUENCE = launch("fsdp2", 2, tp=2), launch("replicated", 2, cp=2), launch("replicated", 2, sp=2)
EXPERT = launch("fsdp2", 2, ep=2)
HEARS = ("data.audio={}", "model.train=[language]")
REFUSED = [
    (HSDP, LLAMA, (), "DeepSpeed shards over all ranks here: use hsdp"),
    (ZERO_3, AutoConfig.for_model("rwkv"), (), "ZeRO-3: rwkv: transformers cannot load its weights .*: use fsdp2 or"),
    (ZERO_3, AutoConfig.for_model("longcat_flash"), (), "ZeRO-3: longcat_flash: ranks call .* in different numbers"),
    *(
        (where, LLAMA, HEARS, "with a tower .*the tokens of a picture or clip.*use fsdp2")
        for where in (CONTEXT, SEQUENCE)
    ),
    (launch("replicated", 2, pp=2), LLAMA, HEARS, "with a tower .*to the first stage"),
    (EXPERT, MIXTRAL, HEARS, "with a tower .*it was not tried"),
    (SHARDED, LLAMA, (), "MULTI_GPU` shards nothing: use fsdp2 or hsdp"),
    (launch("zero", 2, tp=2), LLAMA, (), "DeepSpeed needs unsharded matrices: use fsdp2_tp or tp"),
    (launch("fsdp2", 4, tp=4), LLAMA, (), "the 12 attention heads and the 6 key-value heads: set it to 3 or 6"),
    (TENSOR, ODD, (), "the 255 inputs of the feed-forward's output: set it to 1"),
    (TENSOR, DROPOUT, (), "`attention_dropout: 0.1`.*use fsdp2"),
    (launch("fsdp2", 3, tp=3), MIXTRAL_4, (), "must divide the model's 4 experts: set it to 2 or 4"),
    (TENSOR, MIXTRAL_4, ("train.compile=true",), "choose a rank's experts differs from layer to layer"),
    (TENSOR, LLAMA_4, (), "experts of this model choose their tokens otherwise .*ep_size`, or fsdp2"),
    (TENSOR, GPT2Config(), (), "transformers has no tensor parallel plan for this model: use fsdp2"),
    (TENSOR, LLAMA, IN_BACKWARD, "use fsdp2, or `in_backward: false`"),
    (TENSOR, LLAMA, QLORA, "the 96 inputs of attention's output are packed in blocks of 64, .*: set it to 1, or use"),
    (TENSOR, LLAMA, (*QLORA, "quantization={type: fp8, compute: scaled}", "train.precision=bf16"), "largest of all"),
    (TENSOR, LLAMA, ("model.cross_entropy=liger",), "all of the vocabulary, which tensor ranks share: use `auto`"),
    (launch("replicated", 4, sp=4), SIX_HEADS, (), "sp_size: 4` must divide the 6 attention heads: .*3 or 6"),
    (CONTEXT, SLIDING, (), "this model's sliding attention: use .*sp_size"),
    (CONTEXT, SOFT_CAPPED, (), "sliding attention.*soft-capped attention logits.*sp_size"),
    (CONTEXT, LINEAR, (), "not support this model's linear attention: remove it"),
    (SEQUENCE, LINEAR, (), "has linear attention, which does not keep documents apart: remove it"),
    (CONTEXT, SIX_HEADS, ("train.compile=true",), "compiled layers .*set `train.compile: false`, or use"),
    (SEQUENCE, SIX_HEADS, ("model.attention=sdpa",), "`model.attention: sdpa`.*set `model.attention: auto`"),
    (CONTEXT, SIX_HEADS, ("model.attention=documents",), "has attention of its own.*set `auto`"),
    (CONTEXT, SIX_HEADS, (*LORA, "lora.dropout=0.1"), r"set `lora.dropout` \(now 0.1\) to 0"),
    (
        SEQUENCE,
        LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        (),
        "`dynamic` RoPE depend on a document's length",
    ),
    (SEQUENCE, GPT2Config(n_head=6, n_embd=48), (), "set the model's `attn_pdrop` to 0"),
    (EXPERT, TINY_LLAMA, (), "`parallelism_config_ep_size: 2`: the model has no experts: remove"),
    (launch("fsdp2", 6, ep=3), MIXTRAL, (), "must divide the model's 8 experts: set it to 2 or 4"),
    (launch("fsdp2", 6, ep=4), MIXTRAL, (), "must divide the 6 shards of a model: set it to 3 or 6"),
    (launch("fsdp2", 1, ep=2), MIXTRAL, (), "must divide the 1 shards of a model: set it to 1"),
    (launch("replicated", 2, ep=2), MIXTRAL, (), "needs FSDP's shards: set `distributed_type: FSDP`"),
    (launch("zero", 2, ep=2), MIXTRAL, (), "needs FSDP's shards: set `distributed_type: FSDP`"),
    (EXPERT, MIXTRAL, ("train.compile=true",), "with `train.compile: true`"),
    (launch("fsdp2", 2, cp=2), MIXTRAL, BALANCE, "cp_size: 2` with `objective.router_aux_loss_coef`: no rank sees"),
    (launch("fsdp2", 4, ep=2, tp=2), MIXTRAL, (), "`parallelism_config_tp_size: 2`: not supported"),
]


@pytest.mark.parametrize(("where", "config", "overrides", "message"), REFUSED)
def test_unsupported_combinations_are_refused_with_an_alternative(
    recipe: dict[str, Any], write_recipe: Any, where: Launch, config: Any, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=f"(?s)it.yaml cannot run recipe.yaml:\n.*{message}"):
        check(write_recipe(recipe), where, config, overrides)


SUPPORTED = [
    *((where, LLAMA, ()) for where in (launch("fsdp2", 4, dp_replicate=2), launch("fsdp2", 4, tp=2))),
    *((where, LLAMA, ()) for where in (launch("replicated", 4, tp=2), launch("zero", 4))),
    *(
        (where, config, ())
        for where in (CONTEXT, SEQUENCE, launch("replicated", 3, sp=3))
        for config in (SIX_HEADS, None)
    ),
    *((launch("replicated", 8, cp=4, sp=2), config, ()) for config in (SIX_HEADS, None)),
    *((SEQUENCE, config, ()) for config in (SLIDING, SOFT_CAPPED)),
    *((where, LLAMA, HEARS) for where in (launch("replicated", 2, tp=2), launch("fsdp2", 4, tp=2))),
    (ZERO_3, AutoConfig.for_model("gemma4"), HEARS),
    *(
        (launch("fsdp2", processes, ep=2), MIXTRAL, overrides)
        for processes in (2, 4, 6)
        for overrides in ((), (*LORA, "lora.targets=[q_proj]"), BALANCE)
    ),
    *(
        (where, SIX_HEADS, overrides)
        for where in (TENSOR, CONTEXT, SEQUENCE, launch("fsdp2", 4, dp_replicate=2), launch("replicated", 2, pp=2))
        for overrides in (GRPO, DISTILL)
    ),
]


@pytest.mark.parametrize(("where", "config", "overrides"), SUPPORTED)
def test_supported_combinations_are_not_refused(
    recipe: dict[str, Any], write_recipe: Any, where: Launch, config: Any, overrides: tuple[str, ...]
) -> None:
    check(write_recipe(recipe), where, config, overrides)


def test_heads_that_differ_between_layers() -> None:
    """Gemma 4: full attention has other key-value heads than sliding attention."""
    shape = {"num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 16, "attention_k_eq_v": True}
    config = AutoConfig.for_model("gemma4_text", **shape, num_global_key_value_heads=4)
    assert (Architecture.of(config).heads, Architecture.of(config).kv_heads) == (32, 4)


def test_plan_and_dropout_are_read_from_the_config() -> None:
    model = Architecture.of(DROPOUT)
    assert (model.heads, model.kv_heads, model.dropouts) == (12, 6, {"attention_dropout": 0.1})
    assert model.tensor_styles == {"colwise", "rowwise"}


# --- known only with the model's class


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            AttentionChoice("eager", "Mamba carries state", False),
            "state, so its tokens cannot be sharded",
        ),
        (
            AttentionChoice("eager", "no sdpa", True),
            "transformers' own attention `eager` does not .*no sdpa.*Fix: use data parallel only",
        ),
    ],
)
def test_attention_without_communication_is_refused(choice: AttentionChoice, message: str) -> None:
    with pytest.raises(UserError, match=f"context 2: .*{message}"):
        apply_context_parallel(choice, TokenShare(2), Parallelism(context=2), 0)


def test_attention_of_one_rank_is_unchanged() -> None:
    choice = AttentionChoice("eager", "no sdpa", True)
    assert apply_context_parallel(choice, TokenShare(), Parallelism(replicate=4), 0) is choice


def test_models_without_supported_experts_are_refused() -> None:
    with pytest.raises(UserError, match="LlamaForCausalLM has no experts that can be divided"):
        experts_of(AutoModelForCausalLM.from_config(TINY_LLAMA))
    mixtral = AutoModelForCausalLM.from_config(MIXTRAL)
    assert list(experts_of(mixtral)) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    adapted = add_adapters(mixtral, Lora(rank=4, alpha=8, targets="all-linear"), torch.float32)
    path = "base_model.model.model.layers.0.mlp.experts.base_layer.base_layer"
    assert path in experts_of(adapted)
    assert adapters_of(adapted, path).keys() == {"gate_up_proj", "down_proj"}
