"""Rules across sections, for combinations that the schema alone cannot refuse.

A rule is one condition and one message, in the function of its topic; every problem names the key to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS, Distill
from finetune.recipe.schema import Evaluate, HeldOut, Recipe
from finetune.utils import divisors

Finding = tuple[str, str]  # dotted key; the problem and the remedy
Rule = Callable[[Recipe], Iterator[Finding]]
_FROZEN_DTYPES = {  # by `train.precision`
    "fp32": ("float32",),
    "bf16_true": ("bfloat16",),
    "bf16": ("float32", "bfloat16"),
    "fp8": ("float32", "bfloat16"),
    "fp16": ("float32", "float16"),
}


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


def format_problem(recipe: Recipe, format: str) -> str | None:
    """Returns why an objective does not take rows of a format, and what to do instead; None if it does."""
    objective, kind = recipe.objective.name, recipe.row_kind
    if format in kind.formats:
        return None
    sections = [one for one in OBJECTIVE_SECTIONS.values() if format in one.row_kind.formats]
    sections.sort(key=lambda one: one.row_kind.is_unpaired)  # those that compare the answers of a pair come first
    takers = [one.kind() for one in sections if not one.takes_rewards] or [one.kind() for one in sections]
    instead = f"set `objective.name` to {' or '.join(takers)}"
    if format == "preference":
        chosen = "`format: prompt_completion` and `columns: {completion: chosen}`"
        instead += f", or train on the chosen answers alone with {chosen}"
    taken = " or ".join(f"`{name}`" for name in kind.formats)
    return f"rows of format `{format}` are not for `objective.name: {objective}`, which takes {taken}. Fix: {instead}"


def folder(recipe: Recipe) -> Iterator[Finding]:
    if re.search(r"\$\{?\w", recipe.run.dir):
        yield (
            "run.dir",
            f"a recipe reads no variables, as in `{recipe.run.dir}`: write the path, or give `run.dir=...` on the "
            "command line, where the shell reads them",
        )


def mode(recipe: Recipe) -> Iterator[Finding]:
    mode, lora, quantization, precision = recipe.mode, recipe.lora, recipe.quantization, recipe.train.precision
    if mode in ("lora", "qlora") and lora is None:
        yield "mode", f"`mode: {mode}` needs a `lora:` section, such as `lora: {{rank: 16, alpha: 32}}`"
    if mode == "full" and lora is not None:
        yield "lora", "`mode: full` trains every weight and does not use `lora:`; remove it or set `mode: lora`"
    if mode != "full" and recipe.model.config is not None:
        yield "model.config", f"`mode: {mode}` adapts a pretrained model: give `model.name`, or `mode: full`"
    if mode == "qlora" and quantization is None:
        yield "mode", "`mode: qlora` needs a `quantization:` section, such as `quantization: {type: nf4}`"
    if mode != "qlora" and quantization is not None:
        yield "quantization", f"only `mode: qlora` quantizes; remove this section or change `mode: {mode}`"
    if quantization is None:
        return
    if quantization.compute == "scaled" and quantization.type != "fp8":
        scaled = f"`scaled` multiplies in fp8, not in `type: {quantization.type}`: use `type: fp8`, or `dequantised`"
        yield "quantization.compute", scaled
    elif quantization.compute == "scaled" and precision not in ("bf16", "bf16_true"):
        yield (
            "quantization.compute",
            f"products of `scaled` come out in bf16, against `train.precision: {precision}`: use bf16, or "
            "`dequantised`",
        )
    if quantization.type == "fp8" and quantization.double_quant is not None:
        yield "quantization.double_quant", "is for 4 bits: `type: fp8` has one scale for each row. Set it to null"
    if quantization.type == "fp8" and lora is not None and lora.dora:
        yield "lora.dora", "peft reads the base's matrices, which it cannot unpack from fp8: use `type: nf4`, or false"


def precision(recipe: Recipe) -> Iterator[Finding]:
    dtype, precision = recipe.model.dtype, recipe.train.precision
    if dtype != "auto" and dtype not in _FROZEN_DTYPES[precision]:
        types = " or ".join(_FROZEN_DTYPES[precision])
        yield (
            "model.dtype",
            f"`train.precision: {precision}` supports weights in {types}, not {dtype}; `auto` always works",
        )
    if precision == "fp8" and recipe.mode != "full":
        yield (
            "train.precision",
            f"`fp8` is for `mode: full`; under `mode: {recipe.mode}` use `bf16`, and `quantization.type: fp8` for a "
            "base in 8 bits",
        )


def batch(recipe: Recipe) -> Iterator[Finding]:
    batch, max_length, dropout = recipe.batch, recipe.data.max_length, recipe.lora and recipe.lora.dropout
    if batch.rows_per_device != "auto" and batch.rows % batch.rows_per_device:
        yield "batch.rows", divisibility_message(batch.rows, batch.rows_per_device, 1)
    if batch.rows_per_device == "auto" and dropout:
        yield (
            "batch.rows_per_device",
            "dropout is sampled per micro-batch, so with `auto` losses would depend on the hardware (lora.dropout: "
            f"{dropout}): set a number, or `lora.dropout: 0`",
        )
    if batch.rows_per_device == "auto" and recipe.optimizer.in_backward:
        yield (
            "batch.rows_per_device",
            "`optimizer.in_backward` needs one micro-batch per step, which `auto` does not guarantee: set it to "
            "`batch.rows` divided by the number of processes",
        )
    if batch.tokens_per_device is None:
        return
    if recipe.data.packing:
        yield "batch.tokens_per_device", "packed sequences have equal length: set `data.packing: false` or remove this"
    if batch.rows_per_device != 1:
        yield "batch.tokens_per_device", "replaces `rows_per_device`: remove one of the two"
    if (tokens := batch.tokens_per_device) < max_length:
        longest = f"must be at least the length of the longest example (data.max_length: {max_length})"
        yield "batch.tokens_per_device", f"{tokens} {longest}"


def evaluation(recipe: Recipe) -> Iterator[Finding]:
    evaluate, best, wandb = recipe.evaluate, recipe.checkpoint.best, recipe.tracking.wandb
    stop_when = recipe.train.stop_when
    for key in ("every_steps", "generate", "exact_match", "word_error_rate"):
        if not recipe.data.eval and getattr(evaluate, key):
            yield f"evaluate.{key}", "needs evaluation data: add `data.eval`, or remove this"
    for key in ("prompts", "samples"):
        changed = getattr(evaluate, key) != Evaluate.model_fields[key].default
        if changed and not (recipe.data.eval and recipe.rewards):
            yield (
                f"evaluate.{key}",
                "is of held-out prompts that are sampled: set `rewards` and `data.eval`, or remove it",
            )
        elif changed and key == "samples" and evaluate.prompts == 0:
            yield "evaluate.samples", "has no effect under `evaluate.prompts: 0`: remove one of the two"
    for key, metric in (("checkpoint.best", best), ("train.stop_when", stop_when and stop_when.metric)):
        if metric and re.match(r"eval_(reward$|reward/|pass@)", metric) and not recipe.samples_held_out:
            yield key, f"`{metric}` needs `rewards`, and held-out prompts to sample: `data.eval`, `evaluate.prompts`"
    if recipe.train.stop_when is not None and not (recipe.data.eval and evaluate.every_steps):
        yield "train.stop_when", "needs evaluations during the run: set `data.eval` and `evaluate.every_steps`"
    if recipe.train.result == "best" and best is None:
        yield "train.result", "`best` needs a metric: set `checkpoint.best`, such as `checkpoint: {best: eval_loss}`"
    if wandb is not None and wandb.log_model == "best" and best is None:
        yield "tracking.wandb.log_model", "`best` needs a metric: set `checkpoint.best`, or log_model to `result`"
    generates, sources = bool(evaluate.answered), recipe.data.eval_sources
    if generates and recipe.data.eval and all(source.format == "text" for source in sources):
        yield "evaluate.generate", "rows of format `text` have no prompt: set `generate` and `exact_match` to 0"
    if generates and recipe.objective.train_on == "all":
        yield (
            "evaluate.generate",
            "under `objective.train_on: all` the prompt is trained as well and cannot be distinguished from the "
            "answer: set `generate` and `exact_match` to 0",
        )
    if evaluate.answer is None:
        return
    try:
        groups = re.compile(evaluate.answer).groups
    except re.error as error:
        yield "evaluate.answer", f"is not a valid regular expression: {error}"
        return
    if groups < 1:
        yield "evaluate.answer", "needs a group for the answer, such as `#### (.+)`"
    if not (evaluate.exact_match or evaluate.word_error_rate):
        yield "evaluate.answer", "is used only by `evaluate.exact_match` and `word_error_rate`, which are 0"


def steps(recipe: Recipe) -> Iterator[Finding]:
    schedule, profile, max_steps = recipe.schedule, recipe.profile, recipe.train.max_steps
    if schedule.warmup_ratio is not None and schedule.warmup_steps:
        yield "schedule.warmup_ratio", "replaces `warmup_steps`: remove one of the two"
    if profile is not None and max_steps is not None and profile.steps[1] > max_steps:
        yield "profile.steps", f"{list(profile.steps)} must end by the last step ({max_steps})"
    if recipe.train.activation_offload and recipe.train.activation_checkpointing == "selective":
        yield (
            "train.activation_offload",
            "does not reach the activations that `activation_checkpointing: selective` keeps: use `true`, which "
            "offloads each layer's input, or `false`, which offloads all activations",
        )


# Usual peak rates: Llama 2, section 3.1 (2e-5, full); QLoRA, https://arxiv.org/abs/2305.14314, table 9 (1e-4 to 2e-4).
_USUAL_LR = {"full": "1e-5 to 1e-4", "lora": "1e-4 to 1e-3", "qlora": "1e-4 to 1e-3"}


def learning_rate(recipe: Recipe) -> Iterator[Finding]:
    optimizer, usual = recipe.optimizer, _USUAL_LR[recipe.mode]
    if optimizer.name != "sgd" and optimizer.lr >= 1:  # SGD multiplies gradients, which have any size
        yield (
            "optimizer.lr",
            f"a step of `{optimizer.name}` moves each weight by up to the rate, and weights are far below "
            f"{optimizer.lr:g}: usual under `mode: {recipe.mode}` is {usual}",
        )


def in_backward(recipe: Recipe) -> Iterator[Finding]:
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


def sources(recipe: Recipe) -> Iterator[Finding]:
    data = recipe.data
    if data.mixture is not None and len(data.train) == 1:
        yield "data.mixture", "needs several sources in `data.train`; remove this"
    for part, sources in (("train", data.train), ("eval", data.own_eval_sources)):
        for i, source in enumerate(sources):
            key = f"data.{part}[{i}]"
            if source.format != "auto" and (problem := format_problem(recipe, source.format)):
                yield f"{key}.format", problem
            if source.pairs != "best_worst" and source.format != "ranked":
                only = f"set `format: ranked`, or remove `pairs: {source.pairs}`"
                yield f"{key}.pairs", f"is only for rows of ranked answers: {only}"


def streaming(recipe: Recipe) -> Iterator[Finding]:
    data = recipe.data
    if not data.streaming:
        return
    if recipe.train.max_steps is None or recipe.train.epochs is not None:
        yield "data.streaming", "the length of a stream is unknown: set `train.max_steps` and remove `train.epochs`"
    if not data.packing:
        yield "data.streaming", "streams are always packed: set `data.packing: true`"
    if data.mixture is not None and data.mixture.temperature is not None:
        yield "data.mixture.temperature", "the size of a stream is unknown: remove it, and set each source's `weight`"
    for i, source in enumerate(data.train):
        if source.max_epochs is not None and source.max_epochs % 1:
            yield f"data.train[{i}].max_epochs", "must be an integer with `data.streaming`"
    if isinstance(data.eval, HeldOut):
        yield "data.eval.share", "the rows of a stream are not known: give sources, or set `data.streaming: false`"
    if isinstance(recipe.objective, Distill):
        yield "data.streaming", "a teacher's distributions are looked up by example before the run: set it to false"


def objective_keys(recipe: Recipe) -> Iterator[Finding]:
    """What the objective's own keys say to each other."""
    yield from ((f"objective.{key}", problem) for key, problem in recipe.objective.problems())


