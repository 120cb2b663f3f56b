"""Rules across sections, for combinations that the schema alone cannot refuse.

A rule is one function, which yields problems, and one row in `RULES`; every problem names the key to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from finetune.recipe.schema import LOSS_KEYS, OBJECTIVE_KEYS, ROW_KINDS, HeldOut, ObjectiveSettings, Recipe
from finetune.utils import divisors

Finding = tuple[str, str]  # dotted key; the problem and the remedy


def lora_section(recipe: Recipe) -> Iterator[Finding]:
    if recipe.mode in ("lora", "qlora") and recipe.lora is None:
        yield "mode", f"`mode: {recipe.mode}` needs a `lora:` section, such as `lora: {{rank: 16, alpha: 32}}`"
    if recipe.mode == "full" and recipe.lora is not None:
        yield "lora", "`mode: full` trains every weight and does not use `lora:`; remove it or set `mode: lora`"


def quantization_section(recipe: Recipe) -> Iterator[Finding]:
    if recipe.mode == "qlora" and recipe.quantization is None:
        yield "mode", "`mode: qlora` needs a `quantization:` section, such as `quantization: {type: nf4}`"
    if recipe.mode != "qlora" and recipe.quantization is not None:
        yield "quantization", f"only `mode: qlora` quantises; remove this section or change `mode: {recipe.mode}`"
    if recipe.quantization is None:
        return
    kind, precision = recipe.quantization.type, recipe.train.precision
    if recipe.quantization.compute == "scaled" and kind != "fp8":
        yield (
            "quantization.compute",
            f"`scaled` multiplies in fp8, not in `type: {kind}`: use `type: fp8`, or `dequantised`",
        )
    elif recipe.quantization.compute == "scaled" and precision not in ("bf16", "bf16_true"):
        yield (
            "quantization.compute",
            f"products of `scaled` come out in bf16, against `train.precision: {precision}`: use bf16, or "
            "`dequantised`",
        )
    if kind != "fp8":
        return
    if recipe.quantization.double_quant is not None:
        yield "quantization.double_quant", "is for 4 bits: `type: fp8` has one scale for each row. Set it to null"
    if recipe.lora is not None and recipe.lora.dora:
        yield "lora.dora", "peft reads the base's matrices, which it cannot unpack from fp8: use `type: nf4`, or false"


def adapters_need_a_base(recipe: Recipe) -> Iterator[Finding]:
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
            "dropout is sampled per micro-batch, so with `auto` losses would depend on the hardware (lora.dropout: "
            f"{recipe.lora.dropout}): set a number, or `lora.dropout: 0`",
        )
    if recipe.optimizer.in_backward:
        yield (
            "batch.rows_per_device",
            "`optimizer.in_backward` needs one micro-batch per step, which `auto` does not guarantee: set it to "
            "`batch.rows` divided by the number of processes",
        )


def divisibility_message(rows: int, rows_per_device: int, world_size: int) -> str:
    """Returns the message for a batch size that does not divide, with the nearest valid ones.

    >>> divisibility_message(8, 2, 3)
    '8 must be divisible by rows_per_device x processes (2 x 3 = 6); nearest: 6, 12'
    """
    unit = rows_per_device * world_size
    below, above = rows // unit * unit, (rows // unit + 1) * unit
    nearest = f"{below}, {above}" if below else f"{above}"
    fitting = [n for n in divisors(rows) if n <= rows_per_device and rows % (n * world_size) == 0]
    smaller = f"; or `batch.rows_per_device: {fitting[-1]}`" if fitting and world_size > 1 else ""
    factors = f"{rows_per_device} x {world_size} = {unit}"
    return f"{rows} must be divisible by rows_per_device x processes ({factors}); nearest: {nearest}{smaller}"


def frozen_dtype(recipe: Recipe) -> Iterator[Finding]:
    dtype, precision = recipe.model.dtype, recipe.train.precision
    allowed = {
        "fp32": ("float32",),
        "bf16_true": ("bfloat16",),
        "bf16": ("float32", "bfloat16"),
        "fp8": ("float32", "bfloat16"),
        "fp16": ("float32", "float16"),
    }
    if dtype != "auto" and dtype not in allowed[precision]:
        yield (
            "model.dtype",
            f"`train.precision: {precision}` supports weights in {' or '.join(allowed[precision])}, not {dtype}; "
            "`auto` always works",
        )


def eight_bit_products(recipe: Recipe) -> Iterator[Finding]:
    if recipe.train.precision == "fp8" and recipe.mode != "full":
        yield (
            "train.precision",
            f"`fp8` is for `mode: full`; under `mode: {recipe.mode}` use `bf16`, and `quantization.type: fp8` for a "
            "base in 8 bits",
        )


def evaluation_has_data(recipe: Recipe) -> Iterator[Finding]:
    if recipe.data.eval:
        return
    for key in ("every_steps", "generate", "exact_match"):
        if getattr(recipe.evaluate, key):
            yield f"evaluate.{key}", "needs evaluation data: add `data.eval`, or remove this"


def early_stop_has_evaluations(recipe: Recipe) -> Iterator[Finding]:
    if recipe.train.stop_when is not None and not (recipe.data.eval and recipe.evaluate.every_steps):
        yield "train.stop_when", "needs evaluations during the run: set `data.eval` and `evaluate.every_steps`"


def best_result_is_measured(recipe: Recipe) -> Iterator[Finding]:
    if recipe.train.result == "best" and recipe.checkpoint.best is None:
        yield "train.result", "`best` needs a metric: set `checkpoint.best`, such as `checkpoint: {best: eval_loss}`"
    if recipe.tracking.wandb and recipe.tracking.wandb.log_model == "best" and recipe.checkpoint.best is None:
        yield "tracking.wandb.log_model", "`best` needs a metric: set `checkpoint.best`, or log_model to `result`"


def generation_has_prompts(recipe: Recipe) -> Iterator[Finding]:
    wants = recipe.evaluate.generate or recipe.evaluate.exact_match
    if wants and recipe.data.eval and all(source.format == "text" for source in recipe.data.eval_sources):
        yield "evaluate.generate", "rows of format `text` have no prompt: set `generate` and `exact_match` to 0"
    if wants and recipe.objective.train_on == "all":
        yield (
            "evaluate.generate",
            "under `objective.train_on: all` the prompt is trained as well and cannot be distinguished from the "
            "answer: set `generate` and `exact_match` to 0",
        )


def answer_pattern(recipe: Recipe) -> Iterator[Finding]:
    pattern = recipe.evaluate.answer
    if pattern is None:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield "evaluate.answer", f"is not a valid regular expression: {error}"
        return
    if groups < 1:
        yield "evaluate.answer", "needs a group for the answer, such as `#### (.+)`"
    if not recipe.evaluate.exact_match:
        yield "evaluate.answer", "is used only by `evaluate.exact_match`, which is 0"


def one_warmup(recipe: Recipe) -> Iterator[Finding]:
    if recipe.schedule.warmup_ratio is not None and recipe.schedule.warmup_steps:
        yield "schedule.warmup_ratio", "replaces `warmup_steps`: remove one of the two"


def streaming_has_an_end(recipe: Recipe) -> Iterator[Finding]:
    if not recipe.data.streaming:
        return
    if recipe.train.max_steps is None or recipe.train.epochs is not None:
        yield "data.streaming", "the length of a stream is unknown: set `train.max_steps` and remove `train.epochs`"
    if not recipe.data.packing:
        yield "data.streaming", "streams are always packed: set `data.packing: true`"
    if recipe.data.mixture is not None and recipe.data.mixture.temperature is not None:
        yield "data.mixture.temperature", "the size of a stream is unknown: remove it, and set each source's `weight`"
    for i, source in enumerate(recipe.data.train):
        if source.max_epochs is not None and source.max_epochs % 1:
            yield f"data.train[{i}].max_epochs", "must be an integer with `data.streaming`"


def held_out_share(recipe: Recipe) -> Iterator[Finding]:
    if isinstance(recipe.data.eval, HeldOut) and recipe.data.streaming:
        yield "data.eval.share", "the rows of a stream are not known: give sources, or set `data.streaming: false`"


def token_budget(recipe: Recipe) -> Iterator[Finding]:
    batch = recipe.batch
    if batch.tokens_per_device is None:
        return
    if recipe.data.packing:
        yield "batch.tokens_per_device", "packed sequences have equal length: set `data.packing: false` or remove this"
    if batch.rows_per_device != 1:
        yield "batch.tokens_per_device", "replaces `rows_per_device`: remove one of the two"
    if batch.tokens_per_device < recipe.data.max_length:
        yield (
            "batch.tokens_per_device",
            f"{batch.tokens_per_device} must be at least the length of the longest example (data.max_length: "
            f"{recipe.data.max_length})",
        )


def profile_within_run(recipe: Recipe) -> Iterator[Finding]:
    steps = recipe.train.max_steps
    if recipe.profile is not None and steps is not None and recipe.profile.steps[1] > steps:
        yield "profile.steps", f"{list(recipe.profile.steps)} must end by the last step ({steps})"


def mixture_has_parts(recipe: Recipe) -> Iterator[Finding]:
    if recipe.data.mixture is not None and len(recipe.data.train) == 1:
        yield "data.mixture", "needs several sources in `data.train`; remove this"


def objective_reads_its_keys(recipe: Recipe) -> Iterator[Finding]:
    objective, known = recipe.objective, {key for keys in OBJECTIVE_KEYS.values() for key in keys}
    for key in sorted(known - set(OBJECTIVE_KEYS[objective.name])):
        if getattr(objective, key) != ObjectiveSettings.model_fields[key].default:
            readers = " and ".join(name for name, keys in OBJECTIVE_KEYS.items() if key in keys)
            yield f"objective.{key}", f"has no effect under `name: {objective.name}`, only under {readers}: remove it"


def reference_at_hand(recipe: Recipe) -> Iterator[Finding]:
    """Returns whether `objective.reference` can be computed under this mode, these adapters and this data."""
    objective, key = recipe.objective, "objective.reference"
    if not objective.reads_reference:
        return
    if objective.value("reference") == "precomputed":
        if recipe.data.streaming:
            others = "`data.streaming: false`"
            others = others if recipe.mode == "full" else f"`adapters_off`, or {others}"
            yield key, f"`precomputed` needs all rows before the first step, and a stream has no end: use {others}"
        return
    if recipe.mode == "full":
        yield key, "`adapters_off` needs adapters, and `mode: full` has none: use `precomputed`, or `mode: lora`"
    if recipe.tokens is not None:
        yield key, "`adapters_off` is not the initial model where tokens are added (tokens.add): use `precomputed`"
    if recipe.lora is not None and recipe.lora.modules_to_save:
        modules = ", ".join(recipe.lora.modules_to_save)
        yield (
            key,
            f"`adapters_off` is not the initial model where modules are trained fully (lora.modules_to_save: {modules})"
            ": use `precomputed`, or name them in `lora.targets` instead",
        )
    if objective.reference_model is not None:
        yield "objective.reference_model", "has no effect under `reference: adapters_off`: remove one of the two"


def dropout_of_pairs(recipe: Recipe) -> Iterator[Finding]:
    objective, lora = recipe.objective, recipe.lora
    if lora is not None and lora.dropout and objective.drops_nothing:
        yield (
            "lora.dropout",
            f"`objective.name: {objective.name}` compares log-probabilities or scores under equal weights, so dropout "
            f"is off (now {lora.dropout}): set `lora.dropout: 0`, or `objective.dropout: true` to have it all the same",
        )


def distillation(recipe: Recipe) -> Iterator[Finding]:
    objective = recipe.objective
    if objective.name != "distill":
        return
    if objective.teacher is None:
        yield (
            "objective.teacher",
            "`name: distill` needs a teacher: a model with the same vocabulary, or a .parquet file of its predictions",
        )
    if objective.samples is not None and objective.top_k is not None:
        yield "objective.samples", "replaces `top_k`: remove one of the two"
    if objective.samples is not None and objective.value("divergence") != "forward_kl":
        yield (
            "objective.samples",
            f"draws from the teacher estimate forward_kl only, not {objective.divergence}: use `top_k`",
        )
    if objective.jsd_beta is not None and objective.value("divergence") != "jsd":
        yield "objective.jsd_beta", "has an effect under `divergence: jsd` only: remove it"
    if recipe.data.streaming:
        yield "data.streaming", "a teacher's distributions are looked up by example before the run: set it to false"


def tokens_are_trained(recipe: Recipe) -> Iterator[Finding]:
    if recipe.tokens is None:
        return
    if recipe.mode == "full" and recipe.tokens.train == "added":
        yield "tokens.train", "`mode: full` trains all rows: remove it, or use `mode: lora`"
    for key in ("reference_model", "teacher"):
        other = getattr(recipe.objective, key)
        if other is not None and not other.endswith(".parquet"):
            yield (
                f"objective.{key}",
                "lacks the tokens that `tokens.add` adds: remove one of the two",
            )


def objective_takes_formats(recipe: Recipe) -> Iterator[Finding]:
    for key, sources in (("train", recipe.data.train), ("eval", recipe.data.own_eval_sources)):
        for i, source in enumerate(sources):
            if source.format != "auto" and (problem := format_problem(recipe.objective.name, source.format)):
                yield f"data.{key}[{i}].format", problem


def pairs_are_ranked(recipe: Recipe) -> Iterator[Finding]:
    for key, sources in (("train", recipe.data.train), ("eval", recipe.data.own_eval_sources)):
        for i, source in enumerate(sources):
            if source.pairs != "best_worst" and source.format != "ranked":
                yield (
                    f"data.{key}[{i}].pairs",
                    f"is only for rows of ranked answers: set `format: ranked`, or remove `pairs: {source.pairs}`",
                )


def answers_are_whole(recipe: Recipe) -> Iterator[Finding]:
    name, overlong = recipe.objective.name, recipe.data.overlong
    if name in ("dpo", "orpo", "reward", "kto") and overlong in ("truncate", "split"):
        yield (
            "data.overlong",
            f"`{overlong}` would have `{name}` judge a part of an answer, and an answer without its end teaches to "
            "ramble: use `drop`, which leaves out all of a pair and counts it, or `error`",
        )
    if name == "classify" and overlong == "split":
        yield "data.overlong", "`split` would give the label of a text to each of its parts: use `drop`, `truncate`"


def classes_have_names(recipe: Recipe) -> Iterator[Finding]:
    objective = recipe.objective
    if objective.name != "classify":
        return
    if objective.labels is None or len(objective.labels) < 2:
        yield (
            "objective.labels",
            "name the labels of the rows, two at least, in the order of the model's outputs, such as `[no, yes]`",
        )
    elif len(set(objective.labels)) < len(objective.labels):
        yield "objective.labels", "has a name twice: keep one of each"


def answers_are_the_targets(recipe: Recipe) -> Iterator[Finding]:
    name, train_on = recipe.objective.name, recipe.objective.train_on
    if name in ("dpo", "orpo", "reward", "kto", "classify") and train_on != "assistant":
        yield (
            "objective.train_on",
            f"`{train_on}` has no effect under `name: {name}`, which looks at the answers alone (classify: at all): "
            "remove it",
        )


def format_problem(objective: str, format: str) -> str | None:
    """Returns why an objective does not take rows of a format, and what to do instead; None if it does."""
    if format in ROW_KINDS[objective].formats:
        return None
    takers = [name for name, kind in ROW_KINDS.items() if format in kind.formats]
    instead = f"set `objective.name` to {' or '.join(takers)}"
    if format == "preference":
        chosen = "`format: prompt_completion` and `columns: {completion: chosen}`"
        instead += f", or train on the chosen answers alone with {chosen}"
    taken = " or ".join(f"`{name}`" for name in ROW_KINDS[objective].formats)
    return f"rows of format `{format}` are not for `objective.name: {objective}`, which takes {taken}: {instead}"


def dpo_reads_its_keys(recipe: Recipe) -> Iterator[Finding]:
    objective = recipe.objective
    if objective.name != "dpo":
        return
    loss = objective.value("loss")
    for key, losses in LOSS_KEYS.items():
        if loss not in losses and getattr(objective, key) != ObjectiveSettings.model_fields[key].default:
            readers = ", ".join(losses)
            yield f"objective.{key}", f"has no effect under `loss: {loss}`, only under {readers}: remove it"
    if objective.label_smoothing >= 0.5 and loss in LOSS_KEYS["label_smoothing"]:
        yield (
            "objective.label_smoothing",
            f"{objective.label_smoothing:g} says that most pairs are the wrong way round: use less than 0.5, or swap "
            "`chosen` and `rejected` with `columns`",
        )


def scores_in_place_of_logits(recipe: Recipe) -> Iterator[Finding]:
    if not recipe.objective.scores_sequences:
        return
    name = f"objective.name: {recipe.objective.name}"
    for key in ("generate", "exact_match"):
        if getattr(recipe.evaluate, key):
            yield f"evaluate.{key}", f"a model of `{name}` scores texts and generates none: set it to 0"
    if recipe.model.cross_entropy != "auto":
        yield "model.cross_entropy", f"a model of `{name}` has no LM head: remove it"
    if recipe.lora is not None and "score" in recipe.lora.targets:
        yield "lora.targets", f"under `{name}` the head `score` is trained in full: leave it out"


def cross_entropy_of_torch(recipe: Recipe) -> Iterator[Finding]:
    if recipe.model.cross_entropy != "torch":
        return
    for key in ("z_loss", "label_smoothing"):
        if getattr(recipe.objective, key):
            yield f"objective.{key}", "is not supported by `model.cross_entropy: torch`; use `auto`"
    if recipe.train.precision != "fp32":
        yield (
            "model.cross_entropy",
            f"`torch` computes losses in 16 bits under `train.precision: {recipe.train.precision}`; use `auto`, which "
            "computes them in fp32",
        )


def stepped_in_backward(recipe: Recipe) -> Iterator[Finding]:
    optimizer, key = recipe.optimizer, "optimizer.in_backward"
    if not optimizer.in_backward:
        return
    if optimizer.max_grad_norm is not None:
        yield (
            key,
            "gradients are freed before their global norm is known, so they cannot be clipped: set "
            "`optimizer.max_grad_norm: null`, or `in_backward: false`",
        )
    if optimizer.name == "muon":
        yield key, "does not support `muon`, which divides parameters between two optimizers: use `adamw`, or false"
    if recipe.train.precision == "fp16":
        yield (
            key,
            "cannot skip steps that overflow, as fp16's loss scale requires: use `train.precision: bf16`, or false",
        )
    if recipe.batch.tokens_per_device is not None:
        yield key, "needs one micro-batch per step, which `batch.tokens_per_device` does not guarantee: remove one"


def offloaded_activations(recipe: Recipe) -> Iterator[Finding]:
    if recipe.train.activation_offload and recipe.train.activation_checkpointing == "selective":
        yield (
            "train.activation_offload",
            "does not reach what `activation_checkpointing: selective` keeps: use `true`, which offloads each layer's "
            "input, or `false`, which offloads all activations",
        )


def images(recipe: Recipe) -> Iterator[Finding]:
    """Settings that a model with its tower (`model.train`) does not support."""
    if recipe.model.train is None:
        return
    if len(set(recipe.model.train)) < len(recipe.model.train):
        yield "model.train", "names a part twice: keep one of each"
    if recipe.model.config is not None and recipe.data.image is None:
        yield "model.train", "a model from `model.config` has no tower: give `model.name`, or remove this"
    if recipe.objective.scores_sequences:
        yield (
            "objective.name",
            f"`{recipe.objective.name}` needs a class of transformers with a head of scores, which of the families "
            "that see images Gemma 3 alone has: remove `model.train` and `data.image`, and the text part is trained",
        )
    if recipe.tokens is not None:
        yield (
            "tokens.add",
            "a multimodal model keeps the tables of its base: remove it, or use unused tokens of it",
        )
    if recipe.train.compile:
        yield "train.compile", "layers are compiled for one length, and towers have images of any size: set it to false"
    if recipe.batch.rows_per_device == "auto":
        yield "batch.rows_per_device", "`auto` tries rows without images, which need less memory: give a number"


def images_of_rows(recipe: Recipe) -> Iterator[Finding]:
    image = recipe.data.image
    if image is None:
        return
    if image.max_pixels and image.min_pixels and image.min_pixels > image.max_pixels:
        yield "data.image.min_pixels", f"is above max_pixels ({image.max_pixels}): lower it"
    if (overlong := recipe.data.overlong) in ("truncate", "split") and recipe.objective.train_on == "all":
        yield "data.overlong", f"with images, `{overlong}` cuts after answers, and `train_on: all` knows none: use drop"
    if (teacher := recipe.objective.teacher) is not None and teacher.endswith(".parquet"):
        yield "objective.teacher", "a file has its rows by their tokens, which images of one size share: name a model"
    if recipe.model.config is not None:
        yield "data.image", "a model from `model.config` has no image processor: give `model.name`, or remove this"


RULES: tuple[Callable[[Recipe], Iterator[Finding]], ...] = (
    lora_section,
    quantization_section,
    adapters_need_a_base,
    rows_divide,
    automatic_rows,
    frozen_dtype,
    eight_bit_products,
    evaluation_has_data,
    early_stop_has_evaluations,
    best_result_is_measured,
    generation_has_prompts,
    answer_pattern,
    one_warmup,
    streaming_has_an_end,
    held_out_share,
    token_budget,
    mixture_has_parts,
    profile_within_run,
    objective_reads_its_keys,
    dpo_reads_its_keys,
    reference_at_hand,
    dropout_of_pairs,
    distillation,
    tokens_are_trained,
    objective_takes_formats,
    pairs_are_ranked,
    answers_are_whole,
    answers_are_the_targets,
    classes_have_names,
    scores_in_place_of_logits,
    cross_entropy_of_torch,
    stepped_in_backward,
    offloaded_activations,
    images,
    images_of_rows,
)


def broken_rules(recipe: Recipe) -> list[Finding]:
    """Returns the findings of every rule, in the order of the table."""
    return [finding for rule in RULES for finding in rule(recipe)]
