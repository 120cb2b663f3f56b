"""MLflow, by the package itself: a database, and a server that goes away and comes back."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import metrics, train_alone

from finetune.errors import UserError
from finetune.recipe.schema import Mlflow
from finetune.tracking import mlflow_run
from finetune.tracking.mlflow_run import MlflowRun
from finetune.tracking.trackers import grouped

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="pip install mlflow-skinny"),
    pytest.mark.filterwarnings("default"),  # of mlflow's own
]


@pytest.fixture
def tracked(recipe: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    recipe["tracking"] = {"mlflow": {"experiment": "trials", "uri": f"sqlite:///{tmp_path}/mlflow.db"}}
    recipe["train"] = {"max_steps": 4, "precision": "fp32"}
    recipe["evaluate"] |= {"every_steps": 2, "generate": 2, "max_new_tokens": 4}
    recipe["checkpoint"] = {"every_steps": 2}
    return write_recipe(recipe)


def test_a_run_that_goes_on_is_one_run_with_the_numbers_of_its_metrics(
    tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    monkeypatch.chdir(tmp_path)  # where a database keeps its artifacts
    train_alone(tracked)
    train_alone(tracked, "train.max_steps=6")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("trials").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["recipe.train.max_steps"] == "4"  # as it began
    (folder,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    lines = metrics(folder)
    for key in ("loss", "eval_loss", "step_s"):
        wanted = [(line["step"], line[key]) for line in lines if key in line]
        found = {(one.step, one.value) for one in client.get_metric_history(run.info.run_id, grouped(key))}
        assert wanted
        assert found >= {*wanted}  # MLflow keeps what it got before a step was repeated
    assert run.data.metrics["best/eval/loss"] == min(line["eval_loss"] for line in lines if "eval_loss" in line)
    (table,) = tmp_path.rglob("generations.json")
    rows = json.loads(table.read_text(encoding="utf-8"))
    assert rows["columns"][0] == "step"
    assert {row[0] for row in rows["data"]} == {2, 4, 6}


# --- a server


class Server(ThreadingHTTPServer):
    """Answers as MLflow's REST API does, or not at all."""

    away, refuses = False, False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[tuple[str, dict[str, Any]]] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        call = self.path.partition("?")[0].partition("/mlflow/")[2]
        status, reply = 200, dict[str, Any]()
        info = {
            "run_id": "r1",
            "run_uuid": "r1",
            "experiment_id": "1",
            "status": "RUNNING",
            "lifecycle_stage": "active",
        }
        if self.server.away:
            status, reply = 503, {"error_code": "TEMPORARILY_UNAVAILABLE", "message": "closed"}
        elif self.server.refuses and call == "runs/log-batch":
            status, reply = 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "no such name"}
        elif call == "experiments/get-by-name":
            reply = {"experiment": {"experiment_id": "1", "name": "finetune", "lifecycle_stage": "active"}}
        elif call == "runs/update" and json.loads(body)["run_id"] != "r1":
            status, reply = 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "unknown run"}
        elif call in ("runs/create", "runs/get", "runs/update"):
            reply = {"run": {"info": info, "data": {"params": [{"key": "old", "value": "1"}]}}, "run_info": info}
        if status == 200:
            self.server.got.append((call, json.loads(body or b"{}")))
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    do_GET = do_POST = answer

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run_at(server: Server, run_id: str | None = None) -> MlflowRun:
    return MlflowRun(Mlflow(uri=f"http://127.0.0.1:{server.server_port}"), "mine", run_id)


def steps(server: Server) -> list[int]:
    sent = [body["metrics"] for call, body in server.got if call == "runs/log-batch" and body.get("metrics")]
    return [one["step"] for batch in sent for one in batch]


def test_values_of_an_outage_are_sent_when_the_server_is_back(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = run_at(server)
    run.store_init_configuration({"old": 2, "text": "x" * 7000, "a@b": 1})
    (params,) = [body["params"] for call, body in server.got if call == "runs/log-batch"]
    assert [(one["key"], len(one["value"])) for one in params] == [("text", 6000), ("a_b", 1)]
    server.away = True
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            run.log({"train/loss": 0.5, "train/pass@1": 1.0}, step)
    assert len(caplog.records) == 1  # the first failure; it is not tried at each step
    assert "trying again after 60 s, and training goes on" in caplog.text
    server.away = False
    run.log({"train/loss": 0.5}, 4)
    assert steps(server) == []
    run._next_try = 0.0  # a minute later
    run.log({"train/loss": 0.5}, 5)
    assert steps(server) == [1, 1, 2, 2, 3, 3, 4, 5]
    server.refuses = True
    run.log({"train/loss": 0.5}, 6)
    assert "no such name; this is left out" in caplog.text
    run.finish()
    assert server.got[-1] == ("runs/update", {**server.got[-1][1], "run_id": "r1", "status": "FINISHED"})


def test_a_run_that_another_server_has_begins_anew_and_no_server_is_an_error(server: Server) -> None:
    assert [run_at(server, run_id).id for run_id in ("r1", "elsewhere", None)] == ["r1"] * 3
    assert [call for call, _ in server.got].count("runs/create") == 2
    with Server() as closed:
        port = closed.server_port
    with pytest.raises(UserError, match=rf"tracking.mlflow: .*127.0.0.1.*{port}.* Fix: check tracking.mlflow.uri"):
        MlflowRun(Mlflow(uri=f"http://127.0.0.1:{port}"), "mine", None)
    assert mlflow_run.mlflow_problem(Mlflow(uri=f"http://127.0.0.1:{port}")) is None