def reference(recipe: Recipe) -> Iterator[Finding]:
    """Whether `objective.reference` can be computed under this mode, these adapters and this data."""
    objective, key = recipe.objective, "objective.reference"
    if not objective.reads_reference:
        return
    if objective.precomputes_reference:
        if recipe.data.streaming:
            others = "`data.streaming: false`"
            others = others if recipe.mode == "full" else f"`adapters_off`, or {others}"
            yield key, f"`precomputed` needs all rows before the first step, and a stream has no end: use {others}"
        return
    if recipe.mode == "full":
        yield key, "`adapters_off` needs adapters, and `mode: full` has none: use `precomputed`, or `mode: lora`"
    if recipe.tokens is not None:
        yield key, "`adapters_off` is not the initial model if tokens are added (tokens.add): use `precomputed`"
    if recipe.lora is not None and recipe.lora.modules_to_save:
        modules = ", ".join(recipe.lora.modules_to_save)
        yield (
            key,
            f"`adapters_off` is not the initial model if modules are trained fully (lora.modules_to_save: {modules})"
            ": use `precomputed`, or name them in `lora.targets` instead",
        )
    if "reference_model" in objective.other_models:
        yield "objective.reference_model", "has no effect under `reference: adapters_off`: remove one of the two"


def distillation(recipe: Recipe) -> Iterator[Finding]:
    objective = recipe.objective
    if isinstance(objective, Distill) and recipe.rollouts is None and objective.share_prompts != "auto":
        yield "objective.share_prompts", "has an effect with `rollouts` only: remove it"


