"""States of runs, of real processes that write what a training writes, and what their page offers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from studio_server import TOKEN, Browser, served

from finetune.desk.studio import jobs as jobs_module
from finetune.desk.studio.jobs import Jobs, StartedCommand, process_identity
from finetune.desk.studio.run_state import run_state

RUN = "runs/x"
# A training: waits for the file `go` before its first step, `end` before its last; SIGINT saves, as the trainer does.
TRAINING = """
import json, os, pathlib, signal, sys, time
run = pathlib.Path("runs/x")
run.mkdir(parents=True, exist_ok=True)
steps_begun = False
def status(text): (run / "status.json").write_text(json.dumps({"status": text, "step": 1, "steps": 2}))
def stop(*_):
    if steps_begun:
        while pathlib.Path("hold").exists(): time.sleep(0.01)
        status("stopped")
    sys.exit(75)
signal.signal(signal.SIGINT, stop)
(run / "plan.json").write_text(json.dumps({"steps": 2}))
print("loading the model")
while not pathlib.Path("go").exists(): time.sleep(0.01)
time.sleep(0.05)  # so that the file's time differs from that of an earlier launch
status("running")
steps_begun = True
with (run / "metrics.jsonl").open("a") as file: file.write('{"step": 1, "loss": 1.0}\\n')
print("step 1")
while not pathlib.Path("end").exists(): time.sleep(0.01)
if pathlib.Path("end").read_text(): raise SystemExit(1)
status("finished")
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("mode: full\ndata: {train: rows.jsonl}\n")
    jobs = Jobs(tmp_path)
    yield jobs
    for job in jobs.running():
        os.killpg(job.pid, signal.SIGKILL)
        until(lambda job=job: jobs.status(job) is not None)


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.02)


def launched(jobs: Jobs) -> StartedCommand:
    (jobs.folder / "program.py").write_text(TRAINING)
    job = jobs.start("launch", ["program.py"], None, RUN)
    until(lambda: "loading" in jobs.output(job)[0])
    return job


def begun(jobs: Jobs) -> StartedCommand:
    job = launched(jobs)
    (jobs.folder / "go").touch()
    until(lambda: "step 1" in jobs.output(job)[0])
    return job


def state(jobs: Jobs) -> str:
    return run_state(jobs, RUN, jobs.last_launches().get(RUN)).name


def ended(jobs: Jobs, job: StartedCommand) -> int:
    until(lambda: jobs.status(job) is not None)
    return jobs.status(job) or 0


def page(jobs: Jobs) -> str:
    with served(jobs.folder) as port:
        return Browser(port, f"finetune-studio-{port}={TOKEN}").get(f"/parts/run?path={RUN}")


def offered(text: str) -> tuple[bool, bool]:
    """Returns whether a page has a button that stops the run, and a form that starts it."""
    return "stop-job" in text, 'data-action="launch"' in text


def test_a_run_from_its_start_to_its_end(jobs: Jobs) -> None:
    job = launched(jobs)
    assert state(jobs) == "starting"
    text = page(jobs)
    assert offered(text) == (True, False)
    assert f'data-job="{job.number}"' in text  # what it prints is followed from its first second
    assert "They are drawn here from its first step on" in text
    assert "damaged" not in text
    assert "<iframe" not in text
    (jobs.folder / "go").touch()
    until(lambda: state(jobs) == "running")
    until(lambda: "step 1" in jobs.output(job)[0])
    text = page(jobs)
    assert offered(text) == (True, False)
    assert "<iframe" in text
    (jobs.folder / "end").touch()
    assert ended(jobs, job) == 0
    assert state(jobs) == "finished"
    assert offered(page(jobs)) == (False, False)


def test_a_run_that_is_stopped_in_its_start_can_be_started_again(jobs: Jobs) -> None:
    job = launched(jobs)
    jobs.stop(job)
    assert ended(jobs, job) == 75
    assert state(jobs) == "stopped before its first step"
    words = ["-m", "finetune", "launch", "--num-processes", "2", "recipe.yaml", "run.seed=7"]
    record = jobs.folder / ".finetune-studio" / "jobs" / str(job.number) / "job.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "words": words}))
    text = page(jobs)
    assert offered(text) == (False, True)
    assert "Start it again" in text
    for field in ('name="recipe" value="recipe.yaml"', 'name="overrides" value="run.seed=7"', 'value="2"'):
        assert field in text
    assert "saved" not in text.partition('data-part="controls"')[0]


