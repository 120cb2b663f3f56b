"""Rules for combinations of parallel dimensions, and for the model, recipe and backend they support.

Every rule yields messages, each with an alternative; `check_combination` raises all of them at once, before a model
loads. A rule refuses what is impossible or what a library below does not do correctly, never what is merely slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from finetune.engine.launch import Launch
from finetune.engine.parallelism import Parallelism, dimension_key
from finetune.engine.split_trial import tensor_split_problem
from finetune.engine.stage_trial import stage_problem
from finetune.engine.stages import SINGLE_STAGE_SCHEDULES, schedulable_micro_batches
from finetune.errors import UserError
from finetune.models.base_config import layer_configs
from finetune.models.config import EXPERTS_STYLE, active_dropouts, length_dependent_rope, tensor_plan
from finetune.models.stored_config import stored_format
from finetune.recipe.schema import Recipe
from finetune.utils import divisors, nearest_divisors

BLOCK = 64  # weights of a row that share a scale in 4 bits, by bitsandbytes' default


# What other configs train, but ZeRO-3 does not: its ranks have to call the same modules in the same order, and sharded
# weights have no shape while transformers loads them.
_NOT_UNDER_ZERO_3 = {
    "longcat_flash": "ranks call the experts that do nothing in different numbers",
    "qwen4_exp": "the gathers of its ranks do not match",
    "qwen4_exp_text": "the gathers of its ranks do not match",
    "rwkv": "transformers cannot load its weights into shards",
    "xlstm": "transformers cannot load its weights into shards",
}


@dataclass(frozen=True)
class Architecture:
    """Properties of a model that the rules need; 0 or empty for what it lacks."""

    layers: int
    heads: int
    kv_heads: int
    experts: int
    model_type: str
    attention: tuple[str, ...]  # other than full causal attention: "sliding_attention", "chunked_attention"
    not_in_stages: str | None = None  # why it cannot be divided into stages of layers, if that was asked
    not_divided: str | None = None  # why ranks of a tensor parallel group compute something else, if that was asked
    soft_capped: bool = False  # attention's logits
    dropouts: dict[str, float] = field(default_factory=dict)  # settings of active dropout
    rope_types: tuple[str, ...] = ()  # those whose frequencies depend on the length of a document
    tensor_styles: frozenset[str] = frozenset()  # styles in the tensor parallel plan; empty without a plan
    stored: str | None = None  # the format of a checkpoint of fewer bits
    widths: dict[str, int] = field(default_factory=dict)  # inputs of row parallel matrices, by what they are inputs of

    @classmethod
    def of(cls, config: Any, in_stages: bool = False, divided: bool = False) -> Architecture:
        """Returns the properties from a transformers config. in_stages, divided: try whether its layers can be stages
        of a pipeline, and its matrices be divided."""
        text = config.get_text_config()
        # Layers may have different numbers of heads (Gemma 4): a divisor of all of them divides their common divisor.
        layers = layer_configs(text)
        heads = math.gcd(*(getattr(layer, "num_attention_heads", 0) or 0 for layer in layers))
        kv_heads = math.gcd(*(getattr(layer, "num_key_value_heads", 0) or 0 for layer in layers))
        attention = set(getattr(text, "layer_types", None) or ())
        if not attention and getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
            attention = {"sliding_attention"}
        return cls(
            layers=getattr(text, "num_hidden_layers", 0) or 0,
            heads=heads,
            kv_heads=kv_heads or heads,
            experts=getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0,
            model_type=config.model_type,
            attention=tuple(sorted(attention - {"full_attention"})),
            not_in_stages=stage_problem(config) if in_stages else None,
            not_divided=tensor_split_problem(config) if divided else None,
            soft_capped=getattr(text, "attn_logit_softcapping", None) is not None,
            dropouts=dict(active_dropouts(text)),
            rope_types=tuple(length_dependent_rope(config)),
            tensor_styles=frozenset(tensor_plan(config).values()),
            stored=form.name if (form := stored_format(config)) is not None else None,
            widths=row_parallel_widths(config),
        )


@dataclass(frozen=True)
class Combination:
    """Input of the rules."""

    launch: Launch
    sizes: Parallelism
    recipe: Recipe
    model: Architecture | None  # None: config of the model not read yet

    def key(self, dimension: str) -> str:
        """Returns `parallelism_config_tp_size: 4`, as it is in the config."""
        return f"`{dimension_key(dimension)}: {getattr(self.sizes, dimension)}`"

    def uses(self, *dimensions: str) -> list[str]:
        """Returns the dimensions with more than one rank."""
        return [name for name in dimensions if getattr(self.sizes, name) > 1]

    def dropouts(self) -> Iterator[str]:
        """Yields the settings of active dropout."""
        lora = self.recipe.lora
        if lora is not None and lora.dropout:
            yield f"`lora.dropout` (now {lora.dropout})"
        for name in self.model.dropouts if self.model else {}:
            yield f"the model's `{name}`"


def check_combination(recipe: Recipe, recipe_file: str, launch: Launch, config: Any | None) -> None:
    """Raises UserError with the messages of all rules. config: of transformers, if available."""
    sizes = launch.parallelism
    model = None if config is None else Architecture.of(config, sizes.pipeline > 1, sizes.tensor > 1)
    combination = Combination(launch, launch.parallelism, recipe, model)
    problems = [problem for rule in RULES for problem in rule(combination)]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(
            f"{launch.name} cannot run {recipe_file}:\n{lines}\nFix: change what each line names, or use another "
            "accelerate config"
        )


def row_parallel_widths(config: Any) -> dict[str, int]:
    """Returns the inputs of the matrices that a tensor parallel plan shards by columns, by what they are inputs of; a
    common divisor if layers differ."""
    plan, widths = tensor_plan(config), dict[str, int]()
    for layer in layer_configs(config.get_text_config()):
        if plan.get("layers.*.self_attn.o_proj") == "rowwise":
            heads = layer.num_attention_heads
            each = [getattr(layer, name, None) for name in ("v_head_dim", "head_dim")]
            width = heads * next((one for one in each if one), layer.hidden_size // heads)
            widths["attention's output"] = math.gcd(width, widths.get("attention's output", 0))
        if plan.get("layers.*.mlp.down_proj") == "rowwise":
            width = layer.intermediate_size
            width = math.gcd(*width) if isinstance(width, list) else width
            widths["the feed-forward's output"] = math.gcd(width, widths.get("the feed-forward's output", 0))
    return widths


# --- rules, by dimension


def zero_3(c: Combination) -> Iterator[str]:
    """DeepSpeed gathers the weights of a module as it is called, on all ranks at the same time."""
    if c.launch.kind != "zero" or c.launch.zero_stage != 3 or c.model is None:
        return
    name = c.model.model_type
    if name in _NOT_UNDER_ZERO_3:
        yield f"ZeRO-3: {name}: {_NOT_UNDER_ZERO_3[name]}: use fsdp2 or zero2"


def stored_base(c: Combination) -> Iterator[str]:
    """Weights that stay as they are stored are read and sharded as bytes."""
    if c.model is None or c.model.stored is None or c.recipe.model.stored == "unpack":
        return
    what = f"a base that stays in {c.model.stored}"
    instead = "use fsdp2, or `model.stored: unpack`"
    if c.sizes.tensor > 1:
        yield f"{c.key('tensor')} with {what}: ranks would split blocks that share a scale: {instead}"
    if c.sizes.pipeline > 1:
        yield f"{c.key('pipeline')} with {what}: a stage reads its own layers, and these are read for all: {instead}"


def data_parallel(c: Combination) -> Iterator[str]:
    """HSDP needs FSDP2; plain replicas have no shards."""
    if c.launch.kind == "zero" and c.sizes.replicate > 1:
        yield f"{c.key('replicate')}: DeepSpeed shards over all ranks here: use hsdp, or remove it"
    if c.launch.kind == "replicated" and c.sizes.shard > 1:
        yield f"{c.key('shard')}: `distributed_type: MULTI_GPU` shards nothing: use fsdp2 or hsdp, or remove it"


def tensor_parallel(c: Combination) -> Iterator[str]:
    """Ranks have parts of the matrices, with full heads, and draw the same random numbers."""
    key, size, recipe, model = c.key("tensor"), c.sizes.tensor, c.recipe, c.model
    if size == 1:
        return
    if c.launch.kind == "zero":
        yield f"{key}: DeepSpeed needs unsharded matrices: use fsdp2_tp or tp"
    if recipe.quantization is not None and recipe.quantization.compute == "scaled":
        yield (
            f"{key} with `quantization.compute: scaled`: a token is rounded by the largest of all its features, of "
            "which a rank has some: use fsdp2, or `compute: dequantised`"
        )
    if recipe.model.cross_entropy == "liger":
        yield (
            f"{key} with `model.cross_entropy: liger`: it takes all of the vocabulary, which "
            "tensor ranks share: use `auto`"
        )
    if recipe.optimizer.in_backward:
        yield (
            f"{key} with `optimizer.in_backward: true`: the gradient of a norm between sharded matrices is complete "
            "only after all ranks have summed theirs: use fsdp2, or `in_backward: false`"
        )
    if model is None:
        return
    if not model.tensor_styles:
        instead = f"`{dimension_key('expert')}`, or fsdp2" if model.experts else "fsdp2"
        yield f"{key}: transformers has no tensor parallel plan for this model: use {instead}"
    if model.not_divided is not None:
        yield f"{key}: ranks would not compute what one process does: {model.not_divided}: use fsdp2"
    if "colwise" in model.tensor_styles and (model.heads % size or model.kv_heads % size):
        fits = nearest_divisors(size, math.gcd(model.heads, model.kv_heads))
        heads = f"{model.heads} attention heads and the {model.kv_heads} key-value heads"
        yield f"{key} must divide the {heads}: set it to {fits}"
    for name, width in model.widths.items():
        if width % size:
            yield f"{key} must divide the {width:,} inputs of {name}: set it to {nearest_divisors(size, width)}"
        elif recipe.quantization is not None and recipe.quantization.type != "fp8" and width % (BLOCK * size):
            yield (
                f"{key} with `quantization.type: {recipe.quantization.type}`: the {width:,} inputs of {name} are "
                f"packed in blocks of {BLOCK}, which ranks would split: set it to "
                f"{nearest_divisors(size, width // BLOCK or 1)}, or use fsdp2"
            )
    if dropout := model.dropouts.get("attention_dropout"):
        yield (
            f"{key}: the model has attention dropout (`attention_dropout: {dropout}`), and each rank would draw for "
            "other heads than one process does: use fsdp2"
        )


def tensor_experts(c: Combination) -> Iterator[str]:
    """Tensor ranks have different experts of a layer."""
    key, size, model = c.key("tensor"), c.sizes.tensor, c.model
    if size == 1 or model is None or not model.experts or not model.tensor_styles:
        return
    if EXPERTS_STYLE not in model.tensor_styles or "packed_rowwise" in model.tensor_styles:
        instead = f"use `{dimension_key('expert')}`, or fsdp2"
        yield f"{key}: the experts of this model choose their tokens otherwise than others do: {instead}"
    elif model.experts % size:
        fits = nearest_divisors(size, model.experts)
        yield f"{key} must divide the model's {model.experts} experts: set it to {fits}"
    if c.recipe.train.compile:
        yield (
            f"{key} with `train.compile: true`: the number of tokens that choose a rank's experts differs from layer "
            "to layer, and layers are compiled for one number: set `train.compile: false`"
        )


def token_parallel(c: Combination) -> Iterator[str]:
    """Context parallel and Ulysses: several ranks share the tokens of a row."""
    if c.sizes.tokens == 1:
        return
    keys = " and ".join(c.key(name) for name in c.uses("context", "sequence"))
    for name in c.dropouts():
        yield f"{keys}: each rank would draw dropout for its own tokens, so losses would depend on it: set {name} to 0"
    for rope_type in c.model.rope_types if c.model else ():
        yield (
            f"{keys}: the frequencies of this model's `{rope_type}` RoPE depend on a document's length, and a rank has "
            "a part of it: use data parallel alone"
        )
    attention = c.recipe.model.attention
    if attention in ("eager", "sdpa", "flash_attention_2"):
        yield (
            f"{keys}: `model.attention: {attention}` is transformers' own, which does not communicate with other "
            "ranks: set `model.attention: auto`"
        )
    if c.sizes.context > 1:
        # The kernels for documents on several ranks support full causal attention only.
        key = c.key("context")
        ulysses = f"use `{dimension_key('sequence')}`, whose ranks attend to full rows"
        if attention in ("documents", "varlen", "flex", "flash_attention_3"):
            yield f"{key}: context parallel has attention of its own, not `model.attention: {attention}`: set `auto`"
        if c.recipe.train.compile:
            yield f"{key}: compiled layers would be traced again for each row: set `train.compile: false`, or {ulysses}"
        for kind in c.model.attention if c.model else ():
            instead = ulysses if kind == "sliding_attention" else "remove it"
            yield f"{key} does not support this model's {kind.replace('_', ' ')}: {instead}"
        if c.model and c.model.soft_capped:
            yield f"{key} does not support this model's soft-capped attention logits: {ulysses}"
    if (size := c.sizes.sequence) == 1 or c.model is None:
        return
    key, heads = c.key("sequence"), c.model.heads // c.sizes.tensor
    if heads % size:
        on_ranks = f" on each of {c.sizes.tensor} tensor ranks" if c.sizes.tensor > 1 else ""
        yield f"{key} must divide the {heads} attention heads{on_ranks}: set it to {nearest_divisors(size, heads)}"
    for kind in sorted(set(c.model.attention) - {"sliding_attention"}):
        yield f"{key}: this model has {kind.replace('_', ' ')}, which does not keep documents apart: remove it"


def pipeline_stages(c: Combination) -> Iterator[str]:
    """Model and backend must be divisible into this many stages."""
    sizes, key, schedule = c.sizes, c.key("pipeline"), dimension_key("schedule")
    if sizes.stages_per_rank > 1 and (sizes.pipeline == 1 or sizes.schedule in SINGLE_STAGE_SCHEDULES):
        yield (
            f"{c.key('stages_per_rank')} has an effect with a pipeline and `interleaved` or `zero_bubble` only: "
            f"remove it, or set `{schedule}: interleaved`"
        )
    if sizes.pipeline == 1:
        return
    if sizes.schedule == "interleaved" and sizes.stages_per_rank == 1:
        at_least_two = f"`{dimension_key('stages_per_rank')}: 2` or more"
        yield f"{c.key('schedule')} needs {at_least_two}; with one it is `1f1b`"
    if c.launch.kind == "zero":
        yield f"{key}: DeepSpeed's engine has schedules of its own, without its shards: use pp_fsdp2, or pp"
    if c.model is None:
        return
    if c.model.not_in_stages is not None:
        yield f"{key}: a stage cannot hold a part of this model's layers: {c.model.not_in_stages}: use fsdp2"
    if (stages := sizes.pipeline * sizes.stages_per_rank) > (layers := c.model.layers):
        most = max(1, layers // sizes.stages_per_rank)
        yield f"{key}: {stages} stages need as many layers, and the model has {layers}: set it to {most} or less"


def pipeline_micro_batches(c: Combination) -> Iterator[str]:
    """The schedule must be able to run a step's micro-batches. If their number varies, empty ones pad it."""
    sizes, batch = c.sizes, c.recipe.batch
    if sizes.pipeline == 1 or batch.tokens_per_device is not None:
        return
    rows_per_device = 1 if batch.rows_per_device == "auto" else batch.rows_per_device
    if batch.rows % (rows_per_device * sizes.data):
        return  # reported by check_launch
    rows = batch.rows // sizes.data  # per pipeline

    def schedulable(count: int) -> int:
        return schedulable_micro_batches(sizes.schedule, sizes.pipeline, count)

    if (count := rows // rows_per_device) and schedulable(count) != count:
        others = [n for n in divisors(rows) if schedulable(rows // n) == rows // n]
        if others and batch.rows_per_device == "auto":
            return  # it chooses among these
        near = sorted(others, key=lambda n: abs(n - rows_per_device))[:2]
        advice = [f"`batch.rows_per_device: {n}`" for n in sorted(near)]
        advice += [f"`batch.rows: {schedulable(count) * batch.rows // count}`"]
        if sizes.schedule in SINGLE_STAGE_SCHEDULES:
            advice.append(f"`{dimension_key('schedule')}: gpipe`")
        yield (
            f"{c.key('schedule')} on {sizes.pipeline} ranks cannot run {count} micro-batches a step: "
            f"set {' or '.join(advice)}"
        )


def pipeline_recipe(c: Combination) -> Iterator[str]:
    """Settings of a recipe that a pipeline does not support."""
    key, recipe = c.key("pipeline"), c.recipe
    if c.sizes.pipeline == 1:
        return
    if recipe.optimizer.in_backward:
        yield f"{key}: `optimizer.in_backward` needs one micro-batch a step, a pipeline needs several: set `false`"
    for name in c.dropouts():
        if "layerdrop" in name:
            yield f"{key}: whole layers are left out at random, those of other stages as well: set {name} to 0"
    if c.sizes.schedule != "zero_bubble":
        return
    if c.launch.frees_gathered:
        yield (
            f"{c.key('schedule')}: gradients of weights come when FSDP2 has reduced and freed the layer: set "
            f"`fsdp_reshard_after_forward: false`, or `{dimension_key('schedule')}: 1f1b`"
        )
    for name in c.uses("context", "sequence", "tensor", "expert"):
        yield (
            f"{c.key('schedule')} with {c.key(name)}: ranks exchange in the backward of a layer, which this schedule "
            f"splits: use `{dimension_key('schedule')}: 1f1b`"
        )
    key, loss = c.key("schedule"), recipe.model.cross_entropy  # torch runs each backward in two parts
    if recipe.train.compile:
        yield f"{key}: torch cannot split a compiled backward: use `1f1b`, or `compile: false`"
    if recipe.mtp_weight is not None:
        yield (
            f"{key} splits a backward into gradients of inputs and of weights, and the head of `model.mtp: train` has "
            "a second path to the embedding: use `1f1b`"
        )
    elif loss != "plain":
        yield (
            f"{key} runs a backward twice, and `model.cross_entropy: {loss}` has its gradients once: use `1f1b`, or "
            "`cross_entropy: plain`, which stores all logits"
        )
    if recipe.train.activation_checkpointing:
        yield (
            f"{key} runs a backward twice, and recomputed activations exist once: use `1f1b`, or "
            "`activation_checkpointing: false`"
        )


def expert_parallel(c: Combination) -> Iterator[str]:
    """The ranks of a shard group divide the experts."""
    key, size, shards, model = c.key("expert"), c.sizes.expert, c.sizes.shard, c.model
    if size == 1:
        return
    if c.launch.kind != "fsdp2":
        yield f"{key} needs FSDP's shards: set `distributed_type: FSDP`, or remove it"
    elif shards % size:
        yield f"{key} must divide the {shards} shards of a model: set it to {nearest_divisors(size, shards)}"
    for name in c.uses("tensor", "context", "sequence"):
        yield f"{key} with {c.key(name)}: not supported: use pp_fsdp2 with `{dimension_key('expert')}`, or remove one"
    if model is not None and model.experts == 0:
        yield f"{key}: the model has no experts: remove it"
    elif model is not None and model.experts % size:
        fits = nearest_divisors(size, model.experts)
        yield f"{key} must divide the model's {model.experts} experts: set it to {fits}"
    if c.recipe.train.compile:
        yield (
            f"{key} with `train.compile: true`: the number of tokens sent differs from layer to layer, and layers are "
            "compiled for one number: set `train.compile: false`"
        )


def router_balance(c: Combination) -> Iterator[str]:
    """The load balancing loss averages over full rows."""
    for name in c.uses("context", "sequence", "pipeline") if c.recipe.objective.router_aux_loss_coef else ():
        yield (
            f"{c.key(name)} with `objective.router_aux_loss_coef`: no rank sees all routers of a full row: "
            "set one of the two to 0 or 1"
        )


def towers(c: Combination) -> Iterator[str]:
    """A tower and its files are on every rank in full, beside a language model in parts of matrices (tensor)."""
    shared = "the tokens of a picture or clip would lie on several ranks, and its file on each"
    why = {
        "context": shared,
        "sequence": shared,
        "pipeline": "the tower's output would have to travel to the first stage, and with DeepStack to later ones",
        "expert": "it was not tried with a tower",
    }
    for name in c.uses(*why) if c.recipe.model.train is not None else ():
        yield f"{c.key(name)} with a tower (`model.train`): {why[name]}: use fsdp2, hsdp, tp, zero3 or ddp"


RULES = (
    zero_3,
    stored_base,
    data_parallel,
    tensor_parallel,
    tensor_experts,
    token_parallel,
    pipeline_stages,
    pipeline_micro_batches,
    pipeline_recipe,
    expert_parallel,
    router_balance,
    towers,
)