def answers(recipe: Recipe) -> Iterator[Finding]:
    """Objectives that compare answers, and classifiers."""
    objective, overlong, lora = recipe.objective, recipe.data.overlong, recipe.lora
    name, train_on, rows = objective.name, objective.train_on, objective.row_kind
    if lora is not None and lora.dropout and objective.drops_nothing:
        yield (
            "lora.dropout",
            f"`objective.name: {name}` compares log-probabilities or scores under equal weights, so dropout is off "
            f"(now {lora.dropout}): set `lora.dropout: 0`, or `objective.dropout: true` to have it all the same",
        )
    if rows.sequences and overlong in ("truncate", "split"):
        yield (
            "data.overlong",
            f"`{overlong}` would have `{name}` judge a part of an answer, and an answer without its end teaches to "
            "ramble: use `drop`, which leaves out all of a pair and counts it, or `error`",
        )
    if rows.is_text and overlong == "split":
        yield "data.overlong", "`split` would give the label of a text to each of its parts: use `drop`, `truncate`"
    if not rows.has_turns and train_on != "assistant":
        yield (
            "objective.train_on",
            f"`{train_on}` has no effect under `name: {name}`, which looks at the answers alone (classify: at all): "
            "remove it",
        )
    if not objective.scores_sequences:
        return
    for key in ("generate", "exact_match", "word_error_rate"):
        if getattr(recipe.evaluate, key):
            yield f"evaluate.{key}", f"a model of `objective.name: {name}` scores texts, it generates none: set it to 0"
    if recipe.model.cross_entropy != "auto":
        yield "model.cross_entropy", f"a model of `objective.name: {name}` has no LM head: remove it"
    if lora is not None and "score" in lora.targets:
        yield "lora.targets", f"under `objective.name: {name}` the head `score` is trained in full: leave it out"