def test_a_run_that_is_stopped_saves_and_is_resumed(jobs: Jobs) -> None:
    job = begun(jobs)
    (jobs.folder / "hold").touch()
    jobs.stop(job)
    assert state(jobs) == "stopping"
    text = page(jobs)
    assert offered(text) == (True, False)
    assert "Stop at once" in text
    (jobs.folder / "hold").unlink()
    assert ended(jobs, job) == 75
    assert state(jobs) == "stopped and saved"
    (jobs.folder / RUN / "recipe.yaml").write_text("mode: full\n")
    text = page(jobs)
    assert offered(text) == (False, True)
    assert f'value="{RUN}/recipe.yaml"' in text
    (jobs.folder / "go").unlink()
    again = launched(jobs)
    assert state(jobs) == "starting"  # its files still say "stopped"
    assert offered(page(jobs)) == (True, False)
    jobs.stop(again)
    assert ended(jobs, again) == 75
    assert state(jobs) == "stopped before it went on"
    assert offered(page(jobs)) == (False, True)


def test_a_new_run_begins_from_the_recipe_and_not_from_the_copy_of_a_run(jobs: Jobs) -> None:
    job = launched(jobs)
    jobs.stop(job)
    ended(jobs, job)
    record = jobs.folder / ".finetune-studio" / "jobs" / str(job.number) / "job.json"
    for number, recipe in ((job.number, "recipe.yaml"), (job.number + 1, f"{RUN}/recipe.yaml")):  # begun, resumed
        place = record.parents[1] / str(number)
        place.mkdir(exist_ok=True)
        values = {**json.loads(record.read_text()), "number": number, "words": ["-m", "finetune", "launch", recipe]}
        (place / "job.json").write_text(json.dumps(values))
        (place / "status.txt").write_text("75\n")
    assert '<a href="/recipe?path=recipe.yaml">New run</a>' in page(jobs)


def test_a_run_that_fails_or_is_killed(jobs: Jobs) -> None:
    job = begun(jobs)
    (jobs.folder / "end").write_text("fail")
    assert ended(jobs, job) == 1
    assert state(jobs) == "failed"  # its files say "running"
    (jobs.folder / "end").unlink()
    job = begun(jobs)
    os.killpg(job.pid, signal.SIGKILL)
    assert ended(jobs, job) == -1
    assert state(jobs) == "killed"
    (jobs.folder / RUN / "recipe.yaml").write_text("mode: full\n")
    assert offered(page(jobs)) == (False, True)
    time.sleep(0.05)
    (jobs.folder / RUN / "status.json").write_text('{"status": "running"}')  # launched in a terminal
    assert state(jobs) == "running"
    assert offered(page(jobs)) == (False, False)


def test_a_step_of_the_clock_changes_no_state_and_blocks_no_page(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process's time of creation is counted from the clock's time of boot, so it moves with the clock."""
    job = launched(jobs)
    created = jobs_module.psutil.Process.create_time
    monkeypatch.setattr(jobs_module.psutil.Process, "create_time", lambda self: created(self) + 3600)
    for reader in (jobs, Jobs(jobs.folder)):  # this studio's own child, and a command of an earlier studio
        assert reader.status(job) is None
    assert process_identity(job.pid) == job.process
    assert "starting" in page(jobs)


def test_a_number_that_another_process_has_now_is_no_command(jobs: Jobs) -> None:
    job = launched(jobs)
    os.killpg(job.pid, signal.SIGKILL)
    ended(jobs, job)
    record = jobs.folder / ".finetune-studio" / "jobs" / str(job.number)
    (record / "status.txt").unlink()
    (record / "job.json").write_text(json.dumps({**json.loads((record / "job.json").read_text()), "pid": os.getpid()}))
    later = Jobs(jobs.folder)
    other = later.read(job.number)
    assert other is not None
    assert later.status(other) == -1
    with contextlib.suppress(ProcessLookupError):
        later.stop(other)  # this process is not signaled


def test_two_studios_of_a_folder_give_two_numbers(jobs: Jobs) -> None:
    (jobs.folder / ".finetune-studio" / "jobs" / "1").mkdir(parents=True)  # of one that has not written its file yet
    other = jobs.start("check", ["-c", ""], None, None)
    assert ended(jobs, other) == 0
    assert other.number == 2
    assert jobs.damaged() == []
