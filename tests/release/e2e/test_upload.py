"""`upload` to a server that speaks what huggingface_hub asks of the hub, by the command that a person types."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.errors import UserError
from finetune.release.export.upload import collect

TOKEN = "hf_" + "a1B2" * 9


class Hub(ThreadingHTTPServer):
    """Repositories in memory; large files are kept by their hash. Fails the uploads of `failing` once."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.repos: dict[str, dict[str, Any]] = {}
        self.large: dict[str, bytes] = {}
        self.sent: list[str] = []  # hashes, in the order of their uploads
        self.failing: set[bytes] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Asked(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""

    def reply(self, value: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/whoami-v2":
            is_known = self.headers["Authorization"] == f"Bearer {TOKEN}"
            return self.reply({"name": "someone", "type": "user"}) if is_known else self.reply({}, 401)
        name = path.removeprefix("/api/models/")
        if name in self.server.repos:
            return self.reply({"id": name, "private": self.server.repos[name]["private"], "siblings": [], "tags": []})
        return self.reply({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    def do_PUT(self) -> None:
        content = self.body()
        if content in self.server.failing:
            self.server.failing.discard(content)
            return self.reply({"error": "out of luck"}, 400)
        oid = hashlib.sha256(content).hexdigest()
        assert self.path.endswith(oid)
        self.server.sent.append(oid)
        self.server.large[oid] = content
        return self.reply({})

    def do_POST(self) -> None:
        path, content = self.path.partition("?")[0], self.body()
        if path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization'] or 'someone'}/{asked['name']}"
            status = 409 if name in self.server.repos else 200
            self.server.repos.setdefault(name, {"private": asked["visibility"] == "private", "files": {}})
            return self.reply({"url": f"{self.server.url}/{name}"}, status)
        if "/preupload/" in path:
            files = [
                {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(("s", ".model")) else "regular"}
                for one in json.loads(content)["files"]
            ]
            return self.reply({"files": [{**one, "shouldIgnore": False} for one in files]})
        if path.endswith("/info/lfs/objects/batch"):
            found = []
            for one in json.loads(content)["objects"]:
                href = {"href": f"{self.server.url}/large/{one['oid']}"}
                lacks = {} if one["oid"] in self.server.large else {"actions": {"upload": href}}
                found.append({**one, **lacks})
            return self.reply({"transfer": "basic", "objects": found})
        assert "/commit/" in path
        return self.commit(path.removeprefix("/api/models/").partition("/commit/")[0], content)

    def commit(self, name: str, content: bytes) -> None:
        files = self.server.repos[name]["files"]
        for line in map(json.loads, content.splitlines()):
            one = line["value"]
            if line["key"] == "file":
                files[one["path"]] = base64.b64decode(one["content"])
            elif line["key"] == "lfsFile":
                files[one["path"]] = self.server.large[one["oid"]]
        self.reply({"commitUrl": f"{self.server.url}/{name}/commit/1", "commitOid": "1" * 40, "success": True})


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


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
    url = hub if isinstance(hub, str) else hub.url
    own = {"HF_ENDPOINT": url, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "finetune", "upload", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own}, timeout=300)
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