def added_tokens(recipe: Recipe) -> Iterator[Finding]:
    if recipe.tokens is None:
        return
    if recipe.mode == "full" and recipe.tokens.train == "added":
        yield "tokens.train", "`mode: full` trains all rows: remove it, or use `mode: lora`"
    for key, other in recipe.objective.other_models.items():
        if not other.endswith(".parquet"):
            yield f"objective.{key}", "lacks the tokens that `tokens.add` adds: remove one of the two"


def predicts_ahead(recipe: Recipe) -> Iterator[Finding]:
    """Settings that a head that predicts several tokens (`model.mtp`) does not support."""
    model, objective = recipe.model, recipe.objective
    if model.mtp != "train":
        if model.mtp_weight is not None:
            yield "model.mtp_weight", f"has no effect under `mtp: {model.mtp}`: remove it, or set `mtp: train`"
        return
    if objective.name != "sft" or recipe.rollouts is not None:
        yield (
            "model.mtp",
            f"`train` learns to write the targets, and `objective.name: {objective.name}` has others than answers to "
            "imitate: use `sft`, or `keep`",
        )
    if model.config is not None:
        yield "model.mtp", "a model from `model.config` has no head yet: give `model.name`, or `keep`"
    if model.train is not None:
        yield "model.mtp", "the head is trained with the text part alone: remove `model.train`, or use `keep`"
    if model.cross_entropy == "plain":
        yield "model.cross_entropy", "`plain` has the logits of the model's own forward alone: use `auto`"
    if recipe.tokens is not None and recipe.mode != "full":
        yield "tokens.add", "the head's files have copies of the tables, which adapters do not grow: use `mode: full`"
    whole = recipe.lora.modules_to_save if recipe.lora is not None else None
    if whole is not None and "mtp" in whole:
        yield "lora.modules_to_save", "the head trains by adapters, as the layers do: leave out `mtp`"


