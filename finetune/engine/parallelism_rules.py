"""Rules for combinations of parallel dimensions, and for the model, recipe and backend they support.

Every rule yields messages, each with an alternative; `check_combination` raises all of them at once, before a model
loads. A rule refuses what is impossible or what a library below does not do correctly, never what is merely slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from finetune.engine.launch import Launch
from finetune.engine.parallelism import Parallelism, dimension_key
from finetune.engine.stages import PLAN, SINGLE_STAGE_SCHEDULES, schedulable_micro_batches
from finetune.errors import UserError
from finetune.models.base_config import layer_configs
from finetune.models.config import active_dropouts, length_dependent_rope
from finetune.recipe.schema import Recipe
from finetune.utils import divisors


@dataclass(frozen=True)
class Architecture:
    """Properties of a model that the rules need; 0 or empty for what it lacks."""

    layers: int
    heads: int
    kv_heads: int
    experts: int
    attention: tuple[str, ...]  # other than full causal attention: "sliding_attention", "chunked_attention"
    modules: tuple[str, ...] = ()  # modules of the base model, if transformers has a plan to split it between them
    soft_capped: bool = False  # attention's logits
    dropouts: dict[str, float] = field(default_factory=dict)  # settings of active dropout
    rope_types: tuple[str, ...] = ()  # those whose frequencies depend on the length of a document
    tensor_styles: frozenset[str] = frozenset()  # styles in the tensor parallel plan; empty without a plan

    @classmethod
    def of(cls, config: Any) -> Architecture:
        """Returns the properties from a transformers config."""
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
            attention=tuple(sorted(attention - {"full_attention"})),
            modules=tuple(sorted(getattr(text, "base_model_pp_plan", None) or ())),
            soft_capped=getattr(text, "attn_logit_softcapping", None) is not None,
            dropouts=dict(active_dropouts(text)),
            rope_types=tuple(length_dependent_rope(config)),
            tensor_styles=frozenset(tensor_plan(config).values()),
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


Rule = Callable[[Combination], Iterator[str]]


def check_combination(recipe: Recipe, recipe_file: str, launch: Launch, config: Any | None) -> None:
    """Raises UserError with the messages of all rules. config: of transformers, if available."""
    model = None if config is None else Architecture.of(config)
    combination = Combination(launch, launch.parallelism, recipe, model)
    problems = [problem for rule in RULES for problem in rule(combination)]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f"{launch.name} cannot run {recipe_file}:\n{lines}")


def tensor_plan(config: Any) -> dict[str, str]:
    """Returns the tensor parallel plan of a transformers config: {pattern: style}; empty without a plan."""
    return dict(getattr(config.get_text_config(), "base_model_tp_plan", None) or {})


def nearest_divisors(wanted: int, number: int) -> str:
    """Returns the divisors of `number` around `wanted`, for messages.

    >>> nearest_divisors(5, 12)
    '4 or 6'
    """
    below = [n for n in divisors(number) if n <= wanted][-1:]
    above = [n for n in divisors(number) if n > wanted][:1]
    return " or ".join(str(n) for n in below + above)


# --- data parallel


def shards_and_replicas(combination: Combination) -> Iterator[str]:
    """Checks data parallel dimensions: HSDP needs FSDP2; plain replicas have no shards."""
    kind, sizes, key = combination.launch.kind, combination.sizes, combination.key
    if kind == "zero" and sizes.replicate > 1:
        yield f"{key('replicate')}: DeepSpeed shards over all ranks here: use hsdp, or remove it"
    if kind == "replicated" and sizes.shard > 1:
        yield f"{key('shard')}: `distributed_type: MULTI_GPU` shards nothing: use fsdp2 or hsdp, or remove it"


# --- tensor parallel


def tensor_backends(combination: Combination) -> Iterator[str]:
    """Refuses what needs unsharded matrices: they are sharded before torch's fully_shard, which sees smaller ones."""
    if combination.sizes.tensor == 1:
        return
    key, recipe = combination.key("tensor"), combination.recipe
    if combination.launch.kind == "zero":
        yield f"{key}: DeepSpeed needs unsharded matrices: use fsdp2_tp or tp"
    if recipe.mode == "qlora":
        yield f"{key} with `mode: qlora`: 4-bit blocks run along the rows, and columns would split them: use fsdp2"
    if recipe.lora is not None and recipe.lora.dora:
        yield f"{key} with `lora.dora: true`: DoRA divides by the norms of full rows, and ranks have parts: use fsdp2"
    if recipe.optimizer.in_backward:
        yield (
            f"{key} with `optimizer.in_backward: true`: the gradient of a norm between sharded matrices is complete "
            "only after all ranks have summed theirs: use fsdp2, or `in_backward: false`"
        )
    if recipe.optimizer.name == "muon":
        yield f"{key}: Muon needs unsharded matrices: use ddp, or another optimizer"


