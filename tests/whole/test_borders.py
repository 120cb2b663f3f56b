"""A wing's tests import what the wing may: so a wing goes with its tests, and the trainer's pass without any."""

from __future__ import annotations

import ast
import subprocess

import pytest
from repository import ROOT

TRAINER = ("checkpoints", "data", "engine", "errors", "models", "objectives", "recipe", "shipped", "startup")
TRAINER = (*TRAINER, "tracking", "training", "user_code", "utils")
WINGS = ("release", "rl", "plan", "desk")  # each may import those before it
COMPOSED = ("features",)


@pytest.mark.parametrize("folder", ["trainer", *WINGS[:-1]])
def test_imports_go_one_way(folder: str) -> None:
    wings = WINGS[: WINGS.index(folder) + 1] if folder in WINGS else ()
    allowed = {*TRAINER, *wings, *(COMPOSED if wings else ())}
    pattern = "test_*.py" if wings else "*.py"  # programs of wings are commands, which the desk has
    imported = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {name}"
        for file in sorted((ROOT / "tests" / folder).rglob(pattern))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in modules(node)
        if name.startswith("finetune.") and name.split(".")[1] not in allowed
    ]
    assert imported == []


def modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [
            f"{node.module}.{alias.name}" if node.module == "finetune" else str(node.module) for alias in node.names
        ]
    return []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_trainer_passes_its_tests_where_the_wings_are_deleted() -> None:
    done = subprocess.run([ROOT / "scripts/without_wings.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