def tower(recipe: Recipe) -> Iterator[Finding]:
    """Settings that a model with its tower (`model.train`) does not support."""
    parts = recipe.model.train
    if parts is None:
        return
    if len(set(parts)) < len(parts):
        yield "model.train", "names a part twice: keep one of each"
    if recipe.model.config is not None and recipe.data.media is None:
        yield "model.train", "a model from `model.config` has no tower: give `model.name`, or remove this"
    if recipe.objective.scores_sequences:
        yield (
            "objective.name",
            f"`{recipe.objective.name}` needs a class of transformers with a head of scores, which of the families "
            "that see images only Gemma 3 has: remove `model.train` and `data.image`, and the text part is trained",
        )
    if recipe.tokens is not None:
        yield "tokens.add", "a multimodal model keeps the tables of its base: remove it, or use unused tokens of it"
    if recipe.train.compile:
        yield "train.compile", "layers are compiled for one length, and towers have images of any size: set it to false"
    if recipe.batch.rows_per_device == "auto":
        yield "batch.rows_per_device", "`auto` tries rows without images, which need less memory: give a number"


def images(recipe: Recipe) -> Iterator[Finding]:
    if (image := recipe.data.image) is None:
        return
    if image.max_pixels and image.min_pixels and image.min_pixels > image.max_pixels:
        yield "data.image.min_pixels", f"is above max_pixels ({image.max_pixels}): lower it"
    yield from _media(recipe, "image", "images", "images of one size", "image processor")


def audio(recipe: Recipe) -> Iterator[Finding]:
    if recipe.data.audio is None:
        return
    yield from _media(recipe, "audio", "sound", "clips of one length", "processor of sound")


def video(recipe: Recipe) -> Iterator[Finding]:
    if recipe.data.video is None:
        return
    yield from _media(recipe, "video", "videos", "videos of one size", "video processor")


def _media(recipe: Recipe, kind: str, name: str, alike: str, processor: str) -> Iterator[Finding]:
    """Settings that rows with media files do not support. alike: files with the same number of tokens."""
    overlong, teacher = recipe.data.overlong, recipe.objective.other_models.get("teacher")
    if overlong in ("truncate", "split") and recipe.objective.train_on == "all":
        yield "data.overlong", f"with {name}, `{overlong}` cuts after answers, and `train_on: all` knows none: use drop"
    if teacher is not None and teacher.endswith(".parquet"):
        yield "objective.teacher", f"a file has its rows by their tokens, which {alike} share: name a model"
    if recipe.model.config is not None:
        yield f"data.{kind}", f"a model from `model.config` has no {processor}: give `model.name`, or remove this"


RULES: tuple[Rule, ...] = (  # of the trainer's keys; `finetune/features.py` adds those of the wings
    *(folder, mode, precision, batch, evaluation, steps, learning_rate, in_backward, sources, streaming),
    *(objective_keys, reference, distillation, answers, added_tokens, predicts_ahead, tower, images, audio, video),
)


def broken_rules(recipe: Recipe, rules: Iterable[Rule] = RULES) -> list[Finding]:
    """Returns the findings of all rules."""
    return [finding for rule in rules for finding in rule(recipe)]
