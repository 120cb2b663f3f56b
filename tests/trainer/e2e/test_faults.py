"""What a disk can do to a checkpoint: a clear message, the others untouched, nothing lost."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import finetune, metrics, train_alone
from filelock import FileLock
from forks import start_forkserver
from safetensors.torch import load_file, save_file
from usual import usual

from finetune.checkpoints.folder import find_problem
from finetune.errors import RunFailure, UserError
from finetune.recipe import load_recipe

LIMIT = 1_000_000  # bytes; the model has 0.5 MB, a checkpoint 1.5 MB


@pytest.fixture
def saving(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["checkpoint"] = {"every_steps": 2, "keep": 3}
    return recipe


@pytest.fixture
def run(saving: dict[str, Any]) -> Path:
    return Path(saving["run"]["dir"]) / "run"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def full_disk(limit: int = LIMIT) -> Iterator[None]:
    """No file can grow beyond the limit: writing fails as on a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_full_disk_stops_the_run_and_leaves_nothing_half_written(
    saving: dict[str, Any], write_recipe: Any, run: Path, asynchronous: str
) -> None:
    message = "step-00000002 could not be written: .*Earlier checkpoints are untouched. Fix: free space"
    with full_disk(), pytest.raises(RunFailure, match=message):
        train_alone(write_recipe(saving), f"checkpoint.asynchronous={asynchronous}")
    assert names(run / "checkpoints") == []


def test_a_full_disk_is_reported_and_the_run_continues_where_the_recipe_says_so(
    saving: dict[str, Any], write_recipe: Any, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk():
        train_alone(write_recipe(saving), "checkpoint.on_failure=continue")
    assert caplog.text.count("could not be written") == 3
    assert (run / "model" / "model.safetensors").exists()


def test_a_full_disk_later_leaves_the_earlier_checkpoint(saving: dict[str, Any], write_recipe: Any, run: Path) -> None:
    path = write_recipe(saving)
    train_alone(path, "train.max_steps=2", "schedule.name=constant")
    with full_disk(), pytest.raises(RunFailure, match="could not be written"):
        train_alone(path, "schedule.name=constant")
    assert names(run / "checkpoints") == ["step-00000002"]
    seen = train_alone(path, "schedule.name=constant")
    assert "step 2 of 6" in seen
    assert "train.max_steps: 2 -> 6" in seen
    assert [line["step"] for line in metrics(run) if "loss" in line] == [1, 2, 3, 4, 5, 6]


def read_only(folder: Path) -> None:
    """A folder in which nothing can be made; root may write anywhere but in the kernel's."""
    if os.geteuid() == 0:
        folder.symlink_to("/sys")
    else:
        folder.mkdir()
        folder.chmod(0o555)


def test_a_folder_that_cannot_be_written_to(saving: dict[str, Any], write_recipe: Any, run: Path) -> None:
    run.mkdir(parents=True)
    read_only(run / "checkpoints")
    done = finetune("train", write_recipe(saving))
    assert done.returncode == 1
    assert "could not be written" in done.stderr
    assert "ermission denied" in done.stderr or "not permitted" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_newest_that_verifies_is_taken_and_the_others_are_set_aside(
    saving: dict[str, Any], write_recipe: Any, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, root = write_recipe(saving), run / "checkpoints"
    train_alone(path)
    (root / "step-00000006" / "rank-00000-of-00001.safetensors").unlink()
    manifest = root / "step-00000004" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 2}))
    seen = train_alone(path)
    assert "step-00000006: rank-00000-of-00001.safetensors is missing; kept as aside-step-00000006" in caplog.text
    assert "step-00000004: it is of format 2, this program writes 1" in caplog.text
    assert "step 2 of 6" in seen
    kept = ["aside-step-00000004", "aside-step-00000006", "step-00000002", "step-00000004", "step-00000006"]
    assert names(root) == kept


def test_where_none_verifies_starting_over_is_the_user_s_decision(
    saving: dict[str, Any], write_recipe: Any, run: Path
) -> None:
    path, root = write_recipe(saving), run / "checkpoints"
    train_alone(path)
    for folder in root.iterdir():
        with (folder / "rank-00000-of-00001.safetensors").open("r+b") as file:
            file.truncate(1000)
    before, lines = names(root), metrics(run)
    with pytest.raises(UserError, match=r"no checkpoint can be trusted:\n.*has 1000 bytes instead of"):
        train_alone(path)
    assert names(root) == before
    assert metrics(run) == lines
    train_alone(path, "checkpoint.resume=never")
    assert names(root) == [*(f"aside-{name}" for name in before), *before]


