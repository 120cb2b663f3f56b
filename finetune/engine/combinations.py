"""Which ways of dividing the work go together, and with which model, recipe and backend: the rules, in one place.

Every rule gives messages, each with what would do instead; `check_combination` raises them all at once, before a model
loads. A rule says what it refuses because it cannot be, or because the stack below does not do it right; never what is
merely slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.engine.parallelism import Parallelism, dimension_key
from finetune.engine.schedule import ONE_STAGE, fitting
from finetune.engine.stages import PLAN
from finetune.errors import UserError
from finetune.models.dropout import drops
from finetune.recipe.schema import Recipe

if TYPE_CHECKING:
    from finetune.engine.launch import Launch


@dataclass(frozen=True)
class Shape:
    """What of a model's architecture the rules look at; 0 or () where it has none of it."""

    layers: int
    heads: int
    kv_heads: int
    experts: int
    attention: tuple[str, ...]  # other than full causal attention: "sliding_attention", "chunked_attention"
    parts: tuple[str, ...] = ()  # of the base model, where transformers says that it can be cut between them
    soft_capped: bool = False  # attention's logits
    drops: tuple[str, ...] = ()  # names of its settings by which it drops at random
    attention_dropout: float = 0.0
    tensor_styles: frozenset[str] = frozenset()  # of the plan to cut its matrices; empty: it has none

    @classmethod
    def of(cls, config: Any) -> Shape:
        """config: transformers'."""
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0) or 0
        kinds = set(getattr(text, "layer_types", None) or ())
        if not kinds and getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
            kinds = {"sliding_attention"}
        experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0
        return cls(
            layers=getattr(text, "num_hidden_layers", 0) or 0,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            experts=experts,
            attention=tuple(sorted(kinds - {"full_attention"})),
            parts=tuple(sorted(getattr(text, "base_model_pp_plan", None) or ())),
            soft_capped=getattr(text, "attn_logit_softcapping", None) is not None,
            drops=tuple(name for name, _ in drops(text)),
            attention_dropout=getattr(text, "attention_dropout", 0.0) or 0.0,
            tensor_styles=frozenset(tensor_plan(config).values()),
        )


@dataclass(frozen=True)
class Asked:
    """What the rules look at."""

    launch: Launch
    parallelism: Parallelism
    recipe: Recipe
    shape: Shape | None  # None: the model's config is not at hand

    def key(self, field: str) -> str:
        """`parallelism_config_tp_size: 4`, as it stands in the config."""
        return f"`{dimension_key(field)}: {getattr(self.parallelism, field)}`"


Rule = Callable[[Asked], Iterator[str]]


def check_combination(recipe: Recipe, recipe_file: str, launch: Launch, config: Any | None) -> None:
    """config: transformers', where it is at hand. Raises UserError with every message of every rule."""
    shape = None if config is None else Shape.of(config)
    asked = Asked(launch, launch.parallelism, recipe, shape)
    problems = [problem for rule in RULES for problem in rule(asked)]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f"{launch.name} cannot run {recipe_file}:\n{lines}")


def tensor_plan(config: Any) -> dict[str, str]:
    """Of a model's config, transformers': how to cut its matrices, a style by pattern; empty where nothing is said."""
    return dict(getattr(config.get_text_config(), "base_model_tp_plan", None) or {})


def nearest(wanted: int, number: int) -> str:
    """Divisors of `number` around `wanted`, for messages.

    >>> nearest(5, 12)
    '4 or 6'
    """
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in divisors if n <= wanted][-1:]
    above = [n for n in divisors if n > wanted][:1]
    return " or ".join(str(n) for n in below + above)


def not_yet(asked: Asked) -> Iterator[str]:
    for field in ("expert",):
        if getattr(asked.parallelism, field) > 1:
            yield f"{asked.key(field)}: not supported yet: remove it"


def shared_tokens(asked: Asked) -> Iterator[str]:
    """Rows whose tokens several ranks share, by context parallel or by Ulysses."""
    sizes, recipe = asked.parallelism, asked.recipe
    if sizes.tokens == 1:
        return
    keys = " and ".join(asked.key(field) for field in ("context", "sequence") if getattr(sizes, field) > 1)
    if recipe.train.compile:
        yield f"{keys}: compiled layers have no room for the exchange between ranks: set `train.compile: false`"
    for name in _dropouts(asked):
        yield f"{keys}: each rank would draw dropout for its own tokens, so losses would depend on it: set {name} to 0"
    if recipe.model.attention in ("eager", "sdpa", "flash_attention_2"):
        yield (
            f"{keys}: `model.attention: {recipe.model.attention}` is transformers' own, which does not know of other "
            "ranks: set `model.attention: auto`"
        )


