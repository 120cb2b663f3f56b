"""`upload` to a server that speaks what huggingface_hub asks of the hub, by the command that a person types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fake_hub import TOKEN, Hub, environment, serving

from finetune.errors import UserError
from finetune.release.export.upload import collect


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as server:
        yield server


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """As a run of an adapter leaves it, trained from a local folder."""
    folder = tmp_path / "my-lora" / "model"
    folder.mkdir(parents=True)
    (tmp_path / "base").mkdir()
    settings = {"base_model_name_or_path": str(tmp_path / "base"), "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    for name in ("adapter_model.safetensors", "tokenizer.model"):
        (folder / name).write_bytes(name.partition(".")[0].encode() * 1000)
    metadata = yaml.safe_dump({"library_name": "peft", "base_model": str(tmp_path / "base")}, sort_keys=False)
    (folder / "README.md").write_text(f"---\n{metadata}---\n\n# my-lora\n\nname: {tmp_path / 'base'}\n", "utf-8")
    (folder / ".hidden").write_text("not sent", encoding="utf-8")
    return folder.parent


def upload(hub: Hub | str, *words: object, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "finetune", "upload", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment(hub, token)}, timeout=300
    )
    assert TOKEN not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_a_result_goes_up_private_and_goes_on(hub: Hub, run_dir: Path) -> None:
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    refused = upload(hub, run_dir, "--base-model", "org/base")
    assert (refused.returncode, "give --yes" in refused.stderr) == (2, True)
    assert "adapter_model.safetensors" in refused.stdout  # the list
    assert "13,000" in refused.stdout
    assert not hub.repos

    hub.failing = {b"tokenizer" * 1000}
    broken = upload(hub, run_dir, "--base-model", "org/base", "--yes")
    assert broken.returncode == 1
    assert "the hub answers 400" in broken.stderr
    done = upload(hub, run_dir, "--base-model", "org/base", "--yes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"uploaded to {hub.url}/someone/my-lora"
    assert len(hub.sent) == len(set(hub.sent)) == 2  # the first file was sent once

    repo = hub.repos["someone/my-lora"]
    assert repo["private"]
    assert sorted(repo["files"]) == [
        *("README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.model")
    ]
    card = repo["files"]["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "org/base"
    assert json.loads(repo["files"]["adapter_config.json"]) == {"base_model_name_or_path": "org/base", "r": 4}
    assert str(run_dir.parent) not in card
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_what_is_refused(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    hub.repos["org/open"] = {"private": False, "files": {}}
    for words, status, message in (
        ([run_dir], 2, "a path that means nothing elsewhere. Fix: give --base-model"),
        ([run_dir, "--base-model", "/x/y/z"], 2, "not a hub id. Fix: give one, as org/name"),
        ([tmp_path], 2, "no model here"),
        ([run_dir, "--base-model", "o/b", "--to", "org/open", "--yes"], 2, "exists and is public. Fix: give --public"),
    ):
        done = upload(hub, *words)
        assert (done.returncode, message in done.stderr) == (status, True), done.stderr
    wrong = upload(hub, run_dir, "--base-model", "o/b", token="hf_wrong")
    assert (wrong.returncode, "the hub answers 401" in wrong.stderr) == (1, True), wrong.stderr
    gone = upload("http://127.0.0.1:1", run_dir, "--base-model", "o/b", "--to", "a/b", "--yes")
    assert (gone.returncode, "the hub cannot be reached" in gone.stderr) == (1, True), gone.stderr
    assert not hub.repos["org/open"]["files"]


def test_a_link_or_a_stray_file_is_not_sent(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    """What lies in the folder and is no part of a model: the user says what becomes of it."""
    (tmp_path / "secret").write_text("of the user")
    stray = run_dir / "model" / "merges.txt"
    for make, message in (
        (lambda: stray.symlink_to(tmp_path / "secret"), f"{stray}: is a link, which uploads do not follow"),
        (lambda: stray.rename(stray.with_name("notes.txt")), "notes.txt: is a link"),
    ):
        make()
        done = upload(hub, run_dir, "--base-model", "o/b", "--yes")
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    (run_dir / "model" / "notes.txt").unlink()
    for name in ("notes.txt", "optimizer.safetensors", "modeling.py", "deep/config.json"):
        file = run_dir / "model" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("of the user")
        with pytest.raises(UserError, match=f"{name}: not a file of a result or an export"):
            collect(run_dir, "o/b")
        file.unlink()
    assert not hub.repos
    assert not hub.sent