def test_an_asynchronous_save_writes_the_same_bytes(saving: dict[str, Any], write_recipe: Any, run: Path) -> None:
    path = write_recipe(saving)
    train_alone(path)
    train_alone(path, "run.name=other", "checkpoint.asynchronous=false")
    for step in (2, 4, 6):
        file = Path("checkpoints") / f"step-{step:08d}" / "rank-00000-of-00001.safetensors"
        assert (run / file).read_bytes() == (run.parent / "other" / file).read_bytes()


def test_every_minutes(saving: dict[str, Any], write_recipe: Any, run: Path) -> None:
    saving["checkpoint"] = {"every_minutes": 1e-9, "keep": 9}
    train_alone(write_recipe(saving))
    assert names(run / "checkpoints") == [f"step-{step:08d}" for step in range(1, 7)]
    saving["checkpoint"] = {"every_minutes": 60}
    shutil.rmtree(run)
    train_alone(write_recipe(saving))
    assert names(run / "checkpoints") == ["step-00000006"]


def test_the_best_is_saved_and_kept(saving: dict[str, Any], write_recipe: Any, run: Path) -> None:
    saving["checkpoint"] = {"keep": 1, "best": "eval_loss"}
    saving["evaluate"]["every_steps"] = 1
    saving["schedule"] = {"name": "constant"}
    path = write_recipe(saving)
    train_alone(path, "optimizer.lr=0.3")
    losses = {line["step"]: line["eval_loss"] for line in metrics(run) if "eval_loss" in line}
    best = min(losses, key=losses.__getitem__)
    assert 0 < best < 6, losses  # with such a rate it gets worse
    assert names(run / "checkpoints") == sorted({f"step-{best:08d}", "step-00000006"})


def test_a_best_that_no_evaluation_measures_is_an_error(saving: dict[str, Any], write_recipe: Any) -> None:
    saving["checkpoint"] = {"best": "eval_losss"}
    with pytest.raises(
        UserError, match=r"no evaluation measures 'eval_losss' \(did you mean 'eval_loss'\?\)\. Fix: use one"
    ):
        load_recipe(write_recipe(saving))
    saving["checkpoint"] = {"best": "eval_loss/chat"}  # there is one source only
    with pytest.raises(UserError, match=r"checkpoint\.best: this run's evaluations do not measure 'eval_loss/chat'"):
        train_alone(write_recipe(saving))