def _dropouts(asked: Asked) -> Iterator[str]:
    lora = asked.recipe.lora
    if lora is not None and lora.dropout:
        yield f"`lora.dropout` (now {lora.dropout})"
    for name in asked.shape.drops if asked.shape else ():
        yield f"the model's `{name}`"


def context(asked: Asked) -> Iterator[str]:
    """Pieces of a document on several ranks are attended to by kernels that know causal attention and no more."""
    if asked.parallelism.context == 1:
        return
    if asked.recipe.model.attention in ("documents", "varlen", "flex"):
        yield (
            f"{asked.key('context')}: attention over several ranks is a way of its own, not `model.attention: "
            f"{asked.recipe.model.attention}`: set `auto`"
        )
    if asked.shape is None:
        return
    by_heads = f"use `{dimension_key('sequence')}`, whose ranks attend to whole rows"
    for kind in asked.shape.attention:
        instead = by_heads if kind == "sliding_attention" else "remove it"
        yield f"{asked.key('context')}: this model has {_words(kind)}, which is not cut over ranks: {instead}"
    if asked.shape.soft_capped:
        yield f"{asked.key('context')}: this model caps attention's logits, which is not cut over ranks: {by_heads}"


def sequence(asked: Asked) -> Iterator[str]:
    """Each rank of Ulysses attends with whole heads."""
    size, shape = asked.parallelism.sequence, asked.shape
    if size == 1 or shape is None:
        return
    heads = shape.heads // asked.parallelism.tensor
    if heads % size:
        shared = f" on each of {asked.parallelism.tensor} tensor ranks" if asked.parallelism.tensor > 1 else ""
        yield f"{asked.key('sequence')} does not divide {heads} heads{shared}: set it to {nearest(size, heads)}"
    for kind in sorted(set(shape.attention) - {"sliding_attention"}):
        yield f"{asked.key('sequence')}: this model has {_words(kind)}, which keeps no documents apart: remove it"


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def pipeline_stages(asked: Asked) -> Iterator[str]:
    """Whether model and backend can be cut into so many stages."""
    sizes, shape = asked.parallelism, asked.shape
    if sizes.stages_per_rank > 1 and (sizes.pipeline == 1 or sizes.schedule in ONE_STAGE):
        yield (
            f"{asked.key('stages_per_rank')} has an effect with a pipeline and `interleaved` or `zero_bubble` only: "
            f"remove it, or set `{dimension_key('schedule')}: interleaved`"
        )
    if sizes.pipeline == 1:
        return
    if sizes.schedule == "interleaved" and sizes.stages_per_rank == 1:
        yield f"{asked.key('schedule')} needs `{dimension_key('stages_per_rank')}: 2` or more; with one it is `1f1b`"
    if asked.launch.kind != "replicated" or sizes.shard > 1:
        yield f"{asked.key('pipeline')} does not go with shards inside its stages: use `distributed_type: MULTI_GPU`"
    for field in ("context", "sequence", "tensor", "expert"):
        if getattr(sizes, field) > 1:
            yield f"{asked.key('pipeline')} with {asked.key(field)}: they do not go together: remove one"
    if shape is None:
        return
    if frozenset(shape.parts) != PLAN:
        yield f"{asked.key('pipeline')}: this architecture is not just an embedding, layers and a norm: remove it"
    stages = sizes.pipeline * sizes.stages_per_rank
    if stages > shape.layers:
        most = max(1, shape.layers // sizes.stages_per_rank)
        yield (
            f"{asked.key('pipeline')}: {stages} stages of {shape.layers} layers, and each needs one: "
            f"`{dimension_key('pipeline')}: {most}` at most"
        )


def pipeline_micro_batches(asked: Asked) -> Iterator[str]:
    """Whether the schedule can run a step's micro-batches. Where their number varies, empty ones fill it up."""
    sizes, batch = asked.parallelism, asked.recipe.batch
    if sizes.pipeline == 1 or batch.rows_per_device == "auto" or batch.tokens_per_device is not None:
        return
    rows = batch.rows // sizes.data  # of a pipeline
    if batch.rows % (batch.rows_per_device * sizes.data):
        return  # said elsewhere

    def fits(count: int) -> bool:
        return fitting(sizes.schedule, sizes.pipeline, count) == count

    if (count := rows // batch.rows_per_device) and not fits(count):
        others = [n for n in range(1, rows + 1) if rows % n == 0 and fits(rows // n)]
        near = sorted(others, key=lambda n: abs(n - int(batch.rows_per_device)))[:2]
        advice = [f"`batch.rows_per_device: {n}`" for n in sorted(near)]
        advice += [f"`batch.rows: {fitting(sizes.schedule, sizes.pipeline, count) * batch.rows // count}`"]
        if sizes.schedule in ONE_STAGE:
            advice.append(f"`{dimension_key('schedule')}: gpipe`")
        yield (
            f"{asked.key('schedule')} on {sizes.pipeline} ranks does not take {count} micro-batches a step: "
            f"set {' or '.join(advice)}"
        )


def pipeline_recipe(asked: Asked) -> Iterator[str]:
    """What a recipe may not ask of a pipeline."""
    if asked.parallelism.pipeline == 1:
        return
    recipe, key = asked.recipe, asked.key("pipeline")
    if recipe.batch.rows_per_device == "auto":
        yield (
            f"{key}: `batch.rows_per_device: auto` tries one forward, and a stage holds those of several "
            "micro-batches: give a number"
        )
    if recipe.optimizer.in_backward:
        yield f"{key}: `optimizer.in_backward` needs one backward a step, a pipeline lives from several: set `false`"
    for name in _dropouts(asked):
        yield f"{key}: dropout {_DRAWS}: set {name} to 0"
    if asked.parallelism.schedule == "zero_bubble":
        yield from _zero_bubble(asked.key("schedule"), recipe)


def _zero_bubble(key: str, recipe: Recipe) -> Iterator[str]:
    """torch goes through each backward twice: for the gradients of the inputs, later for those of the weights."""
    if recipe.train.compile:
        yield f"{key}: torch cannot take a compiled backward apart: use `1f1b`, or `compile: false`"
    if recipe.model.cross_entropy != "plain":
        yield (
            f"{key} goes through a backward twice, and `model.cross_entropy: {recipe.model.cross_entropy}` has its "
            "gradients once: use `1f1b`, or `cross_entropy: plain`, which holds all logits"
        )
    if recipe.train.activation_checkpointing:
        yield (
            f"{key} goes through a backward twice, and what is computed again for it is there once: use `1f1b`, or "
            "`activation_checkpointing: false`"
        )


_DRAWS = "draws its numbers layer after layer, and a stage does not know those of the layers before it"
RULES: list[Rule] = [
    not_yet,
    shared_tokens,
    context,
    sequence,
    pipeline_stages,
    pipeline_micro_batches,
    pipeline_recipe,
]


def shards_and_replicas(asked: Asked) -> Iterator[str]:
    """HSDP is FSDP2's; plain replicas have no shards."""
    replicate, shard, kind = asked.parallelism.replicate, asked.parallelism.shard, asked.launch.kind
    if kind == "zero" and replicate > 1:
        yield f"{asked.key('replicate')}: DeepSpeed shards over all ranks here: use hsdp, or remove it"
    if kind == "replicated" and shard > 1:
        yield f"{asked.key('shard')}: `distributed_type: MULTI_GPU` shards nothing: use fsdp2 or hsdp, or remove it"


def tensor_backends(asked: Asked) -> Iterator[str]:
    """What is cut is cut before torch's fully_shard, which knows of it no more than the sizes."""
    if asked.parallelism.tensor == 1:
        return
    key, recipe = asked.key("tensor"), asked.recipe
    if asked.launch.kind == "zero":
        yield f"{key}: DeepSpeed takes whole matrices: use fsdp2_tp or tp"
    if recipe.mode == "qlora":
        yield f"{key} with `mode: qlora`: 4-bit blocks run along the rows, and columns would be cut through: use fsdp2"
    if recipe.lora is not None and recipe.lora.dora:
        yield f"{key} with `lora.dora: true`: DoRA divides by the norms of whole rows, and ranks hold parts: use fsdp2"
    if recipe.optimizer.in_backward:
        yield (
            f"{key} with `optimizer.in_backward: true`: a norm between cut matrices has its gradient only when all "
            "ranks have added up theirs: use fsdp2, or `in_backward: false`"
        )
    if recipe.optimizer.name == "muon":
        yield f"{key}: Muon needs whole matrices: use ddp, or another optimizer"


def tensor_shape(asked: Asked) -> Iterator[str]:
    """Each rank works on whole heads, and draws no random number that another rank does not draw."""
    size, shape = asked.parallelism.tensor, asked.shape
    if size == 1 or shape is None:
        return
    if not shape.tensor_styles:
        yield f"{asked.key('tensor')}: transformers has no plan to cut this model: use fsdp2"
    if "colwise" in shape.tensor_styles and (shape.heads % size or shape.kv_heads % size):
        common = math.gcd(shape.heads, shape.kv_heads)
        yield (
            f"{asked.key('tensor')}: {size} ranks cannot share {shape.heads} attention heads and {shape.kv_heads} "
            f"key-value heads: make it {nearest(size, common)}"
        )
    if shape.attention_dropout:
        yield (
            f"{asked.key('tensor')}: the model drops attention at random (`attention_dropout: "
            f"{shape.attention_dropout}`), and ranks would draw for other heads than one process does: use fsdp2"
        )


RULES: list[Rule] = [not_yet, shards_and_replicas, tensor_backends, tensor_shape]
