"""Which files of a folder are a split's, by the rules of `datasets`: README.md, else folders' and files' names.

    configs in README.md                        as they say
    data/NAME-00000-of-00001.parquet            NAME, whatever it is
    train/a.jsonl, my_test/b.jsonl              the words below in a folder's name
    train-0.jsonl, my.test.jsonl                in a file's name
    anything else                               train

https://huggingface.co/docs/datasets/repository_structure; datasets/data_files.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from finetune.errors import UserError

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_BETWEEN = r"[-._ 0-9]"
_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)\n---[ \t]*$", re.DOTALL | re.MULTILINE)
_SHOWN = 3

Splits = dict[str, list[str]]  # names of files, in their order


def files_of_split(
    place: str, names: Sequence[str], split: str, config: str | None, readme: str | None
) -> tuple[list[str], str | None]:
    """Returns the files of a split, and a note if others are left out. names: below the folder `place`; readme: text
    of its README.md. Raises UserError if it has no such split or configuration."""
    splits = _configured(place, names, config, readme)
    if splits is None:
        if config is not None:
            raise UserError(f"{place}: `config: {config}`, but its README.md names no configurations. Fix: remove it")
        splits = splits_by_name(names)
    files, note = splits.get(split), None
    if files is None and split == "train" and len(splits) == 1 and set(names) == set(*splits.values()):
        (other,) = splits
        return list(names), f"{place}: all of its files are of the split `{other}` by their names, and all are taken"
    if not files:
        known = ", ".join(f"`{name}` ({_some(files)})" for name, files in splits.items() if files) or "none"
        raise UserError(f"{place}: its files have no split `{split}`, but {known}. Fix: name one as `split`")
    if left := [name for name in names if name not in set(files)]:
        others = [f"`{name}`" for name in splits if name != split]
        note = f"{place}: split `{split}` is {_some(files)}; not taken: {_some(left)}" + (
            f" (other splits: {', '.join(others)})" if others else ""
        )
    return files, note


def splits_by_name(names: Sequence[str]) -> Splits:
    """Returns the splits that names of files tell; a name with words of two is in both, as in `datasets`."""
    shards: Splits = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            shards.setdefault(match[1], []).append(name)
    if shards:
        return shards
    for is_of in (_folder_is_of, _file_is_of):
        found = {split: [name for name in names if is_of(name, split)] for split in _WORDS}
        if any(found.values()):
            return {split: files for split, files in found.items() if files}
    return {"train": list(names)}


def _folder_is_of(name: str, split: str) -> bool:
    words = "|".join(_WORDS[split])
    pattern = re.compile(rf"(?:.*{_BETWEEN})?(?:{words})(?:{_BETWEEN}.*)?", re.DOTALL)
    return any(pattern.fullmatch(part) for part in PurePosixPath(name).parent.parts)


def _file_is_of(name: str, split: str) -> bool:
    words = "|".join(_WORDS[split])
    return bool(re.fullmatch(rf"(?:.*{_BETWEEN})?(?:{words}){_BETWEEN}.*", PurePosixPath(name).name, re.DOTALL))


# --- README.md of a dataset's repository


def _configured(place: str, names: Sequence[str], config: str | None, readme: str | None) -> Splits | None:
    """Returns the splits of the configuration that is named, or meant without a name; None if README.md has none."""
    configs = _configs(readme)
    if not configs:
        return None
    chosen = [one for one in configs if one.get("config_name", "default") == config]
    if config is None:
        chosen = configs if len(configs) == 1 else [one for one in configs if one.get("default") is True]
        chosen = chosen or [one for one in configs if one.get("config_name", "default") == "default"]
    if len(chosen) != 1:
        listed = ", ".join(f"`{one.get('config_name', 'default')}`" for one in configs)
        problem = "it has several configurations" if config is None else f"it has no configuration `{config}`"
        raise UserError(f"{place}: {problem} ({listed}, by its README.md). Fix: name one as `config`")
    folder, patterns = chosen[0].get("data_dir"), chosen[0].get("data_files")
    start = f"{str(folder).strip('./')}/" if folder else ""
    inside = [name for name in names if name.startswith(start)]
    if patterns is None:
        by_name = splits_by_name([name.removeprefix(start) for name in inside])
        return {split: [start + name for name in files] for split, files in by_name.items()}
    found = {split: _matching(inside, start, globs) for split, globs in _patterns(patterns).items()}
    return {split: files for split, files in found.items() if files}


def _configs(readme: str | None) -> list[Mapping[str, Any]]:
    match = _FRONT_MATTER.match((readme or "").removeprefix("\ufeff").replace("\r\n", "\n"))
    try:
        front = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:  # text that only looks like it
        return []
    configs = front.get("configs") if isinstance(front, Mapping) else None
    return [one for one in configs if isinstance(one, Mapping)] if isinstance(configs, list) else []


def _patterns(given: Any) -> dict[str, list[str]]:
    """Returns the patterns of each split: `a/*`, a list of these, {train: a/*} or [{split: train, path: a/*}]."""
    if isinstance(given, list) and all(isinstance(one, Mapping) for one in given):
        given = {str(one.get("split", "train")): one.get("path") for one in given}
    by_split = given if isinstance(given, Mapping) else {"train": given}
    return {
        str(split): [str(one) for one in (paths if isinstance(paths, list) else [paths])]
        for split, paths in by_split.items()
    }


def _matching(names: Sequence[str], start: str, globs: Sequence[str]) -> list[str]:
    regexes = [re.compile(_regex(start + glob.removeprefix("./"))) for glob in globs]
    return [name for name in names if any(regex.fullmatch(name) for regex in regexes)]


def _regex(glob: str) -> str:
    """Returns the regular expression of a pattern: * within a name, ** over folders, [0-9] as it is."""
    parts: list[tuple[str, Callable[[str], str]]] = [
        (r"\*\*/", lambda _: "(?:.*/)?"),
        (r"\*\*", lambda _: ".*"),
        (r"\*", lambda _: "[^/]*"),
        (r"\?", lambda _: "[^/]"),
        (r"\[!?[^\]]+\]", lambda text: text.replace("[!", "[^").replace("\\", "\\\\")),
        (r"[\s\S]", re.escape),
    ]
    tokens = re.finditer("|".join(f"({pattern})" for pattern, _ in parts), glob)
    return "".join(parts[token.lastindex - 1][1](token[0]) for token in tokens if token.lastindex)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