def tensor_shape(combination: Combination) -> Iterator[str]:
    """Requires full heads on each rank, and the same random numbers on all ranks."""
    size, model = combination.sizes.tensor, combination.model
    if size == 1 or model is None:
        return
    key = combination.key("tensor")
    if model.experts:
        instead = f"use `{dimension_key('expert')}`, or fsdp2"
        yield f"{key}: the model's {model.experts} experts cannot be sharded by columns here: {instead}"
    elif not model.tensor_styles:
        yield f"{key}: transformers has no tensor parallel plan for this model: use fsdp2"
    if "colwise" in model.tensor_styles and (model.heads % size or model.kv_heads % size):
        common = math.gcd(model.heads, model.kv_heads)
        yield (
            f"{key} must divide the {model.heads} attention heads and the {model.kv_heads} key-value heads: "
            f"set it to {nearest_divisors(size, common)}"
        )
    if dropout := model.dropouts.get("attention_dropout"):
        yield (
            f"{key}: the model has attention dropout (`attention_dropout: {dropout}`), and each rank would draw for "
            "other heads than one process does: use fsdp2"
        )


# --- context parallel and Ulysses


def context_and_sequence(combination: Combination) -> Iterator[str]:
    """Rules for rows whose tokens several ranks share."""
    if combination.sizes.tokens == 1:
        return
    keys = " and ".join(combination.key(name) for name in combination.uses("context", "sequence"))
    for name in combination.dropouts():
        yield f"{keys}: each rank would draw dropout for its own tokens, so losses would depend on it: set {name} to 0"
    for rope_type in combination.model.rope_types if combination.model else ():
        yield (
            f"{keys}: the frequencies of this model's `{rope_type}` RoPE depend on a document's length, and a rank has "
            "a part of it: use data parallel alone"
        )
    attention = combination.recipe.model.attention
    if attention in ("eager", "sdpa", "flash_attention_2"):
        yield (
            f"{keys}: `model.attention: {attention}` is transformers' own, which does not communicate with other "
            "ranks: set `model.attention: auto`"
        )


def context(combination: Combination) -> Iterator[str]:
    """Requires full causal attention, the only kind that the kernels for documents on several ranks support."""
    if combination.sizes.context == 1:
        return
    key, model, attention = combination.key("context"), combination.model, combination.recipe.model.attention
    ulysses = f"use `{dimension_key('sequence')}`, whose ranks attend to full rows"
    if attention in ("documents", "varlen", "flex", "flash_attention_3"):
        yield f"{key}: context parallel has attention of its own, not `model.attention: {attention}`: set `auto`"
    if combination.recipe.train.compile:
        yield (f"{key}: compiled layers would be traced again for each row: set `train.compile: false`, or {ulysses}")
    if model is None:
        return
    for kind in model.attention:
        instead = ulysses if kind == "sliding_attention" else "remove it"
        yield f"{key} does not support this model's {kind.replace('_', ' ')}: {instead}"
    if model.soft_capped:
        yield f"{key} does not support this model's soft-capped attention logits: {ulysses}"


