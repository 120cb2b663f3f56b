"""Without a network: one attempt and one line, or the hub's cache; as processes, whose libraries are not offline."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from finetune.data.sources.hub import is_hub_dataset, is_hub_model, offline_without_hub


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python with libraries online, a hub that no one serves (port 9) and an empty cache of it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9"}

    def start(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    return start


def test_a_model_that_is_not_here_is_one_line(
    run: Callable[..., Any], recipe: dict[str, Any], write_recipe: Callable[..., Path]
) -> None:
    path = write_recipe(recipe | {"model": {"name": "some-org/some-model", "tokenizer": "some-org/other"}})
    for command in ("check", "train"):
        ended = run("-m", "finetune", command, path)
        lines = (ended.stdout + ended.stderr).splitlines()
        assert (ended.returncode, len(lines)) == (2, 1)
        for part in (
            "http://127.0.0.1:9 cannot be reached (Connection refused)",
            "model.name=some-org/some-model and model.tokenizer=some-org/other are neither a folder nor in its cache",
            "model.name=/folder",
            "HF_HUB_OFFLINE=1",
        ):
            assert part in lines[0]


IMPORTED_BEFORE = """
import sys
from pathlib import Path
import datasets, transformers
from finetune.desk.setup.check import check_recipe
for path in sys.argv[1:]:
    print(check_recipe(Path(path), ()).error)
"""


@pytest.mark.long
def test_the_cache_is_used_and_a_dataset_fails_at_once(
    run: Callable[..., Any], recipe: dict[str, Any], write_recipe: Callable[..., Path], made: Path, tmp_path: Path
) -> None:
    """As in a notebook, whose libraries are imported online before the attempt."""
    repository = tmp_path / "hf" / "hub" / "models--some-org--some-model"
    shutil.copytree(made / "llama", repository / "snapshots" / "0123456789abcdef")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123456789abcdef", encoding="utf-8")
    cached = recipe | {"model": {"name": "some-org/some-model"}}
    data = recipe["data"] | {"train": [{"path": "some-org/some-rows"}]}
    paths = [write_recipe(cached, "a.yaml"), write_recipe(cached | {"data": data}, "b.yaml")]
    ended = run("-c", IMPORTED_BEFORE, *paths)
    first, second, *_ = ended.stdout.splitlines()
    assert (first, ended.returncode) == ("None", 0)
    assert second.startswith("some-org/some-rows: no local file or folder of this name")
    assert "Couldn't reach 'some-org/some-rows' on the Hub" in second
    assert [line for line in ended.stderr.splitlines() if "127.0.0.1:9" in line] == [
        "http://127.0.0.1:9 cannot be reached (Connection refused); continuing with what is in its cache here, as with "
        "HF_HUB_OFFLINE=1"
    ]
    assert "Retrying" not in ended.stderr


LOADED_LATER = """
from transformers import AutoConfig
from finetune.release.export.streamed import find_base
from finetune.models.remote_code import load_auto
for load in (lambda: load_auto(AutoConfig, "some-org/base"), lambda: find_base("some-org/base", None)):
    try:
        load()
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.long
def test_the_base_of_a_finished_run_is_one_attempt_too(run: Callable[..., Any]) -> None:
    ended = run("-c", LOADED_LATER)
    assert ended.stdout.split() == ["OSError", "UserError"]
    assert "Retrying" not in ended.stderr


def test_a_server_that_answers_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    assert offline_without_hub() is None
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    thread.join()
    server.server_close()


def test_names_that_only_the_hub_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names = ("org/name", "name", "here", "./absent", "/absent", "a/b/c", "teacher.parquet")
    assert [name for name in names if is_hub_model(name)] == ["org/name", "name"]
    paths = ("org/rows", "rows.jsonl", "absent.jsonl", "here", "data/*.jsonl", "https://host/a.jsonl")
    assert [path for path in paths if is_hub_dataset(path)] == ["org/rows"]
