"""Reports of damaged runs: what is missing is said, the rest is shown, and a page is written whole or not at all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import full_disk
from test_report import make_run

from finetune.desk.view.report import write_report
from finetune.errors import UserError

FILES = ("metrics.jsonl", "recipe.yaml", "plan.json", "status.json", "generations.jsonl", "evaluate.json")
FILES += ("examples.json", "out/verify.json", "checkpoints/step-00000020/state.json")
ODD: tuple[Any, ...] = (None, 7, -1.5, True, "text", [], {}, [[]], {"a": [1]}, 10**400, 1e308, "\ud800", [None, "x"])
CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "garbage": lambda content: bytes(range(256)) * 9,
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "NUL": lambda content: b"\0" * len(content),
    "a list": lambda content: b"[1, 2]",
    "null": lambda content: b"null",
    "a number": lambda content: b"7",
    "a text": lambda content: b'"text"',
    "nested": lambda content: b"[" * 90_000,
    "deep": lambda content: b'{"a": ' * 900 + b"1" + b"}" * 900,
    "NaN": lambda content: content.replace(b"0.", b"NaN, 0.").replace(b": 3", b": NaN"),
    "infinite": lambda content: content.replace(b"0.", b"1e999, 0.").replace(b": 3", b": 1e999"),
    "bytes that are no text": lambda content: content.replace(b"e", b"\xff"),
    "a line of another kind": lambda content: content + b'[1]\n{"step": "x"}\n{"step": 1e9}\n{"step": true}\n',
}


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with one part of it taken out, or replaced by something odd."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice([*value])
        if rng.random() < 0.2:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], *([] if rng.random() < 0.2 else [mutated(value[at], rng)]), *value[at + 1 :]]
    return rng.choice(ODD)


def page_of(run: Path) -> str:
    out = run.parent / "page.html"
    write_report([run], out)
    page = out.read_text(encoding="utf-8")
    assert page.endswith("</html>\n")
    return page


@pytest.mark.parametrize("file", FILES)
def test_damage_is_said_and_the_rest_is_shown(tmp_path: Path, file: str) -> None:
    run = make_run(tmp_path / "run", 1e-3)
    whole, content = page_of(run), (run / file).read_bytes()
    assert "Missing or damaged" not in whole
    for name, damage in CONTENTS.items():
        (run / file).write_bytes(damage(content))
        page = page_of(run)
        if file in FILES[1:4] and name in ("empty", "cut", "garbage", "UTF-16", "a list", "null", "nested"):
            assert f"run: {file} cannot be read" in page or (name, file) == ("cut", "recipe.yaml"), name
        if file != "metrics.jsonl":
            assert "data-values" in page, name
        if file not in ("plan.json", "metrics.jsonl"):
            assert "2.13" in page, name
    (run / file).unlink()
    page = page_of(run)
    assert (f"run: {file} is missing" in page) == (file in FILES[:4])
    (run / file).mkdir()
    page_of(run)


@pytest.mark.parametrize("file", [file for file in FILES if file.endswith("json")])
def test_values_of_other_kinds(tmp_path: Path, file: str) -> None:
    run, rng = make_run(tmp_path / "run", 1e-3), random.Random(file)
    content = json.loads((run / file).read_text(encoding="utf-8"))
    for _ in range(40):
        changed = mutated(mutated(content, rng), rng)
        (run / file).write_text(json.dumps(changed), encoding="utf-8")
        assert "data-values" in page_of(run), changed


@pytest.mark.parametrize("file", ["metrics.jsonl", "generations.jsonl", "recipe.yaml"])
def test_lines_of_other_kinds(tmp_path: Path, file: str) -> None:
    import yaml

    run, rng = make_run(tmp_path / "run", 1e-3), random.Random(file)
    text = (run / file).read_text(encoding="utf-8")
    values = [yaml.safe_load(text)] if file == "recipe.yaml" else [json.loads(line) for line in text.splitlines()]
    for _ in range(40):
        changed = [mutated(mutated(one, rng), rng) for one in values]
        (run / file).write_text("".join(json.dumps(one) + "\n" for one in changed), encoding="utf-8")
        assert "2.13" in page_of(run), changed


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", 1e-3), tmp_path / "page.html"
    out.write_text("the one before")
    with full_disk(1000), pytest.raises(UserError, match="cannot be written: File too large"):
        write_report([run], out)
    assert out.read_text() == "the one before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]
    write_report([run], out)
    assert out.read_text(encoding="utf-8").endswith("</html>\n")
