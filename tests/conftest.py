"""What every test may use: tiny models made on the spot, a cache of their own, and real launches."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import forks
import parity
import pytest
import tiny
import yaml
from repository import ROOT
from rich.console import Console

# Before any library is imported: nothing reaches for a hub, and forked tokenizers do not warn.
os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false", WANDB_SILENT="true")
os.environ.setdefault("OMP_NUM_THREADS", "1")
for launcher_variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(launcher_variable, None)

parity.start_ranks = forks.accelerate_launch

with contextlib.suppress(ImportError):  # a machine that runs tests/gpu alone may not have it
    from hypothesis import HealthCheck, settings

    settings.register_profile("slow machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("slow machines")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="also what takes minutes or hours: tests/matrices, `long` tests"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The matrices are not even listed as skipped: what they cover is in the other tests, at fewer sizes."""
    return True if collection_path.name == "matrices" and not config.getoption("--all") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files with launches first, so that the many short ones fill what is left at the end.
    items.sort(key=lambda item: not {"distributed", "e2e"} & {*item.path.parts})
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes minutes, or a tool that few machines have: --all"))


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Collections of garbage, one at the end of every run, pass over what earlier tests have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model folder for each of `tiny.MODELS`, rows.jsonl and held_out.jsonl."""
    folder = tmp_path_factory.mktemp("made")
    for name in tiny.MODELS:
        tiny.save_model(folder, name)
    tiny.write_rows(folder / "rows.jsonl", tiny.conversations(120))
    tiny.write_rows(folder / "held_out.jsonl", tiny.conversations(16, seed=1))
    return folder


@pytest.fixture(scope="session", autouse=True)
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FINETUNE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    folder = tmp_path_factory.getbasetemp()
    forks.environments_folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture
def recipe(made: Path, tmp_path: Path) -> dict[str, Any]:
    """A small complete recipe as plain values, to change and write."""
    return {
        "run": {"name": "run", "dir": str(tmp_path / "runs")},
        "model": {"name": str(made / "llama")},
        "mode": "full",
        "data": {
            "train": [{"path": str(made / "rows.jsonl"), "format": "messages"}],
            "eval": [{"path": str(made / "held_out.jsonl"), "format": "messages"}],
            "max_length": 64,
        },
        "batch": {"rows": 4, "rows_per_device": 2},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 6, "precision": "fp32"},
        "evaluate": {"at_start": False},
    }


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[..., Path]:
    def write(values: dict[str, Any], name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    return write


@pytest.fixture
def online(recipe: dict[str, Any], write_recipe: Callable[..., Path]) -> Path:
    """A recipe that trains on samples of the model."""
    recipe["data"] |= {"packing": False}
    return write_recipe(
        recipe
        | {
            "objective": {"name": "grpo"},
            "rollouts": {"prompts": 2, "samples": 4, "max_new_tokens": 8},
            "rewards": [{"name": "exact_match"}],
            "batch": {"rows": 8, "rows_per_device": 2},
        }
    )


def script(path: str) -> ModuleType:
    """A script of the repository, as a module; path: from its root."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(name: str, *arguments: object, allowed: tuple[int, ...] = (0,)) -> int:
    """Runs a program of scripts/ (name: its path there) as a person does. Returns its exit status, one of `allowed`."""
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode in allowed, f"{' '.join(command)}\n{done.stdout[-6000:]}"
    return done.returncode


def finetune(*arguments: object) -> forks.Done:
    """`python -m finetune ...`, in a process of its own."""
    return forks.python("-m", "finetune", *arguments)


def train_here(path: Path, *overrides: str) -> str:
    """Train on one process, this one, which is much quicker; returns what a person would see. Errors are raised."""
    from finetune.features import all_features, load_recipe
    from finetune.plan.comparison import predict_run

    return _train(load_recipe(path, overrides), path, predict=predict_run, features=all_features())


def train_with(folder: Path, recipe: dict[str, Any], changes: dict[str, Any]) -> Path:
    """Train a recipe, written to `folder`, as `train_here`; returns the run's folder.

    changes: sections, or some of their keys."""
    for section, keys in changes.items():
        recipe[section] = {**recipe.get(section, {}), **keys} if isinstance(keys, dict) else keys
    path = folder / f"{recipe['run']['name']}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    train_here(path)
    return Path(recipe["run"]["dir"]) / recipe["run"]["name"]


def train_alone(path: Path, *overrides: str) -> str:
    """As `train_here`, by the trainer without any wing."""
    from finetune.recipe import load_recipe

    return _train(load_recipe(path, overrides), path)


def _train(recipe: Any, path: Path, **handed_in: Any) -> str:
    from finetune.training.run import train
    from finetune.training.signals import StopRequest

    console = Console(file=io.StringIO(), width=400)
    train(recipe, str(path), StopRequest(), console, **handed_in)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def tiny_overrides(made: Path, base: Path, runs: Path) -> list[str]:
    """What makes of a recipe that ships one of two steps on a tiny model of its class."""
    sources = {"train": made / "rows.jsonl", "eval": made / "held_out.jsonl"}
    return [
        *(f"data.{key}=[{{path: {path}, format: messages}}]" for key, path in sources.items()),
        *(f"model.name={base}", "model.chat_template=null", "data.max_length=64", "train.max_steps=2"),
        *(f"run.dir={runs}", "evaluate.generate=0", "train.precision=fp32", "batch.rows=8"),
    ]


def launch(config: str | Path, processes: int, *arguments: object, **environment: str) -> forks.Done:
    """`accelerate launch --config_file ... -m finetune ...`; config: a file, or a name in accelerate_configs/."""
    file = config if isinstance(config, Path) else ROOT / "accelerate_configs" / f"{config}.yaml"
    return forks.accelerate_launch(file, processes, "-m", "finetune", *arguments, **environment)


@contextlib.contextmanager
def serving(entries: dict[str, Any]) -> Iterator[str]:
    """A server, in this process, of what `load_served` returns; yields its URL."""
    import uvicorn

    from finetune.release.inference.http_api import build_app

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(build_app(entries), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: writing fails in the middle, as where the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
