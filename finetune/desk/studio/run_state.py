"""State of a run, from its last launch by the studio and from the files that it writes.

A process that is killed cannot say so in a file, and one that starts has not written any: so the process comes first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from finetune.desk.studio.jobs import Jobs, StartedCommand, written_at
from finetune.desk.studio.project_folder import OF_A_RUN
from finetune.tracking.metrics import read_status

STOPPED_EARLY = "stopped before its first step"
_STARTING_S = 600.0  # a run without a status that has written nothing for longer has perhaps been killed


@dataclass(frozen=True)
class RunState:
    """What a run is doing now."""

    name: str  # as shown: "running"
    kind: str  # running | finished | stopped | failed: the colour
    is_live: bool  # its files may change
    has_steps: bool  # the launch has begun its steps, or an earlier one has
    launch: StartedCommand | None  # the studio's last launch, if it says what the run is doing

    @property
    def can_be_stopped(self) -> bool:
        return self.is_live and self.launch is not None


def run_state(jobs: Jobs, run: str, job: StartedCommand | None) -> RunState:
    """Returns the state of a run. run: relative to the folder; job: the studio's last launch of it."""
    folder = jobs.folder / run
    if job is None:
        return _by_files(folder)
    exit_status = jobs.status(job)
    if exit_status is not None and _is_older(jobs, job, folder):
        return _by_files(folder)
    is_written = written_at(folder) != job.before  # by this launch
    said = read_status(folder)
    has_steps = is_written or job.before is not None
    if exit_status is None:
        name = "stopping" if jobs.is_stop_requested(job) else "running" if is_written else "starting"
        return RunState(name, "stopped" if name == "stopping" else "running", True, has_steps, job)

    def ended(name: str, kind: str) -> RunState:
        return RunState(name, kind, False, has_steps, job)

    was_stopped = jobs.is_stop_requested(job) or exit_status in (75, 130)
    if exit_status == 0 or (is_written and said == "finished"):
        return ended("finished", "finished")
    if is_written and said == "stopped":
        return ended("stopped and saved", "stopped")
    if exit_status == 75 or (was_stopped and not is_written):  # 75 without "stopped": there was nothing to save
        return ended(STOPPED_EARLY if job.before is None else "stopped before it went on", "stopped")
    if exit_status == -1:
        return ended("killed", "failed")
    if was_stopped and said == "running":
        return ended("stopped at once", "stopped")
    return ended("failed" if has_steps else "failed before its first step", "failed")


def _is_older(jobs: Jobs, job: StartedCommand, folder: Path) -> bool:
    """Returns whether a run was launched again after a command that has ended, from a terminal."""
    written, ended = written_at(folder), jobs.ended_at(job)
    return written is not None and ended is not None and written != job.before and written > ended


def _by_files(folder: Path) -> RunState:
    said = read_status(folder)
    if said == "running":
        return RunState("running", "running", True, True, None)
    if said is None and (folder / "status.json").exists():
        return RunState("damaged", "failed", False, True, None)
    if said is None:
        written = [(folder / name).stat().st_mtime for name in OF_A_RUN if (folder / name).is_file()]
        is_recent = bool(written) and time.time() - max(written) < _STARTING_S
        name = "starting" if is_recent else STOPPED_EARLY if written else "not begun"
        return RunState(name, "running" if is_recent else "stopped", is_recent, False, None)
    shown = {"stopped": "stopped and saved"}.get(said, said)
    return RunState(shown, said, False, True, None)
