"""What a run reads: rows, tokenizer, config and base. A checkpoint keeps it, and a resume compares it with what is
there now, because the same paths may hold something else.

    state.json  "inputs": {"data": {...}, "tokenizer": {...}, "config": {...}, "base": {...}, "eval": {...}}

Rank 0 reads it for all. `checkpoint.accept_changes` allows a part to differ; what has no effect on the steps to come is
said and not refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from transformers import PretrainedConfig, PreTrainedTokenizerFast

from finetune.data.content import digest
from finetune.data.dataset import Dataset
from finetune.data.row_source import RowSource
from finetune.engine.base import Engine
from finetune.errors import UserError
from finetune.models.fingerprint import base_content, base_enters_steps, config_content, tokenizer_content
from finetune.recipe import Recipe

Inputs = dict[str, dict[str, Any]]
Result = TypeVar("Result")
# In the order of messages; each is a value of `checkpoint.accept_changes`.
PARTS = ("data", "tokenizer", "config", "base")


class InputChange(NamedTuple):
    """A difference; part: None if it is said but never refused."""

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
    """Returns what this run reads; after the load, which has brought the base here. Collective. Raises UserError.

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
            "base": {
                **base_content(recipe.model),
                "enters steps": enters,
                **({"reference": reference} if reference else {}),
            },
        }

    return on_main(engine, read)


def on_main(engine: Engine, call: Callable[[], Result]) -> Result:
    """Returns on every rank what `call` returns on rank 0; raises there what it raises as UserError. Collective."""
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
        text = "the checkpoint is of an earlier version, which kept no content of rows, tokenizer, config and base: "
        known = {name: now["data"].get(name) for name in saved["data"]}
        changes = [InputChange("data", line) for line in differences("data", saved["data"], known)]
        return [*changes, InputChange(None, f"{text}whether these are the same is not known")]
    parts = {"tokenizer": _of_tokenizer, "config": _of_config, "base": _of_base}
    changes = [InputChange("data", line) for line in differences("data", saved["data"], now["data"])]
    for part, compare in parts.items():
        changes += compare(saved[part], now[part])
    of_eval = differences("data", saved["eval"], now["eval"])
    return [*changes, *(InputChange(None, line) for line in of_eval)]


def _of_tokenizer(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[InputChange]:
    """Rules are digested as the tokenizers library writes them, so those of two versions are not compared."""
    skipped = {"library"}
    if saved["library"] != now["library"] and saved["rules"] != now["rules"]:
        skipped.add("rules")
        versions = f"tokenizers {saved['library']} and {now['library']}"
        yield InputChange(None, f"tokenizer: rules: not compared, as {versions} write them in different ways")
    for line in differences("tokenizer", _without(saved, skipped), _without(now, skipped)):
        yield InputChange("tokenizer", line)


def _of_config(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[InputChange]:
    """Another version of transformers has keys with defaults that the other does not have: only common ones count."""
    if saved["library"] != now["library"]:
        saved, now = _common(saved, now), _common(now, saved)
    for line in differences("config", _without(saved, {"library"}), _without(now, {"library"})):
        yield InputChange("config", line)


def _of_base(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[InputChange]:
    """One commit of the hub is always the same files. Full training has all its weights from the checkpoint."""
    same_commit = saved.get("commit") is not None and saved.get("commit") == now.get("commit")
    if not same_commit and saved.get("files") != now.get("files"):
        enters = saved["enters steps"] or now["enters steps"]
        note = "" if enters else " (no effect: the weights are the checkpoint's)"
        lines = (*differences("base: commit", saved.get("commit"), now.get("commit")),)
        for line in (*lines, *differences("base", saved.get("files", {}), now.get("files", {}))):
            yield InputChange("base" if enters else None, line + note)
    for line in differences("base: reference", saved.get("reference"), now.get("reference")):
        yield InputChange("base", line)


def _without(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _common(values: Any, other: Any) -> Any:
    """Returns values of the keys that `other` has as well."""
    if not isinstance(values, dict) or not isinstance(other, dict):
        return values
    return {name: _common(value, other[name]) for name, value in values.items() if name in other}


def differences(place: str, saved: Any, now: Any) -> Iterator[str]:
    """Yields `part: key.key: before -> now`, value by value."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for name in sorted({*saved, *now}):
            inner = f"{place}{'.' if ':' in place else ': '}{name}"
            yield from differences(inner, saved.get(name), now.get(name))
    elif saved != now:
        yield f"{place}: {json.dumps(saved)} -> {json.dumps(now)}"