def test_an_evaluation_that_a_stop_left_out_runs_after_the_resume(
    saving: dict[str, Any], write_recipe: Any, run: Path
) -> None:
    saving["evaluate"]["every_steps"] = 2
    path = write_recipe(saving)
    train_alone(path)
    whole = metrics(run)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    lines = [line for line in whole if not ("eval_loss" in line and line["step"] == 4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train_alone(path)
    evaluations = [[line for line in found if "eval_loss" in line] for found in (whole, metrics(run))]
    assert evaluations[0] == evaluations[1]
    train_alone(path)  # a finished run: nothing is measured again
    assert [line for line in metrics(run) if "eval_loss" in line] == evaluations[0]


# --- one damaged byte, one file without room


@pytest.fixture
def interrupted(saving: dict[str, Any], write_recipe: Any, run: Path) -> tuple[Path, list[float]]:
    """A recipe whose run has checkpoints of steps 2 and 4 and lines up to step 6; and its losses."""
    saving["schedule"] = {"name": "constant"}
    path = write_recipe(saving)
    train_alone(path)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    return path, losses(run)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


def flip(path: Path, byte: int, bits: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= bits
    path.write_bytes(content)


@pytest.mark.parametrize("bits", usual((0x80, 0x01, 0x20), 0x80))
def test_a_damaged_log_keeps_no_checkpoint_from_starting(
    interrupted: tuple[Path, list[float]], run: Path, bits: int, caplog: pytest.LogCaptureFixture
) -> None:
    path, before = interrupted
    log = run / "metrics.jsonl"
    flip(log, 1, bits)  # the quote before the first key
    (run / "status.json").write_text('{"sta')
    damaged = log.read_bytes()
    assert "step 4 of 6" in train_alone(path)
    assert losses(run) == before[1:]
    assert (run / "metrics.jsonl.damaged").read_bytes() == damaged
    assert caplog.text.count("1 lines cannot be read and are left out; the file is kept as metrics.jsonl.damaged") == 1


def test_any_damage_to_a_manifest_leaves_the_older_checkpoint(
    interrupted: tuple[Path, list[float]], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, before = interrupted
    newest = run / "checkpoints" / "step-00000004" / "manifest.json"
    whole = newest.read_bytes()
    for byte in range(len(whole)):  # every byte, in every way that a bit can flip, is found or changes nothing
        for bit in range(8):
            flip(newest, byte, 1 << bit)
            problem = find_problem(newest.parent, read=False)
            assert problem or byte_is_idle(newest, whole), (byte, bit)
            newest.write_bytes(whole)
    flip(newest, whole.index(b'"files"') + 2, 0x01)
    assert "step 2 of 6" in train_alone(path)
    assert losses(run) == before
    assert "its manifest.json is damaged: it is not a list of files; kept as aside-step-00000004" in caplog.text


def byte_is_idle(manifest: Path, whole: bytes) -> bool:
    """Whether only a checksum differs, which reading the files finds, or nothing but space."""
    found, expected = json.loads(manifest.read_bytes()), json.loads(whole)
    for content in (found, expected):
        for entry in content["files"].values():
            del entry["sha256"]
    return found == expected


WRITTEN = ("recipe.yaml", "plan.json", "status.json")


@pytest.mark.parametrize("name", usual(WRITTEN, "status.json", "plan.json"))
def test_no_room_for_a_file_of_the_run(interrupted: tuple[Path, list[float]], run: Path, name: str) -> None:
    path, before = interrupted
    kept = {one: (run / one).read_bytes() for one in (*WRITTEN, "model/model.safetensors")}
    (run / f"{name}.tmp").symlink_to("/dev/full")  # where it is written before it is renamed
    with pytest.raises(RunFailure, match=rf"{name}: No space left on device\. The run in .* has failed, .* free space"):
        train_alone(path)
    assert (run / name).read_bytes() == kept[name] or name == "status.json"
    assert json.loads((run / "status.json").read_text())["status"] == "failed"
    assert (run / "model" / "model.safetensors").read_bytes() == kept["model/model.safetensors"]
    train_alone(path)
    assert losses(run) == before
    assert json.loads((run / "status.json").read_text())["status"] == "finished"


class Opened:
    """Notes each file below a folder that Python opens for writing, and lets one of them find the disk full."""

    def __init__(self) -> None:
        self.folder, self.seen, self.full = "", dict[str, None](), ""
        sys.addaudithook(self._hook)  # for good: it can be told nothing to watch, but not be removed

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self.folder or not isinstance(arguments[0], str) or not arguments[2] & 0o3:
            return
        path = os.path.abspath(arguments[0])
        if not path.startswith(self.folder + os.sep):
            return
        name = re.sub(r"(\.partial|\.tmp|-\w{8})(?=/|$)", "", path.removeprefix(self.folder + os.sep))
        self.seen[name] = None
        if name == self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    @contextlib.contextmanager
    def below(self, folder: Path, full: str = "") -> Iterator[dict[str, None]]:
        self.folder, self.full, self.seen = str(folder), full, {}
        try:
            yield self.seen
        finally:
            self.folder = ""


FILES = (*WRITTEN, ".lock", ".launch.json", "inputs.json", "examples.json", "metrics.jsonl")
FOLDERS = ("tokenizer", "tokenizer.partial", "model.partial", "checkpoints", "samples")


NAMES = (*FILES, *(f"{name}.tmp" for name in (".launch.json", "inputs.json")), *FOLDERS)


@pytest.mark.parametrize("name", usual(NAMES, ".lock", "metrics.jsonl", "inputs.json.tmp", "model.partial", "samples"))
def test_something_else_has_the_name_of_a_file(
    saving: dict[str, Any], write_recipe: Any, run: Path, tmp_path: Path, name: str
) -> None:
    """A folder in place of a file, or a file in place of a folder: named with what to do, and nothing of it is lost."""
    path = write_recipe({**saving, "tracking": {"samples": True}})
    run.mkdir(parents=True)
    if name in FOLDERS:
        (run / name).write_text("mine")
    else:
        (run / name).mkdir()
        (run / name / "mine").touch()
    named = re.escape(str(run / name.removesuffix(".tmp")))
    with pytest.raises((RunFailure, UserError), match=rf"{named}.*(?i:fix)"):
        train_alone(path, "train.max_steps=2", "schedule.name=constant")
    assert (run / name).read_text() == "mine" if name in FOLDERS else (run / name / "mine").exists()
    (run / name).rename(tmp_path / "away")
    train_alone(path, "train.max_steps=2", "schedule.name=constant")
    assert json.loads((run / "status.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("code", usual((errno.EXDEV, errno.EBUSY, errno.EACCES, errno.ENOSPC), errno.EXDEV))
@pytest.mark.parametrize("name", [".launch.json", "tokenizer", "plan.json"])
def test_a_file_that_cannot_be_replaced(interrupted: tuple[Path, list[float]], run: Path, name: str, code: int) -> None:
    """As one that is mounted alone: what was there before stays."""
    path, before = interrupted
    kept = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    RENAMES.refuse(run / name, code)
    try:
        with pytest.raises(RunFailure, match=rf"{re.escape(str(run / name))}.*: {os.strerror(code)}\. .* Fix: "):
            train_alone(path)
    finally:
        RENAMES.refuse(None, 0)
    of_name = {file for file in kept if file == run / name or run / name in file.parents}
    assert of_name
    assert all(file.read_bytes() == kept[file] for file in of_name)
    train_alone(path)
    assert losses(run) == before


class Renames:
    """Lets a rename to one path fail, once."""

    def __init__(self) -> None:
        self._target, self._code = "", 0
        sys.addaudithook(self._hook)  # for good: it can be told nothing to watch, but not be removed

    def refuse(self, target: Path | None, code: int) -> None:
        self._target, self._code = str(target or ""), code

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        target = self._target
        if event == "os.rename" and target and os.fspath(arguments[1]) == target:
            self._target = ""  # what was there may come back
            raise OSError(self._code, os.strerror(self._code), os.fspath(arguments[0]), None, target)


RENAMES = Renames()


@pytest.mark.long
def test_no_room_for_any_file_of_a_run(saving: dict[str, Any], write_recipe: Any, run: Path) -> None:
    """One after the other: a message each, what is there stays intact, and with room again the run is what it was."""
    saving["train"]["max_steps"] = 2
    saving["tracking"] = {"samples": True}
    path, opened = write_recipe(saving), Opened()
    with opened.below(run) as written:
        train_alone(path)
    assert {"metrics.jsonl", "model/config.json", "checkpoints/.partial-step/manifest.json"} <= written.keys()
    before = losses(run)
    for i, name in enumerate([name for name in written if name != ".lock"]):
        other = run.with_name(f"other{i}")
        with opened.below(other, name), pytest.raises((RunFailure, UserError), match=r"(?i)no space|not be written"):
            train_alone(path, f"run.name={other.name}")
        status = other / "status.json"
        assert name == "status.json" or not status.exists() or json.loads(status.read_text())["status"] == "failed", (
            name
        )
        train_alone(path, f"run.name={other.name}")
        assert losses(other) == before, name
        assert json.loads(status.read_text())["status"] == "finished", name


@pytest.mark.parametrize("limit", [3_000, 30_000, 400_000])
def test_no_room_for_files_of_any_size(saving: dict[str, Any], write_recipe: Any, run: Path, limit: int) -> None:
    saving["checkpoint"] = {}
    path = write_recipe(saving)
    train_alone(path, "run.name=filled", "train.max_steps=1")  # the cache, which has its own message
    with (
        full_disk(limit),
        pytest.raises(RunFailure, match=r"(metrics\.jsonl|tokenizer\.json): File too large|could not be written"),
    ):
        train_alone(path)
    assert json.loads((run / "status.json").read_text())["status"] == "failed"
    assert not (run / "model").exists()
    assert not (run / "model.partial").exists()
    train_alone(path)
    assert json.loads((run / "status.json").read_text())["status"] == "finished"


def test_an_evaluation_that_is_not_finite(saving: dict[str, Any], write_recipe: Any, run: Path) -> None:
    saving["checkpoint"]["best"] = "eval_loss"
    path = write_recipe(saving)
    with pytest.raises(RunFailure, match="values are not finite"):  # the result's own check
        train_alone(path, "train.max_steps=1", "optimizer.name=sgd", "optimizer.lr=1e38", "optimizer.weight_decay=1000")
    assert metrics(run)[-1] == {"step": 1, "eval_loss": None}
    state = json.loads((run / "checkpoints" / "step-00000001" / "state.json").read_text())
    assert state["metrics"] == {}


def test_a_base_that_lacks_a_weight(saving: dict[str, Any], write_recipe: Any, made: Path, tmp_path: Path) -> None:
    """transformers would draw it at random, and warn."""
    base, name = shutil.copytree(made / "llama", tmp_path / "base"), "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(base / "model.safetensors")
    tensors.pop(name)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    saving["model"] = {"name": str(base)}
    with pytest.raises(UserError, match=rf"model.name: .* lacks 1 weights of its model, such as `{name}`"):
        train_alone(write_recipe(saving))


# --- folders and clocks


def test_checkpoints_behind_links(saving: dict[str, Any], write_recipe: Any, run: Path, tmp_path: Path) -> None:
    saving["checkpoint"] = {"every_steps": 1, "keep": 1}
    saving["schedule"] = {"name": "constant"}
    path, elsewhere = write_recipe(saving), tmp_path / "elsewhere"
    (elsewhere / "checkpoints").mkdir(parents=True)
    run.mkdir(parents=True)
    (run / "checkpoints").symlink_to(elsewhere / "checkpoints")
    train_alone(path, "train.max_steps=2")
    moved = elsewhere / "step-00000002"
    (elsewhere / "checkpoints" / "step-00000002").rename(moved)
    (run / "checkpoints" / "step-00000002").symlink_to(moved)
    assert "step 2 of 4" in train_alone(path, "train.max_steps=4")
    assert names(run / "checkpoints") == ["step-00000004"]
    assert (moved / "state.json").exists()  # the link is ours to delete, not where it leads


def test_a_clock_that_jumped_back(interrupted: tuple[Path, list[float]], run: Path) -> None:
    path, before = interrupted
    tomorrow = time.time() + 86_400
    for file in (*run.rglob("*"), *Path(os.environ["FINETUNE_CACHE"]).rglob("*")):
        os.utime(file, (tomorrow, tomorrow))
    assert "step 4 of 6" in train_alone(path)
    assert losses(run) == before


def test_a_run_folder_that_cannot_be_written_to(saving: dict[str, Any], write_recipe: Any, run: Path) -> None:
    run.parent.mkdir()
    read_only(run)
    with pytest.raises(UserError, match=r"run\.dir: .* cannot be written to.*\. Fix: choose another `run\.dir`"):
        train_alone(write_recipe(saving))


def test_a_lock_of_another_launch_names_it(
    saving: dict[str, Any], write_recipe: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.training.run_lock._WAIT_S", 0.1)
    run.mkdir(parents=True)
    with FileLock(run / ".lock"):
        (run / ".launch.json").write_text('{"host": "node7", "process": 123, "since": "2026-01-01T00:00:00+00:00"}')
        with pytest.raises(UserError, match=r"process 123 on node7, since 2026-01-01.* if it is gone, remove .*\.lock"):
            train_alone(write_recipe(saving))
    train_alone(write_recipe(saving))
    assert json.loads((run / ".launch.json").read_text())["process"] == os.getpid()


@pytest.mark.long
def test_killed_during_an_evaluation(saving: dict[str, Any], write_recipe: Any, run: Path) -> None:
    saving["schedule"] = {"name": "constant"}
    saving["evaluate"] = {"every_steps": 2, "exact_match": 16, "max_new_tokens": 100}
    path = write_recipe(saving)
    train_alone(path, "run.name=whole")
    start_forkserver()
    running = multiprocessing.get_context("forkserver").Process(target=train_alone, args=(path,))
    running.start()
    log = run / "metrics.jsonl"
    while not log.exists() or b'"step": 4' not in log.read_bytes():  # step 4 is done, its evaluation is not
        assert running.is_alive()
        time.sleep(0.005)
    running.kill()
    running.join()
    assert running.exitcode == -signal.SIGKILL
    assert json.loads((run / "status.json").read_text())["status"] == "running"
    assert [line for line in metrics(run) if line["step"] == 4 and "eval_loss" in line] == []
    train_alone(path)
    kept = ("step", "loss", "eval_loss", "exact_match")
    seen, whole = (
        [{key: line[key] for key in kept if key in line} for line in metrics(folder)]
        for folder in (run, run.parent / "whole")
    )
    assert seen == whole
