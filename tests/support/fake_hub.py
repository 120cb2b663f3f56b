"""A server that speaks what huggingface_hub asks of the hub when it uploads."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "a1B2" * 9


class Hub(ThreadingHTTPServer):
    """Repositories in memory; large files are kept by their hash. Fails the uploads of `failing` once."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.repos: dict[str, dict[str, Any]] = {}
        self.large: dict[str, bytes] = {}
        self.sent: list[str] = []  # hashes, in the order of their uploads
        self.failing: set[bytes] = set()
        self.commits: list[list[str]] = []  # names of the files of each
        self.refusals = 0  # of the next commits
        self.may_commit = threading.Event()
        self.may_commit.set()

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
        with contextlib.suppress(BrokenPipeError):  # the process that asked has ended
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
            files = [{"rfilename": one} for one in self.server.repos[name]["files"]]
            return self.reply(
                {"id": name, "private": self.server.repos[name]["private"], "siblings": files, "tags": []}
            )
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
        self.server.may_commit.wait()
        if self.server.refusals:
            self.server.refusals -= 1
            return self.reply({"error": "out of luck"}, 400)
        files = self.server.repos[name]["files"]
        self.server.commits.append([])
        for line in map(json.loads, content.splitlines()):
            one = line["value"]
            if line["key"] in ("file", "lfsFile"):
                self.server.commits[-1].append(one["path"])
            if line["key"] == "file":
                files[one["path"]] = base64.b64decode(one["content"])
            elif line["key"] == "lfsFile":
                files[one["path"]] = self.server.large[one["oid"]]
            elif line["key"] == "deletedFile":
                del files[one["path"]]
        return self.reply({"commitUrl": f"{self.server.url}/{name}/commit/1", "commitOid": "1" * 40, "success": True})


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """Yields a hub that answers until the end."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.may_commit.set()
        server.shutdown()
        thread.join()
        server.server_close()


def environment(hub: Hub | str, token: str = TOKEN) -> dict[str, str]:
    """Returns the variables with which a process talks to this hub."""
    url = hub if isinstance(hub, str) else hub.url
    return {"HF_ENDPOINT": url, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "COLUMNS": "200"}
