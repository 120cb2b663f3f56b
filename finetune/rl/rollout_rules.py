"""Rules for `rollouts`: what a step samples, how it becomes rows, and what cannot be sampled."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from finetune.recipe.objective_settings import Distill, Grpo
from finetune.recipe.schema import ENGINE_KEYS, Recipe

SAME_ON_POLICY = {"cispo": "dapo", "gspo": "grpo"}  # losses that are about ratios, and their like if all of them are 1


def rollouts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    settings, objective, name = recipe.rollouts, recipe.objective, recipe.objective.name
    if settings is None:
        if objective.takes_rewards:
            example = "`{prompts: 32, samples: 16, ...}`"
            yield "rollouts", f"`objective.name: {name}` trains on samples: add this, {example}"
        return
    if isinstance(objective, Distill):
        lora = recipe.lora
        if objective.teacher is not None and objective.teacher.endswith(".parquet"):
            yield (
                "objective.teacher",
                "a file has predictions of the rows' answers, and these are samples: name a model, or remove "
                "`rollouts`",
            )
        if objective.samples is not None:
            yield "objective.samples", "the teacher's draws are not supported with `rollouts`: use `top_k`"
        if objective.nll_weight:
            yield (
                "objective.nll_weight",
                "with `rollouts` targets are the student's own samples, not the truth: set it to 0",
            )
        if lora is not None and lora.dropout:
            yield "lora.dropout", "samples are drawn without dropout, and have to be trained without: set it to 0"
    elif not objective.takes_rewards:
        yield "rollouts", f"`objective.name: {name}` trains on rows, not on samples of the model: remove this"
        return
    yield from _numbers(recipe)
    if isinstance(objective, Grpo):
        yield from _ratios(recipe, objective)
    yield from _off_policy(recipe)
    yield from _data(recipe)
    yield from _engine(recipe)
    if settings.environment is not None and settings.replay is not None:
        yield "rollouts.environment", "has no effect under `rollouts.replay`, which samples nothing: remove it"
    elif settings.environment is not None and settings.engine != "own":
        yield "rollouts.environment", f"`engine: {settings.engine}` samples one turn of each prompt: use `engine: own`"
    if objective.takes_rewards and not recipe.rewards and settings.replay is None:
        yield "rewards", f"`objective.name: {name}` needs a reward, such as `rewards: [{{name: exact_match}}]`"
    if recipe.rewards and settings.replay is not None:
        yield "rewards", "have no effect under `rollouts.replay`, which has the recorded ones: set `rewards: []`"
    if isinstance(objective, Grpo) and objective.loss == "reinforce_pp" and objective.scale_rewards is not None:
        yield "objective.scale_rewards", "`reinforce_pp` divides advantages by their own deviation: remove this"
    if recipe.train.max_steps is None or recipe.train.epochs is not None:
        yield (
            "train.max_steps",
            "the length of a run that samples its rows is given in steps: set it, and remove `train.epochs`",
        )
    if recipe.train.compile:
        yield "train.compile", "lengths of samples differ from step to step, so layers would be compiled again: false"
    if isinstance(objective, Grpo) and objective.dropout:
        yield "objective.dropout", "samples are drawn without dropout, and have to be trained without: set it to false"


def _numbers(recipe: Recipe) -> Iterator[tuple[str, str]]:
    settings, objective, batch = recipe.rollouts, recipe.objective, recipe.batch
    assert settings is not None
    rows = settings.prompts * settings.samples
    if batch.rows != rows:
        yield (
            "batch.rows",
            f"a row is one sample, and a step has {settings.prompts} x {settings.samples} of them "
            f"(rollouts.prompts x rollouts.samples): set it to {rows}",
        )
    if settings.samples == 1 and isinstance(objective, Grpo):
        yield (
            "rollouts.samples",
            f"`loss: {objective.loss}` compares the samples of a prompt, and 1 has none to compare with: use 4 or more",
        )
    if settings.max_new_tokens >= recipe.data.max_length:
        yield (
            "rollouts.max_new_tokens",
            f"{settings.max_new_tokens} leaves no room for a prompt: lower it, or raise data.max_length "
            f"({recipe.data.max_length})",
        )
    if batch.rows_per_device == "auto":
        yield (
            "batch.rows_per_device",
            "`auto` tries the rows of the data, and those of a step are sampled: give a number, or "
            "`batch.tokens_per_device`",
        )
    if settings.top_k == 1 and objective.takes_rewards:
        yield "rollouts.top_k", "1 makes all samples of a prompt equal, so no reward tells them apart: use more"


def _ratios(recipe: Recipe, objective: Grpo) -> Iterator[tuple[str, str]]:
    """Keys that are about ratios of probabilities, and need some that are not 1."""
    settings = recipe.rollouts
    assert settings is not None
    loss, on_policy = objective.loss, settings.reuse == 1 and settings.staleness == 0
    otherwise = "set `rollouts.reuse` or `rollouts.staleness`"
    if on_policy and loss in SAME_ON_POLICY:
        yield (
            "objective.loss",
            f"`{loss}` is `{SAME_ON_POLICY[loss]}` if every sample is trained on once, by the weights that it was "
            f"drawn from: use that, or {otherwise}",
        )
    if on_policy and objective.clip is not None:
        yield (
            "objective.clip",
            "has no effect: every sample is trained on once, by the weights that it was drawn from, so all ratios are "
            f"1: remove it, or {otherwise}",
        )
    if objective.clip is not None and objective.clip[0] > 1:
        yield "objective.clip", f"{objective.clip[0]:g}: ratios are above 0, so use at most 1, which is no lower bound"
    if settings.engine == "vllm" and objective.correction is None:
        yield (
            "objective.correction",
            "a server rounds otherwise than the trainer, and samples that are taken as the trainer's own have made "
            "runs collapse: set `sequence_mask` (TRL's default), `tis` or `icepop`; or `none`, to go without",
        )
    own = settings.engine == "own" and settings.replay is None
    if own and recipe.train.precision == "fp32" and objective.corrects:
        yield (
            "objective.correction",
            "has no effect: the modules that train sample, in fp32, so all of its ratios are 1: remove it",
        )
    bounds = objective.correction_bounds
    if bounds is not None and not objective.corrects:
        yield "objective.correction_bounds", "has no effect without `objective.correction`: remove it, or set that"
    if bounds is not None and not bounds[0] < 1 < bounds[1]:
        yield (
            "objective.correction_bounds",
            f"[{bounds[0]:g}, {bounds[1]:g}] leaves out 1, the ratio of a sampler that is the trainer: use bounds "
            "below and above it",
        )


def _off_policy(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Numbers of steps and batches that a run of this length does not reach."""
    settings = recipe.rollouts
    assert settings is not None
    steps = recipe.train.max_steps
    if steps is not None and settings.reuse > steps:
        yield (
            "rollouts.reuse",
            f"{settings.reuse} steps on the same samples, and the run has {steps} (train.max_steps): use at most that",
        )
    if steps is not None and settings.staleness > (steps - 1) // settings.reuse:
        yield (
            "rollouts.staleness",
            f"{settings.staleness}: no batch is drawn from weights that were trained, as train.max_steps: {steps} has "
            "no more batches: lower it, or raise that",
        )


