"""Damaged files of bases, results and adapters: one line that names the file and what to do, from every command."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import finetune, train_here
from damage import ADAPTER, BASE, WEIGHTS, Damage
from rich.console import Console

from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.models.config import check_sizes, model_config
from finetune.models.tokenizer import load_tokenizer
from finetune.release.export.commands import ExportOptions, export_run
from finetune.release.export.loading import load_result, load_trained

# What transformers reads all the same, with the weights and the text that the folder has.
HARMLESS = {
    "config.json of a quantisation",
    "tokenizer_config.json of another class",
    "tokenizer_config.json of a template that is a number",
}
# Seen only once a model is made, or values are read.
LATE = {"no weights", "weights other shapes than the config", "config.json of a wide layer"}
FEW = ("weights cut in its data", "config.json a list", "tokenizer.json cut", "an index without weight_map")
FEW += ("tokenizer.json of another model", "generation_config.json cut", "pickled weights", "no weights")
FEW += ("weights other shapes than the config",)
FEW_ADAPTERS = ("adapter cut in its header", "adapter other shapes than the config", "adapter_config.json cut")
FEW_ADAPTERS += ("adapter_config.json of a rank of text", "adapter_config.json of another rank", "a pickled adapter")
FEW_ADAPTERS += ("tokenizer.json garbage", "adapter_config.json of targets that are not there")


def most(table: dict[str, Damage], few: tuple[str, ...]) -> list[Any]:
    assert set(few) <= set(table)
    return [pytest.param(name, marks=[] if name in few else pytest.mark.long) for name in table]


@pytest.fixture(scope="module")
def runs(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, a run of full training and one of adapters on it."""
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(made / "llama", folder / "base")
    for mode in ("full", "lora"):
        train_here(written(folder, made, mode, folder / "base"))
    return folder


def written(folder: Path, made: Path, mode: str, base: Path) -> Path:
    recipe = {
        "run": {"name": mode, "dir": str(folder)},
        "model": {"name": str(base)},
        "mode": mode,
        "data": {
            "train": [{"path": str(made / "rows.jsonl"), "format": "messages"}],
            "eval": [{"path": str(made / "held_out.jsonl"), "format": "messages", "limit": 2}],
            "max_length": 64,
        },
        "batch": {"rows": 2},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 1, "precision": "fp32"},
        "evaluate": {"at_start": False},
    } | ({"lora": {"rank": 4}} if mode == "lora" else {})
    path = folder / f"{mode}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def told(call: Callable[[], object], folder: Path) -> str:
    """Returns the error of a call: one line, with the folder and without an advice to load pickles."""
    with pytest.raises(UserError) as raised:
        call()
    message = str(raised.value)
    assert str(folder) in message or "model.name" in message, message
    assert "\n" not in message, message
    assert not re.search(r"weights_only|torch\.load|use_safetensors|trust", message)
    return message


@pytest.mark.parametrize("name", BASE)
def test_a_damaged_base_is_told_before_it_trains(
    made: Path, recipe: dict[str, Any], write_recipe: Any, tmp_path: Path, name: str
) -> None:
    base = shutil.copytree(made / "llama", tmp_path / "base")
    BASE[name](base)
    recipe["model"]["name"], recipe["train"]["max_steps"] = str(base), 1
    path = write_recipe(recipe)

    def begun() -> None:  # what `check` and every launch do first
        model = load_recipe(path).model
        check_sizes(model, model_config(model))
        load_tokenizer(model)

    if name in HARMLESS:
        begun()
    elif name in LATE:
        begun()
        told(lambda: train_here(path), base)
    else:
        told(begun, base)


@pytest.mark.parametrize("name", most(BASE, FEW))
def test_a_damaged_result_is_told(runs: Path, tmp_path: Path, name: str) -> None:
    run = shutil.copytree(runs / "full", tmp_path / "run")
    BASE[name](run / "model")
    if name in HARMLESS:
        return
    told(lambda: load_result(run), run / "model")
    for options in (ExportOptions(kind, out=tmp_path / kind) for kind in ("hf", "gguf")):
        told(partial(export_run, run, options, Console(quiet=True)), run / "model")
        assert options.out is not None
        assert not options.out.exists()


@pytest.mark.parametrize("name", most(ADAPTER, FEW_ADAPTERS))
def test_a_damaged_adapter_is_told(runs: Path, tmp_path: Path, name: str) -> None:
    run = shutil.copytree(runs / "lora", tmp_path / "run")
    ADAPTER[name](run / "model")
    place = Path("/no/such") if "is gone" in name else run / "model"
    told(lambda: load_result(run), place)
    if "base that is gone" in name:  # a run knows its base by its recipe
        return
    with pytest.raises(UserError):
        export_run(run, ExportOptions(out=tmp_path / "out"), Console(quiet=True))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", most(BASE, FEW))
def test_a_damaged_base_of_an_adapter_is_told(runs: Path, tmp_path: Path, name: str) -> None:
    """The tokenizer is the adapter's own; the base's is not read."""
    if name in HARMLESS or name.startswith("tokenizer"):
        return
    base = shutil.copytree(runs / "base", tmp_path / "base")
    BASE[name](base)
    told(lambda: load_trained(runs / "lora" / "model", str(base)), base)
    options = ExportOptions(out=tmp_path / "out", base=str(base))
    told(lambda: export_run(runs / "lora", options, Console(quiet=True)), base)


def test_the_command_line_says_it_in_one_line(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "full", tmp_path / "run")
    WEIGHTS["cut in its header"](run / "model" / "model.safetensors")
    done = finetune("generate", run, "hello")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {run}/model/model.safetensors: damaged or incomplete (100 bytes")
    assert done.stderr.rstrip().endswith("copy or download the file again")
