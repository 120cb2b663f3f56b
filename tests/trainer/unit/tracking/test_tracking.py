"""metrics.jsonl and trackers."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import PartialState
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetune.errors import UserError
from finetune.recipe import load_recipe
from finetune.recipe.schema import Mlflow, Tracking, Wandb
from finetune.tracking import trackers as trackers_module
from finetune.tracking.metrics import Background, StepLog, read_steps
from finetune.tracking.mlflow_run import mlflow_problem
from finetune.tracking.trackers import Trackers, best_values, check_trackers, grouped, redact


def test_resumed_log_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = StepLog(path, 1)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0})
    log.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')  # killed while it wrote
    resumed = StepLog(path, 3)
    resumed.write({"step": 3, "loss": 2.0})
    resumed.close()
    assert [(entry["step"], entry["loss"]) for entry in read_steps(path)] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_new_run_starts_a_new_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 9}\n')
    StepLog(path, 1).close()
    assert path.read_text() == ""


def test_a_number_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "metrics.jsonl", 1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.write({"step": 1, "loss": float("nan")})
    log.close()


@pytest.mark.parametrize(
    "secret",
    ["hf_" + "a" * 34, "0123456789abcdef" * 2 + "01234567", "AKIA" + "A" * 16, "sk-" + "x" * 24, "me:pass"],
)
def test_secrets_never_reach_a_tracker(secret: str) -> None:
    text = f"https://{secret}@host/x" if ":" in secret else f"path/{secret}"
    cleaned = redact({"data": [{"path": text}], "n": 3})
    assert secret not in json.dumps(cleaned)
    assert cleaned["n"] == 3


def test_text_without_secrets_is_unchanged() -> None:
    plain = {"path": "meta-llama/Llama-3.1-8B", "url": "https://host/x", "commit": "abc123"}
    assert redact(plain) == plain


def test_commits_are_no_secrets() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    plain = {"plan": {"git_commit": commit + "+"}, "recipe": {"model": {"revision": commit}}}
    assert redact(plain) == plain
    assert redact({"model": {"revision": "hf_" + "a" * 34}, "other": commit}) == {
        "model": {"revision": "[redacted]"},
        "other": "[redacted]",
    }


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss", "train/loss"),
        ("tokens_per_s", "train/tokens_per_s"),
        ("eval_loss/chat", "eval/loss/chat"),
        ("exact_match", "eval/exact_match"),
        ("step_s", "time/step_s"),
        ("time/data", "time/data"),
        ("memory_peak_gib", "memory/peak_gib"),
        ("memory/weights_gib", "memory/weights_gib"),
        ("epoch", "data/epoch"),
        ("tokens/chat", "data/tokens/chat"),
    ],
)
def test_groups_of_metrics(key: str, name: str) -> None:
    assert grouped(key) == name


def test_a_missing_tracker_names_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb mlflow-skinny tensorboard, or remove wandb, mlflow"):
        check_trackers(Tracking(wandb=Wandb(project="x"), mlflow=Mlflow(), tensorboard=True))


@pytest.mark.parametrize(
    ("uri", "variables", "problem"),
    [
        ("http://127.0.0.1:5000", {}, ""),
        ("databricks", {}, ""),
        (None, {"MLFLOW_TRACKING_URI": "https://host"}, ""),
        ("sqlite:///mlflow.db", {}, ""),
        (None, {}, ""),
        ("mlruns", {}, "mlruns is a folder, which mlflow no longer develops. Fix: set tracking.mlflow.uri"),
        ("file:///tmp/a", {}, "file:///tmp/a is a folder"),
        ("mlruns", {"MLFLOW_ALLOW_FILE_STORE": "true"}, ""),
    ],
)
def test_stores_of_mlflow(
    uri: str | None, variables: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = mlflow_problem(Mlflow(uri=uri))
    assert bool(found) == bool(problem)
    assert problem in (found or "")


@pytest.mark.parametrize("uri", ["https://me:secret@host", "postgresql://me:secret@host/runs"])
def test_the_address_of_mlflow_holds_no_secret(uri: str, recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe["tracking"] = {"mlflow": {"uri": uri}}
    with pytest.raises(UserError, match=r"tracking\.mlflow\.uri: must not hold a user, a password") as error:
        load_recipe(write_recipe(recipe))
    assert "secret" not in str(error.value)


def test_wandb_without_an_api_key_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    online = Tracking(wandb=Wandb(project="x"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    check_trackers(online)  # WANDB_MODE=offline wins
    monkeypatch.delenv("WANDB_MODE")
    with pytest.raises(UserError, match=r"`wandb login`, set WANDB_API_KEY, or use tracking\.wandb\.mode=offline"):
        check_trackers(online)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / "netrc").chmod(0o600)
    check_trackers(online)


def test_wandb_offline_and_tensorboard_get_config_metrics_table_and_summary(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    recipe["tracking"] = {"wandb": {"project": "p", "mode": "offline"}, "tensorboard": True}
    loaded = load_recipe(write_recipe(recipe))
    PartialState(cpu=True)  # accelerate's trackers ask it for the main process
    folder = tmp_path / "run"
    (folder / "pictures").mkdir(parents=True)
    Image.new("RGB", (7, 5), (200, 30, 40)).save(folder / "pictures" / "a.png")
    ids: dict[str, str] = {}
    for attempt in range(2):  # the second goes on with the first one's id
        started = Trackers(loaded.tracking, loaded.run.name, folder, {"recipe": loaded.model_dump(mode="json")}, ids)
        ids = started.run_ids()
        doubles = {"share/forward": 0.5, "tokens_per_s_per_device": 3.0, "supervised_tokens_per_s_per_device": 2.0}
        started.log({"loss": 1.0, "memory/weights_gib": 2.0, "words": "dropped", **doubles}, 1 + attempt)
        with (folder / "metrics.jsonl").open("a") as lines:
            lines.write(json.dumps({"step": 1 + attempt, "eval_loss": 0.25 + attempt, "exact_match": attempt}) + "\n")
        shown = [folder / "pictures" / "a.png", None]
        started.table("generations", ["prompt", "output"], [["a\n|a", "b"], ["c", "d"]], 1 + attempt, shown)
        started.summary({"exact_match": 1.0})
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "weights.bin").write_bytes(b"trained")
        started.artifacts({"result": folder / "model"})
        started.finish()
    wandb_id = json.loads((folder / "wandb.json").read_text())["id"]
    runs = list((folder / "wandb").glob("offline-run-*"))
    assert runs
    assert all(f"-{wandb_id}" in run.name for run in runs)  # wandb numbers those of the same second
    assert any(run.glob("files/media/table/generations*.json") for run in runs)
    logged = b"".join(path.read_bytes() for run in runs for path in run.glob("*.wandb"))
    assert all(name not in logged for name in (b"tokens_per_s_per_device", b"share/forward", b'"null"'))
    for name in (b"train/loss", b"memory/weights_gib", b"eval/loss/*", b"best/eval/loss", b"best/eval/exact_match"):
        assert name in logged
    digest = base64.b64encode(hashlib.md5(b"trained").digest())
    for part in (
        f"{wandb_id}-model".encode(),
        b"weights.bin",
        digest,
        b"result",
    ):  # the artifact, as `wandb sync` has it
        assert part in logged
    assert best_values(folder) == {"eval_loss": 0.25, "exact_match": 1}
    (events,) = {path.parent for path in folder.rglob("events.out.tfevents.*")}  # no empty run next to it
    seen = EventAccumulator(str(events)).Reload()
    assert seen.Tags()["scalars"] == ["train/loss", "memory/weights_gib"]
    (text,) = seen.Tensors("generations/text_summary")[0].tensor_proto.string_val
    assert text.decode() == "| prompt | output |\n| --- | --- |\n| a ↵ \\|a | b |\n| c | d |"
    pictures = {(one.height, one.width) for one in seen.Images("generations/1")}
    assert (pictures, seen.Tags()["images"]) == ({(5, 7)}, ["generations/1"])
    (table, *_) = [json.loads(path.read_text()) for run in runs for path in run.glob("files/media/table/*.json")]
    assert table["columns"] == ["prompt", "output", "pictures"]
    assert [row[2] for row in table["data"]] == ["Image", None]
    assert b"media/images/" in logged  # of the table's artifact, as `wandb sync` has it
    assert "_hparams_/session_start_info" in str(seen.summary_metadata)


def test_calls_are_made_in_order_by_another_thread_and_flush_waits_for_them():
    made, go = [], threading.Event()
    background = Background("test")
    background.do(go.wait)
    for number in range(50):
        background.do(lambda number: made.append((number, threading.current_thread())), number)
    assert made == []
    go.set()
    background.flush()
    assert [number for number, _ in made] == list(range(50))
    assert {thread for _, thread in made}.isdisjoint({threading.current_thread()})
    background.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's disk that is always full")
def test_a_full_disk_is_raised_once_and_nothing_is_written_after_the_gap():
    background, later, go = Background("test"), [], threading.Event()
    background.do(lambda: go.wait() and Path("/dev/full").write_text("line\n", "utf-8"))
    background.do(later.append, 1)
    go.set()
    with pytest.raises(OSError, match="No space left"):
        background.flush()
    background.do(later.append, 2)
    background.close()
    assert later == []


def test_close_makes_pending_calls_and_raises_what_failed():
    background, made = Background("test"), []
    background.do(made.append, 1)
    background.do({}.pop, "missing")
    with pytest.raises(KeyError):
        background.close()
    assert made == [1]
