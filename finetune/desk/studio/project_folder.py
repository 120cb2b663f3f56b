"""The folder that a studio was started in: the paths it may name, and what is in it."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune.data.sources.readers import is_data
from finetune.errors import UserError
from finetune.shipped import SHIPPED

OF_A_RUN = ("metrics.jsonl", "plan.json", "status.json")
_OWNERS = (*OF_A_RUN, "config.json", "adapter_config.json", "tokenizer_config.json")  # their folders have no rows
_SETTINGS = ("package.json", "package-lock.json", "tsconfig.json", "constraints.txt", "requirements.txt")
_SETTINGS += ("recipe.schema.json", "CMakeLists.txt", "robots.txt")
STUDIO = ".finetune-studio"  # commands and their pages
_DEPTH, _MOST = 5, 20_000  # folders below each other; entries that are looked at
MOST_RECIPE = 100_000  # bytes of a recipe: some seconds of reading
_HIDDEN = re.compile(r"\.|__pycache__$|node_modules$|checkpoints$|venv$|locks$")
_ACCELERATE = re.compile(r"^(compute_environment|distributed_type):", re.MULTILINE)
_RECIPE = re.compile(r"^(extends|model|data|mode|optimizer):", re.MULTILINE)


def inside(text: str, folder: Path) -> Path:
    """Returns a path of a form, relative to the folder. Raises UserError if it leads out of it, also through links."""
    if not text.strip() or "\0" in text or text.startswith("-") or not is_utf8(text):
        raise UserError(f"{text!r} is not a path in this folder. Fix: give a path relative to it")
    try:
        whole = (folder / text).resolve()
        whole.is_file()  # raises OSError for a name that is too long, or a folder that may not be entered
    except (OSError, RuntimeError) as error:  # a loop of links
        raise UserError(f"{text}: cannot be followed: {error}. Fix: check the path and its links") from None
    if not whole.is_relative_to(folder.resolve()):
        raise UserError(
            f"{text} is outside of {folder}. Fix: start the studio in a folder above both, or use a terminal"
        )
    return Path(os.path.relpath(os.path.normpath(folder / text), folder))


def inside_or_shipped(text: str, folder: Path) -> Path:
    """Returns a file in the folder, or a recipe or config that comes with the package. Raises UserError."""
    path = inside(text, folder)
    is_shipped = path.parts[:1] in (("recipes",), ("accelerate_configs",)) and (SHIPPED / path).is_file()
    if not (folder / path).is_file() and not is_shipped:
        raise UserError(f"{text}: no such file. Fix: check the path")
    return path


def as_word(path: Path) -> str:
    """Returns a path as a word of a command, which is no option: `./--eval`."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def is_utf8(text: str) -> bool:
    """Returns whether a text has no half of a surrogate pair, as names of files have that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Contents:
    """Recipes, data, models and runs in a folder, by paths relative to it."""

    recipes: list[str]  # the newest comes first; else those that come with the package
    has_own_recipes: bool
    configs: list[str]  # of accelerate, also those that come with the package
    data: dict[str, int]  # files of rows and their bytes, outside of runs and models
    models: list[str]  # folders, also results of runs
    runs: list[str]  # the one that wrote last comes first
    left_out: list[str]  # why some files are not listed, with their names


def look(folder: Path) -> Contents:
    """Returns what is in a folder."""
    every = list(_files(folder))
    files = [name for name in every if is_utf8(name)]
    left_out = [
        f"{name.encode(errors='replace').decode()}: this name is not UTF-8, so the file is left out. Fix: rename it"
        for name in every
        if not is_utf8(name)
    ]
    owners = {str(Path(name).parent) for name in files if Path(name).name in _OWNERS} - {"."}
    written: dict[str, float] = {}
    for name in files:
        if Path(name).name in OF_A_RUN:
            run = str(Path(name).parent)
            written[run] = max(_modified(folder / name), written.get(run, 0))
    found = [name for name in files if str(Path(name).parent) not in owners and _is_recipe(folder / name, name)]
    found.sort(key=lambda name: -_modified(folder / name))  # stable: those of one time stay by name
    rows = [name for name in files if is_data(name) and not owners & {*map(str, Path(name).parents)}]
    places = [place / "accelerate_configs" for place in (folder, SHIPPED)]
    configs = {path.name for place in places for path in place.glob("*.yaml") if is_utf8(path.name)}
    return Contents(
        recipes=found or [*_shipped_recipes()],
        has_own_recipes=bool(found),
        configs=[f"accelerate_configs/{name}" for name in sorted(configs)],
        data={name: _size(folder / name) for name in rows if Path(name).name not in _SETTINGS},
        models=[str(Path(name).parent) for name in files if Path(name).name in ("config.json", "adapter_config.json")],
        runs=sorted(written, key=lambda run: (-written[run], run)),
        left_out=left_out,
    )


@functools.cache
def _shipped_recipes() -> tuple[str, ...]:
    return tuple(name for name in _files(SHIPPED, "recipes") if _is_recipe(SHIPPED / name, name))


def _modified(path: Path) -> float:
    """Returns 0 for a file that was removed meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_recipe(path: Path, name: str) -> bool:
    parts = Path(name).parts[:-1]
    if path.suffix not in (".yaml", ".yml") or {"base", "tasks", "accelerate_configs"} & {*parts}:
        return False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(20_000)
    except OSError:  # it may not be read, or was removed meanwhile
        return False
    return len(_RECIPE.findall(head)) > 1 and not _ACCELERATE.search(head)


def run_settings(run: Path) -> dict[str, Any]:
    """Returns the recipe of a run as it was resolved; {} if it is missing or damaged."""
    file = run / "recipe.yaml"
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) if file.stat().st_size < MOST_RECIPE else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def base_of(run: Path, folder: Path) -> tuple[str, str]:
    """Returns the folder of a run's base model, or "" and why there is none to talk to."""
    model = run_settings(run).get("model")
    name = model.get("name") if isinstance(model, dict) else None
    if not isinstance(name, str):
        return "", "it began without one: its weights were drawn"
    try:
        is_here = (folder / name / "config.json").is_file()
    except (OSError, ValueError):  # a name that no file can have
        is_here = False
    if is_here:
        return name, ""
    from huggingface_hub import try_to_load_from_cache

    revision = model.get("revision") if isinstance(model, dict) else None
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except (ValueError, OSError):  # a path, of another machine; a name that no file can have
        found = None
    if not isinstance(found, str):
        return "", f"{name} is not on this machine"
    return str(Path(found).parent), ""


def _files(folder: Path, below: str = "") -> Iterator[str]:
    """Yields the files below a folder, relative to it, by name; no hidden ones, and no links that lead elsewhere."""
    seen, root = 0, folder.resolve()
    for place, folders, names in os.walk(folder / below):
        inner = Path(os.path.relpath(place, folder))
        folders[:] = sorted(name for name in folders if not _HIDDEN.match(name)) if len(inner.parts) < _DEPTH else []
        for name in sorted(names):
            seen += 1
            if seen > _MOST:
                return
            if not name.startswith(".") and _is_file_of(root, folder / inner / name):
                yield str(inner / name)


def _is_file_of(root: Path, path: Path) -> bool:
    try:
        return path.is_file() and path.resolve().is_relative_to(root)
    except OSError:  # of a folder that may not be entered
        return False
