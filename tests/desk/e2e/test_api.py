"""The functions for notebooks and scripts, and the notebook that shows them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

import finetune
from finetune.api import plan
from finetune.errors import UserError


def test_a_recipe_is_trained_and_tried(recipe: dict[str, Any], write_recipe: Any) -> None:
    loaded = finetune.load_recipe(write_recipe(recipe), "train.max_steps=2")
    run_dir = finetune.train(loaded)
    assert run_dir == Path(recipe["run"]["dir"]) / "run"
    answers = finetune.generate(run_dir, ["river stone", "green"], max_new_tokens=4)
    assert len(answers) == 2
    assert answers == finetune.generate(run_dir / "model", ["river stone", "green"], max_new_tokens=4)
    with pytest.raises(UserError, match="no result here"):
        finetune.generate(run_dir.parent, ["green"])
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        getattr(finetune, "trian")  # noqa: B009


@pytest.mark.long
def test_a_recipe_is_planned(recipe: dict[str, Any], write_recipe: Any) -> None:
    loaded = finetune.load_recipe(write_recipe(recipe))
    choices = plan(loaded, "1xH100-80")
    assert choices == plan(write_recipe(recipe), "1xH100-80")
    assert (choices[0]["verdict"], choices[0]["on"]) == ("fits", "1 H100-80")
    for wrong, said in (((), "no devices"), (("3 apples",), "apples")):
        with pytest.raises(UserError, match=said):
            plan(loaded, *wrong)
    with pytest.raises(UserError, match="no such order"):
        plan(loaded, "1xH100-80", by="colour")


def test_a_result_is_exported_and_compared(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    run_dir = finetune.train(write_recipe(recipe), "train.max_steps=2")
    exported = finetune.export(run_dir, out=tmp_path / "plain", dtype="float32")
    assert exported == tmp_path / "plain"
    figures = finetune.verify(exported, run_dir)
    assert figures is not None
    assert (figures.top1, figures.greedy) == (1.0, 1.0)
    with pytest.raises(UserError, match="no such run directory"):
        finetune.export(tmp_path / "nowhere")
    with pytest.raises(UserError, match="nowhere"):
        finetune.evaluate(tmp_path / "nowhere", "maths")


@pytest.mark.long
def test_the_lines_of_the_docs_run_together_and_each_alone(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    """Those of docs/start/installation.md in one fresh interpreter; then each function in one of its own, as the first
    that it imports. Only lm_eval's task is left out: it is on the hub."""
    write_recipe(recipe | {"mode": "lora", "lora": {"rank": 4, "alpha": 8}}, "lora.yaml")
    page = (ROOT / "docs" / "start" / "installation.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "load_recipe(" in one]
    kept = [line for line in block.splitlines() if "gsm8k" not in line]
    assert len(kept) == len(block.splitlines()) - 1

    def run(lines: list[str]) -> str:
        done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    together = run([*kept, "print('run_dir', run_dir)", "print('exported', exported)"])
    places = {word: repr(rest) for word, _, rest in (line.partition(" ") for line in together.splitlines())}
    start = [kept[0], f"run_dir, exported = {places['run_dir']}, {places['exported']}", "recipe = 'lora.yaml'"]
    calls = [line for line in kept if re.search(r"\b(plan|generate|verify)\(", line) and "import" not in line]
    assert len(calls) == 3
    for line in calls:
        said = run([*start, line]).strip().splitlines()[-1]
        assert said in together, line
    assert Path(run([kept[0], f"print(export({places['run_dir']}, out='alone'))"]).splitlines()[-1]).name == "alone"


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import finetune; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "pydantic", "yaml", "typer", "finetune.api"} & set(done.stdout.split())


@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order, in one namespace, from the folder that it lies in."""
    for name in ("recipes", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    folder = tmp_path / "docs" / "start"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    notebook = json.loads((ROOT / "docs" / "start" / "notebook.ipynb").read_text(encoding="utf-8"))
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    namespace: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
    assert len(namespace["losses"]) == 10
    assert namespace["losses"][-1] < namespace["losses"][0]
    assert (tmp_path / "runs" / "notebook" / "model" / "config.json").is_file()