def sequence(combination: Combination) -> Iterator[str]:
    """Requires full heads on each rank of Ulysses."""
    size, tensor, model = combination.sizes.sequence, combination.sizes.tensor, combination.model
    if size == 1 or model is None:
        return
    key, heads = combination.key("sequence"), model.heads // tensor
    if heads % size:
        on_ranks = f" on each of {tensor} tensor ranks" if tensor > 1 else ""
        yield f"{key} must divide the {heads} attention heads{on_ranks}: set it to {nearest_divisors(size, heads)}"
    for kind in sorted(set(model.attention) - {"sliding_attention"}):
        yield f"{key}: this model has {kind.replace('_', ' ')}, which does not keep documents apart: remove it"


# --- pipeline parallel


def pipeline_stages(combination: Combination) -> Iterator[str]:
    """Checks that model and backend can be split into this many stages."""
    sizes, model = combination.sizes, combination.model
    key, schedule = combination.key("pipeline"), dimension_key("schedule")
    if sizes.stages_per_rank > 1 and (sizes.pipeline == 1 or sizes.schedule in SINGLE_STAGE_SCHEDULES):
        yield (
            f"{combination.key('stages_per_rank')} has an effect with a pipeline and `interleaved` or `zero_bubble` "
            f"only: remove it, or set `{schedule}: interleaved`"
        )
    if sizes.pipeline == 1:
        return
    if sizes.schedule == "interleaved" and sizes.stages_per_rank == 1:
        at_least_two = f"`{dimension_key('stages_per_rank')}: 2` or more"
        yield f"{combination.key('schedule')} needs {at_least_two}; with one it is `1f1b`"
    if combination.launch.kind != "replicated" or sizes.shard > 1:
        yield f"{key} cannot be combined with sharding of its stages: use `distributed_type: MULTI_GPU`"
    for name in combination.uses("context", "sequence", "tensor", "expert"):
        yield f"{key} with {combination.key(name)}: not supported: remove one"
    if model is None:
        return
    if frozenset(model.modules) != PLAN:
        yield f"{key}: this architecture is not just an embedding, layers and a norm: remove it"
    stages = sizes.pipeline * sizes.stages_per_rank
    if stages > model.layers:
        most = max(1, model.layers // sizes.stages_per_rank)
        yield f"{key}: {stages} stages need as many layers, and the model has {model.layers}: set it to {most} or less"


def pipeline_micro_batches(combination: Combination) -> Iterator[str]:
    """Checks that the schedule can run a step's micro-batches. If their number varies, empty ones pad it."""
    sizes, batch = combination.sizes, combination.recipe.batch
    if sizes.pipeline == 1 or batch.rows_per_device == "auto" or batch.tokens_per_device is not None:
        return
    if batch.rows % (batch.rows_per_device * sizes.data):
        return  # reported by check_launch
    rows = batch.rows // sizes.data  # per pipeline

    def schedulable(count: int) -> int:
        return schedulable_micro_batches(sizes.schedule, sizes.pipeline, count)

    if (count := rows // batch.rows_per_device) and schedulable(count) != count:
        others = [n for n in divisors(rows) if schedulable(rows // n) == rows // n]
        near = sorted(others, key=lambda n: abs(n - int(batch.rows_per_device)))[:2]
        advice = [f"`batch.rows_per_device: {n}`" for n in sorted(near)]
        advice += [f"`batch.rows: {schedulable(count) * batch.rows // count}`"]
        if sizes.schedule in SINGLE_STAGE_SCHEDULES:
            advice.append(f"`{dimension_key('schedule')}: gpipe`")
        yield (
            f"{combination.key('schedule')} on {sizes.pipeline} ranks cannot run {count} micro-batches a step: "
            f"set {' or '.join(advice)}"
        )


def pipeline_recipe(combination: Combination) -> Iterator[str]:
    """Refuses settings of a recipe that a pipeline does not support."""
    if combination.sizes.pipeline == 1:
        return
    recipe, key = combination.recipe, combination.key("pipeline")
    if recipe.batch.rows_per_device == "auto":
        yield (
            f"{key}: `batch.rows_per_device: auto` tries one micro-batch, and a stage holds several at a time: "
            "give a number"
        )
    if recipe.optimizer.in_backward:
        yield f"{key}: `optimizer.in_backward` needs one micro-batch a step, a pipeline needs several: set `false`"
    for name in combination.dropouts():
        yield (
            f"{key}: dropout draws its numbers layer after layer, and a stage does not know those of the layers before "
            f"it: set {name} to 0"
        )
    if combination.sizes.schedule == "zero_bubble":
        yield from _zero_bubble(combination.key("schedule"), recipe)


def _zero_bubble(key: str, recipe: Recipe) -> Iterator[str]:
    """Checks zero bubble: torch runs each backward in two parts, for gradients of inputs, then those of weights."""
    if recipe.train.compile:
        yield f"{key}: torch cannot split a compiled backward: use `1f1b`, or `compile: false`"
    if recipe.model.cross_entropy != "plain":
        yield (
            f"{key} runs a backward twice, and `model.cross_entropy: {recipe.model.cross_entropy}` has its gradients "
            "once: use `1f1b`, or `cross_entropy: plain`, which stores all logits"
        )
    if recipe.train.activation_checkpointing:
        yield (
            f"{key} runs a backward twice, and recomputed activations exist once: use `1f1b`, or "
            "`activation_checkpointing: false`"
        )


# --- expert parallel


def expert_shards(combination: Combination) -> Iterator[str]:
    """Checks that the ranks of a shard group can divide the experts."""
    sizes = combination.sizes
    if sizes.expert == 1:
        return
    key = combination.key("expert")
    if combination.launch.kind != "fsdp2":
        yield f"{key} needs FSDP's shards: set `distributed_type: FSDP`, or remove it"
    elif sizes.shard % sizes.expert:
        fits = nearest_divisors(sizes.expert, sizes.shard)
        yield f"{key} must divide the {sizes.shard} shards of a model: set it to {fits}"
    for name in combination.uses("tensor", "context", "sequence", "pipeline"):
        yield f"{key} with {combination.key(name)}: not supported: remove one"


def expert_number(combination: Combination) -> Iterator[str]:
    size, model = combination.sizes.expert, combination.model
    if size == 1 or model is None:
        return
    key = combination.key("expert")
    if model.experts == 0:
        yield f"{key}: the model has no experts: remove it"
    elif model.experts % size:
        fits = nearest_divisors(size, model.experts)
        yield f"{key} must divide the model's {model.experts} experts: set it to {fits}"


def expert_recipe(combination: Combination) -> Iterator[str]:
    """Refuses settings that would need the experts of other ranks."""
    if combination.sizes.expert == 1:
        return
    key, recipe = combination.key("expert"), combination.recipe
    if recipe.train.compile:
        yield (
            f"{key} with `train.compile: true`: the number of tokens sent differs from layer to layer, and layers are "
            "compiled for one number: set `train.compile: false`"
        )


def router_balance_of_rows(combination: Combination) -> Iterator[str]:
    """Refuses the load balancing loss on divided rows: it averages over full rows."""
    if not combination.recipe.objective.router_aux_loss_coef:
        return
    for name in combination.uses("context", "sequence", "pipeline"):
        yield (
            f"{combination.key(name)} with `objective.router_aux_loss_coef`: no rank sees all routers of a full row: "
            "set one of the two to 0 or 1"
        )


def images(combination: Combination) -> Iterator[str]:
    """Refuses dimensions that would divide a tower: a tower and its images are on every rank in full."""
    if combination.recipe.model.train is None:
        return
    why = {
        "tensor": "transformers has no plan to split a tower between ranks",
        "context": "an image's tokens would lie on several ranks, and its pixels on each",
        "sequence": "an image's tokens would lie on several ranks, and its pixels on each",
        "pipeline": "the tower's output would have to travel to the first stage, and with DeepStack to later ones",
        "expert": "it was not tried with images",
    }
    for name in combination.uses(*why):
        yield f"{combination.key(name)} with images (`model.train`): {why[name]}: use fsdp2, hsdp, zero3 or ddp"


RULES: tuple[Rule, ...] = (
    shards_and_replicas,
    tensor_backends,
    tensor_shape,
    context_and_sequence,
    context,
    sequence,
    pipeline_stages,
    pipeline_micro_batches,
    pipeline_recipe,
    expert_shards,
    expert_number,
    expert_recipe,
    router_balance_of_rows,
    images,
)
