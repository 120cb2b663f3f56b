"""Public example configs of other tools become recipes with the batch, masks, template, precision, length, optimizer
and schedule that the tool takes from them; every key of theirs is converted or listed."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from public_configs import CASES, DATASETS, Case
from rich.console import Console

from finetune.desk.setup.other_tools import convert, write_converted
from finetune.errors import UserError
from finetune.features import load_recipe

# Keys that may have another value without another recipe, and why.
WITHOUT_EFFECT = {
    *("output_dir", "run_name", "do_train", "overwrite_output_dir", "columns"),  # names, and switches of the command
    *("fsdp", "fsdp_version", "fsdp_auto_wrap_policy", "transformer_layer_cls_to_wrap", "reshard_after_forward"),
    *("fsdp_sharding_strategy", "offload_params"),  # where weights are; beside tp and cp nothing is offloaded
    *("deepspeed", "use_gradient_checkpointing", "activation_offloading"),  # an `x` before the name changes nothing
    *("dtype", "torch_dtype"),  # of weights that are quantized, or sharded with copies in fp32
    *("bf16", "bfloat16"),  # one of the two is enough
    *("max_steps", "use_peft", "load_in_4bit"),  # -1 is as 0; 4 bits need adapters; full training has no bits
}


def write(case: Case, facts: dict[str, Any]) -> str:
    """Writes the files of a case; returns the source for `--from`."""
    Path("data").mkdir(exist_ok=True)
    Path("data/dataset_info.json").write_text(json.dumps(DATASETS), encoding="utf-8")
    for name, values in case.files.items():
        Path(name).write_text(yaml.safe_dump(values), encoding="utf-8")
    if case.command and "theirs.yaml" not in case.command:
        words = shlex.split(case.command)
        for name, value in facts.items():
            listed = [] if value is None else value if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, listed)]
        return shlex.join(words)
    Path("theirs.yaml").write_text(yaml.safe_dump(facts), encoding="utf-8")
    return case.command or "theirs.yaml"


def converted(case: Case, facts: dict[str, Any]) -> tuple[str, str]:
    """Returns the recipe's text, and what was printed."""
    console = Console(file=io.StringIO(), width=400)
    Path("ours.yaml").unlink(missing_ok=True)
    write_converted(write(case, facts), Path("ours.yaml"), None, case.devices or None, (), console)
    assert isinstance(console.file, io.StringIO)
    return Path("ours.yaml").read_text(encoding="utf-8"), console.file.getvalue()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_public_config(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, printed = converted(case, case.facts)
    assert f"from {case.tool}. Next:" in printed
    values = load_recipe("ours.yaml").model_dump()
    found = {key: at(values, key) for key in case.recipe}
    found["optimizer.name"] = values["optimizer"]["name"]
    assert found == case.recipe
    todos = [line.strip() for line in printed.partition("To do, marked in the recipe:")[2].splitlines() if ": " in line]
    assert sorted({line.partition(": ")[0] for line in todos if line.startswith(SECTIONS)}) == sorted(case.open)
    assert ("# TODO" in text) == bool(case.open)


SECTIONS = (
    "model.",
    "mode:",
    "lora.",
    "data.",
    "objective.",
    "rollouts.",
    "rewards:",
    "batch.",
    "optimizer.",
    "schedule.",
    "train.",
)


def at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = None if values is None else values[part]
    return values


def leaves(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value that is not a section or a list of sections."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        is_section = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value))
        if is_section:
            yield from leaves(value, (*path, key))
        elif isinstance(values, dict):
            yield (*path, key)


def with_value(values: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Returns a copy with another value at the path."""
    if not path:
        return value
    first, *rest = path
    if isinstance(values, list):
        return [with_value(one, tuple(rest), value) if i == first else one for i, one in enumerate(values)]
    return {key: with_value(one, tuple(rest), value) if key == first else one for key, one in values.items()}


def other(value: Any) -> Any:
    """Returns another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 2
    return ["another", *value] if isinstance(value, list) else f"x{value}"


def outcome(case: Case, facts: dict[str, Any]) -> str:
    """Returns the recipe's text with the accelerate config, or the refusal."""
    try:
        conversion = convert(write(case, facts), case.devices or None)[1]
    except UserError as error:
        return str(error)
    return f"{conversion.text('a')}{conversion.launch}"


# Every third config of a tool in the default tests, the others with --all.
THIRDS = [(tool, third) for tool in sorted({case.tool for case in CASES}) for third in range(3)]


@pytest.mark.parametrize(
    ("tool", "third"), [pytest.param(*one, marks=pytest.mark.long if one[1] else []) for one in THIRDS]
)
def test_no_key_vanishes(tool: str, third: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another value of any key, at any depth, changes the recipe or what is listed beside it."""
    monkeypatch.chdir(tmp_path)
    vanished = set()
    for case in [case for case in CASES if case.tool == tool][third::3]:
        before = outcome(case, case.facts)
        for path in leaves(case.facts):
            value: Any = case.facts
            for key in path:
                value = value[key]
            if value is not None and outcome(case, with_value(case.facts, path, other(value))) == before:
                vanished.add((case.id, ".".join(map(str, path))))
    assert [one for one in sorted(vanished) if one[1].rpartition(".")[2] not in WITHOUT_EFFECT] == []


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.id)
def test_unknown_keys_are_listed_at_every_depth(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {path[:i] for path in leaves(case.facts) for i in range(len(path))}
    for path in paths:
        section: Any = case.facts
        for key in path:
            section = section[key]
        if isinstance(section, dict) and path[:1] not in (("lr_scheduler_kwargs",), ("dataset_mixer",)):
            facts = with_value(case.facts, path, {**section, "nobody_knows": 7.5})
            printed = convert(write(case, facts), case.devices or None)[1].text("a")
            place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
            assert f"{place}.nobody_knows=7.5".lstrip(".") in printed


def test_sixty_cases_of_every_tool() -> None:
    assert len(CASES) >= 60
    assert len({case.id for case in CASES}) == len(CASES)
