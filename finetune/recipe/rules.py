"""Rules that span sections: combinations that the schema alone cannot refuse. Each returns a problem or nothing.

A rule is one function and one row in `RULES`; every rule names the key to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from finetune.recipe.schema import Recipe

Finding = tuple[str, str]  # dotted key, what is wrong and what to do


def lora_section(recipe: Recipe) -> Iterator[Finding]:
    if recipe.mode in ("lora", "qlora") and recipe.lora is None:
        yield "mode", f"`mode: {recipe.mode}` needs a `lora:` section; `lora: {{rank: 16, alpha: 32}}` is a start"
    if recipe.mode == "full" and recipe.lora is not None:
        yield "lora", "`mode: full` trains every weight and has no use for `lora:`; remove it or set `mode: lora`"


def quantization_section(recipe: Recipe) -> Iterator[Finding]:
    if recipe.mode == "qlora" and recipe.quantization is None:
        yield "mode", "`mode: qlora` needs a `quantization:` section; `quantization: {type: nf4}` is the usual one"
    if recipe.mode != "qlora" and recipe.quantization is not None:
        yield "quantization", f"only `mode: qlora` quantises; remove this section or change `mode: {recipe.mode}`"


def adapters_on_something(recipe: Recipe) -> Iterator[Finding]:
    if recipe.mode != "full" and recipe.model.config is not None:
        yield "model.config", f"`mode: {recipe.mode}` adapts a pretrained model: give `model.name`, or `mode: full`"


def rows_divide(recipe: Recipe) -> Iterator[Finding]:
    rows, each = recipe.batch.rows, recipe.batch.rows_per_device
    if each != "auto" and rows % each:
        yield "batch.rows", divisibility_message(rows, each, 1)


def automatic_rows(recipe: Recipe) -> Iterator[Finding]:
    if recipe.batch.rows_per_device != "auto":
        return
    if recipe.lora is not None and recipe.lora.dropout:
        yield (
            "batch.rows_per_device",
            f"dropout is drawn for each forward, so under `auto` losses would depend on the hardware (lora.dropout: "
            f"{recipe.lora.dropout}): give a number, or `lora.dropout: 0`",
        )
    if recipe.optimizer.in_backward:
        yield (
            "batch.rows_per_device",
            "`optimizer.in_backward` needs one forward a step, which `auto` does not promise: give `batch.rows` "
            "divided by the number of processes",
        )


def divisibility_message(rows: int, rows_per_device: int, world_size: int) -> str:
    """The nearest values that would do.

    >>> divisibility_message(10, 4, 1)
    '10 rows a step cannot be dealt in forwards of 4 rows to 1 process: the nearest valid `batch.rows` are 8 and 12'
    """
    unit = rows_per_device * world_size
    below, above = rows // unit * unit, (rows // unit + 1) * unit
    nearest = f"{below} and {above}" if below else f"{above} and its multiples"
    fitting = [n for n in range(rows_per_device, 0, -1) if rows % (n * world_size) == 0]
    smaller = f"; or `batch.rows_per_device: {fitting[0]}`" if fitting and world_size > 1 else ""
    return (
        f"{rows} rows a step cannot be dealt in forwards of {rows_per_device} rows to {world_size} "
        f"process{'es' if world_size > 1 else ''}: the nearest valid `batch.rows` are {nearest}{smaller}"
    )


def frozen_dtype(recipe: Recipe) -> Iterator[Finding]:
    dtype, precision = recipe.model.dtype, recipe.train.precision
    allowed = {
        "fp32": ("float32",),
        "bf16_true": ("bfloat16",),
        "bf16": ("float32", "bfloat16"),
        "fp16": ("float32", "float16"),
    }
    if dtype != "auto" and dtype not in allowed[precision]:
        yield (
            "model.dtype",
            f"`train.precision: {precision}` works with weights in {' or '.join(allowed[precision])}, not {dtype}; "
            "`auto` always fits",
        )


def evaluation_has_data(recipe: Recipe) -> Iterator[Finding]:
    if recipe.data.eval:
        return
    for key in ("every_steps", "generate", "exact_match"):
        if getattr(recipe.evaluate, key):
            yield f"evaluate.{key}", "there is nothing to evaluate on: give `data.eval`, or remove this"


def generation_has_prompts(recipe: Recipe) -> Iterator[Finding]:
    wants = recipe.evaluate.generate or recipe.evaluate.exact_match
    if wants and recipe.data.eval and all(source.format == "text" for source in recipe.data.eval):
        yield "evaluate.generate", "`text` rows have no prompt to answer: set `generate` and `exact_match` to 0"
    if wants and recipe.objective.train_on == "all":
        yield (
            "evaluate.generate",
            "under `objective.train_on: all` the prompt is trained as well, so no answer can be told from it: set "
            "`generate` and `exact_match` to 0",
        )


def answer_pattern(recipe: Recipe) -> Iterator[Finding]:
    pattern = recipe.evaluate.answer
    if pattern is None:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield "evaluate.answer", f"not a regular expression: {error}"
        return
    if groups < 1:
        yield "evaluate.answer", "needs a group that holds the answer, such as `#### (.+)`"
    if not recipe.evaluate.exact_match:
        yield "evaluate.answer", "is only used by `evaluate.exact_match`, which is 0"


def warmup_within_run(recipe: Recipe) -> Iterator[Finding]:
    steps = recipe.train.max_steps
    if steps is not None and recipe.schedule.warmup_steps >= steps:
        yield "schedule.warmup_steps", f"warm-up of {recipe.schedule.warmup_steps} steps never ends in {steps} steps"


def streaming_has_an_end(recipe: Recipe) -> Iterator[Finding]:
    if not recipe.data.streaming:
        return
    if recipe.train.max_steps is None or recipe.train.epochs is not None:
        yield "data.streaming", "nobody knows how long a stream is: give `train.max_steps`, and no `train.epochs`"
    if not recipe.data.packing:
        yield "data.streaming", "a stream is packed window by window: set `data.packing: true`"
    if recipe.data.mixture is not None and recipe.data.mixture.temperature is not None:
        yield "data.mixture.temperature", "sizes are not known while streaming: remove it, and say shares by `weight`"
    for number, source in enumerate(recipe.data.train):
        if source.max_epochs is not None and source.max_epochs % 1:
            yield f"data.train[{number}].max_epochs", "a stream is read whole: give a whole number of passes"


def tokens_of_a_forward(recipe: Recipe) -> Iterator[Finding]:
    batch = recipe.batch
    if batch.tokens_per_device is None:
        return
    if recipe.data.packing:
        yield "batch.tokens_per_device", "packed rows are all of one length: set `data.packing: false`, or remove this"
    if batch.rows_per_device != 1:
        yield "batch.tokens_per_device", "takes the place of `rows_per_device`: remove one of the two"
    if batch.tokens_per_device < recipe.data.max_length:
        yield (
            "batch.tokens_per_device",
            f"{batch.tokens_per_device} is less than the longest example may have (data.max_length: "
            f"{recipe.data.max_length})",
        )


def profile_within_run(recipe: Recipe) -> Iterator[Finding]:
    steps = recipe.train.max_steps
    if recipe.profile is not None and steps is not None and recipe.profile.steps[1] > steps:
        yield "profile.steps", f"{list(recipe.profile.steps)} are behind the run's end, which is step {steps}"


def mixture_has_parts(recipe: Recipe) -> Iterator[Finding]:
    if recipe.data.mixture is not None and len(recipe.data.train) == 1:
        yield "data.mixture", "there is one source in `data.train`, so there is nothing to mix; remove this"


def cross_entropy_of_torch(recipe: Recipe) -> Iterator[Finding]:
    if recipe.model.cross_entropy != "torch":
        return
    for key in ("z_loss", "label_smoothing"):
        if getattr(recipe.objective, key):
            yield f"objective.{key}", "`model.cross_entropy: torch` does not have it in chunks; `auto` does"
    if recipe.train.precision != "fp32":
        yield (
            "model.cross_entropy",
            f"`torch` gives losses in the 16 bits that `train.precision: {recipe.train.precision}` computes in; "
            "`auto` gives fp32",
        )


def stepped_in_backward(recipe: Recipe) -> Iterator[Finding]:
    optimizer, key = recipe.optimizer, "optimizer.in_backward"
    if not optimizer.in_backward:
        return
    if optimizer.max_grad_norm is not None:
        yield (
            key,
            "gradients are gone before their common norm is known, so they cannot be clipped by it: set "
            "`optimizer.max_grad_norm: null`, or `in_backward: false`",
        )
    if optimizer.name == "muon":
        yield key, "steps single parameters, and Muon shares them out between two optimizers: use `adamw`, or false"
    if recipe.train.precision == "fp16":
        yield (
            key,
            "steps that fp16's loss scale must skip are made by then: use `train.precision: bf16`, or false",
        )
    if recipe.batch.tokens_per_device is not None:
        yield key, "needs one forward a step, and `batch.tokens_per_device` makes as many as the rows need: remove one"


def offloaded_activations(recipe: Recipe) -> Iterator[Finding]:
    if recipe.train.activation_offload and recipe.train.activation_checkpointing == "selective":
        yield (
            "train.activation_offload",
            "the results that `activation_checkpointing: selective` keeps stay on the device: use `true`, where each "
            "layer's input goes to the host, or `false`, where all goes",
        )


RULES: tuple[Callable[[Recipe], Iterator[Finding]], ...] = (
    lora_section,
    quantization_section,
    adapters_on_something,
    rows_divide,
    automatic_rows,
    frozen_dtype,
    evaluation_has_data,
    generation_has_prompts,
    answer_pattern,
    warmup_within_run,
    streaming_has_an_end,
    tokens_of_a_forward,
    mixture_has_parts,
    profile_within_run,
    cross_entropy_of_torch,
    stepped_in_backward,
    offloaded_activations,
)


def broken_rules(recipe: Recipe) -> list[Finding]:
    """Every finding of every rule, in the order of the table."""
    return [finding for rule in RULES for finding in rule(recipe)]