def _engine(recipe: Recipe) -> Iterator[tuple[str, str]]:
    settings, lora = recipe.rollouts, recipe.lora
    assert settings is not None
    defaults = type(settings).model_fields
    for key in sorted({key for keys in ENGINE_KEYS.values() for key in keys} - set(ENGINE_KEYS[settings.engine])):
        if getattr(settings, key) is not None:
            yield f"rollouts.{key}", f"has no effect under `engine: {settings.engine}`, only under vllm: remove it"
    if settings.engine == "own":
        return
    if settings.replay is not None:
        yield "rollouts.engine", "has no effect under `rollouts.replay`, which samples nothing: remove it"
    url = urlsplit(settings.url or "")
    if url.scheme not in ("http", "https") or not url.netloc or url.path.rstrip("/"):
        yield "rollouts.url", "`engine: vllm` needs it, as http://HOST:PORT, without /v1"
    elif url.username or url.password or url.query:
        yield "rollouts.url", "must not hold a user, a password or a query: name the variable that has the key in `key`"
    if settings.cohort != defaults["cohort"].default:
        yield "rollouts.cohort", "has no effect under `engine: vllm`, which decides what it decodes together: remove it"
    for key in ("top_k", "top_p"):
        if getattr(settings, key) != defaults[key].default:
            yield (
                f"rollouts.{key}",
                "a vLLM server gives log-probabilities among the likeliest tokens only, and the loss has those among "
                "all: remove it",
            )
    # https://docs.vllm.ai/en/v0.32.0/api/vllm/lora/peft_helper/ refuses these adapters.
    refused = {
        "lora.dora": lora is not None and lora.dora,
        "lora.modules_to_save": lora is not None and lora.modules_to_save is not None,
        "tokens": recipe.mode != "full" and recipe.tokens is not None,
    }
    for key, is_set in refused.items():
        if is_set:
            yield key, "a vLLM server loads adapters of linear layers alone, without this: remove it, or `engine: own`"
    if recipe.model.train is not None:
        keys = ", ".join(["`model.train`", *(f"`data.{kind}`" for kind in recipe.data.media_kinds)])
        yield "rollouts.engine", f"vllm gets the weights of models of text alone: use `own`, or remove {keys}"


def _data(recipe: Recipe) -> Iterator[tuple[str, str]]:
    data = recipe.data
    if data.packing:
        yield (
            "data.packing",
            "a row is one sample; micro-batches hold as many as `batch.tokens_per_device` says, without padding: set "
            "it to false",
        )
    if data.streaming:
        yield "data.streaming", "prompts are drawn from all rows: set it to false"
    if data.mixture is not None:
        yield "data.mixture", "prompts are drawn from all rows alike: remove it"
    files = " and ".join(f"`data.{kind}`" for kind in data.media_kinds)
    if files and recipe.objective.name == "distill":
        yield (
            "objective.name",
            f"a teacher does not read the samples of prompts with files: use `grpo`, or remove {files}",
        )
    if files and recipe.rollouts is not None and recipe.rollouts.environment is not None:
        yield "rollouts.environment", f"its turns follow prompts of text alone: remove it, or {files}"
    if data.overlong in ("truncate", "split"):
        yield "data.overlong", f"`{data.overlong}` would cut prompts: use `drop` or `error`"
    if recipe.objective.train_on == "all":
        yield "objective.train_on", "under `all` a row has no prompt: use `assistant`"
    for i, source in enumerate(data.train):
        for key, default in (("weight", 1.0), ("max_epochs", None)):
            if getattr(source, key) != default:
                yield f"data.train[{i}].{key}", "prompts are drawn from all rows alike: remove it"
