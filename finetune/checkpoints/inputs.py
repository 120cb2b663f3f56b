"""Inputs of a run: rows, tokenizer, config, base, files of rewards and objective. A checkpoint keeps their digests, and
a resume compares them with those of now, because the same paths may hold something else.

    state.json  "inputs": {"data": {...}, "eval": {...}, "tokenizer": {...}, "config": {...}, "rewards": {...},
                           "objective": {...}, "base": {...}}

Rank 0 reads them for all. `checkpoint.accept_changes` allows a part to differ; differences without effect on later
steps are reported, not refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from transformers import PretrainedConfig, PreTrainedTokenizerFast

from finetune.data.content import digest
from finetune.data.dataset import Dataset
from finetune.data.row_source import RowSource
from finetune.engine.base import Engine
from finetune.errors import UserError
from finetune.models.fingerprint import base_content, base_enters_steps, config_content, tokenizer_content
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import ObjectiveSettings, Own
from finetune.recipe.reward_settings import FileReward
from finetune.recipe.schema import RewardList, Rollouts

Inputs = dict[str, dict[str, Any]]
Result = TypeVar("Result")
# In the order of messages; each is a value of `checkpoint.accept_changes`.
PARTS = ("data", "tokenizer", "config", "base")


class InputChange(NamedTuple):
    """A difference; part: None if it is reported but never refused."""

    part: str | None
    text: str


def read_inputs(
    engine: Engine,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    config: PretrainedConfig,
    data: tuple[RowSource, Dataset | None],
    reference: str | None,
) -> Inputs:
    """Returns the inputs of this run; call it after the load, which has fetched the base. Collective. Raises UserError.

    config: as it was before the load. data: training and held-out. reference: identifies the weights that
    log-probabilities were computed by, if they were.
    """
    enters = any(engine.ranks.gather(base_enters_steps(engine.unwrapped)))
    training, held_out = data

    def read() -> Inputs:
        return {
            "data": training.content(),
            "eval": held_out.examples.content("eval") if held_out is not None else {},
            "tokenizer": tokenizer_content(tokenizer),
            "config": config_content(config),
            "rewards": {**reward_files(recipe.rewards, recipe.rollouts), **sample_teacher(recipe)},
            "objective": own_objective(recipe.objective),
            "base": {
                **base_content(recipe.model),
                "enters steps": enters,
                **({"reference": reference} if reference else {}),
            },
        }

    return on_main(engine, read)


def reward_files(rewards: RewardList, rollouts: Rollouts | None) -> dict[str, str]:
    """Returns a digest of each Python file of `rewards`, and that of `rollouts.environment`, by its key. Raises
    UserError."""
    files = {f"rewards[{i}].file": one.file for i, one in enumerate(rewards) if isinstance(one, FileReward)}
    if rollouts is not None and rollouts.environment is not None:
        files["rollouts.environment.file"] = rollouts.environment.file
    return {key: _file_digest(key, file) for key, file in files.items() if file is not None}


def own_objective(objective: ObjectiveSettings) -> dict[str, str]:
    """Returns a digest of the Python file of the objective, if it is an own one. Raises UserError."""
    file = objective.file if isinstance(objective, Own) else None
    return {} if file is None else {"file": _file_digest("objective.file", file)}


def _file_digest(key: str, file: str) -> str:
    try:
        return digest(Path(file).expanduser().read_bytes())
    except OSError as error:
        raise UserError(f"{key}: {file} cannot be read: {error.strerror}. Fix: check the path") from None


def sample_teacher(recipe: Recipe) -> dict[str, str]:
    """Returns a digest of the files of the teacher that predicts on a run's samples; {} if there is none, or on the
    hub. Raises UserError."""
    teacher = recipe.objective.other_models.get("teacher")
    if recipe.rollouts is None or teacher is None or not Path(teacher).expanduser().is_dir():
        return {}
    model = recipe.model.model_copy(update={"name": teacher, "config": None, "revision": None})
    return {"objective.teacher": digest(json.dumps(base_content(model), sort_keys=True))}


def on_main(engine: Engine, call: Callable[[], Result]) -> Result:
    """Returns the result of `call` on rank 0 to every rank, or raises its UserError on every rank. Collective."""
    outcome: tuple[Any, str | None] = (None, None)
    if engine.is_main:
        try:
            outcome = call(), None
        except UserError as error:
            outcome = None, str(error)
    value, problem = engine.ranks.gather(outcome)[0]
    if problem is not None:
        raise UserError(problem)
    return value


def short(inputs: Inputs) -> str:
    """Returns one digest for each part, for a model card."""
    return ", ".join(f"{part} {digest(json.dumps(inputs[part], sort_keys=True))}" for part in PARTS)


def saved_inputs(state: dict[str, Any]) -> Inputs:
    """Returns the inputs of a checkpoint; of one that an earlier version wrote, only the sizes of its data."""
    return state.get("inputs") or {"data": state["data"]}


def input_changes(saved: Inputs, now: Inputs) -> list[InputChange]:
    """Returns every difference, and what could not be compared."""
    if "tokenizer" not in saved:
        known = {name: now["data"].get(name) for name in saved["data"]}
        text = (
            "the checkpoint is of an earlier version, which kept no content of rows, tokenizer, config and base: "
            "whether these are the same is not known"
        )
        return [*_changes("data", saved["data"], known), InputChange(None, text)]
    config, config_now = saved["config"], now["config"]
    if config["library"] != config_now["library"]:
        # Another version of transformers has keys with defaults that the other does not have: only common ones count.
        config, config_now = _common(config, config_now), _common(config_now, config)
    return [
        *_changes("data", saved["data"], now["data"]),
        *_tokenizer_changes(saved["tokenizer"], now["tokenizer"]),
        *_changes("config", _without(config, {"library"}), _without(config_now, {"library"})),
        *_base_changes(saved["base"], now["base"]),
        *_changes("rewards", saved.get("rewards", {}), now.get("rewards", {})),
        *_changes("objective", saved.get("objective", {}), now.get("objective", {})),
        *(InputChange(None, change.text) for change in _changes("data", saved["eval"], now["eval"])),
    ]


def _changes(part: str, saved: dict[str, Any], now: dict[str, Any]) -> list[InputChange]:
    return [InputChange(part, f"{part}: {line}") for line in differences(saved, now)]


def _tokenizer_changes(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[InputChange]:
    """Rules are digested as the tokenizers library writes them, so those of two versions are not compared."""
    skipped = {"library"}
    if saved["library"] != now["library"] and saved["rules"] != now["rules"]:
        skipped.add("rules")
        versions = f"tokenizers {saved['library']} and {now['library']}"
        yield InputChange(None, f"tokenizer: rules: not compared, as {versions} write them in different ways")
    yield from _changes("tokenizer", _without(saved, skipped), _without(now, skipped))


def _base_changes(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[InputChange]:
    """One commit of the hub is always the same files. Full training has all its weights from the checkpoint."""
    same_commit = saved.get("commit") is not None and saved.get("commit") == now.get("commit")
    if not same_commit and saved.get("files") != now.get("files"):
        enters = saved["enters steps"] or now["enters steps"]
        part, note = ("base", "") if enters else (None, " (no effect: the weights are the checkpoint's)")
        lines = [
            *differences({"commit": saved.get("commit")}, {"commit": now.get("commit")}),
            *differences(saved.get("files", {}), now.get("files", {})),
        ]
        yield from (InputChange(part, f"base: {line}{note}") for line in lines)
    yield from _changes("base", {"reference": saved.get("reference")}, {"reference": now.get("reference")})


def _without(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _common(values: Any, other: Any) -> Any:
    """Returns values of the keys that `other` has as well."""
    if not isinstance(values, dict) or not isinstance(other, dict):
        return values
    return {name: _common(value, other[name]) for name, value in values.items() if name in other}


def differences(saved: Any, now: Any, key: str = "") -> Iterator[str]:
    """Yields `key.key: before -> now`, value by value."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for name in sorted({*saved, *now}):
            yield from differences(saved.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif saved != now:
        yield f"{key}: {json.dumps(saved)} -> {json.dumps(now)}"
