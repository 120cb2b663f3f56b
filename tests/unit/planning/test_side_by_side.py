"""Places are evaluated in forks, with the results of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from finetune.errors import UserError
from finetune.planning.estimate.forks import side_by_side
from finetune.utils import num_cores

# A process that has run no backward, as the command's: on one core, then on all.
PLANNED = """
import json, os, sys
from pathlib import Path
from finetune.planning.estimate.command import PlanOptions, plan
from finetune.planning.estimate.answer import as_dicts
from finetune.planning.estimate.timeline import _timeline
found = []
for cores in (os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}):
    os.sched_setaffinity(0, cores)
    request, choices, founds = plan(Path(sys.argv[1]), sys.argv[2:], PlanOptions(("4xH100-80",)))
    here = _timeline.cache_info().misses
    found.append({"choices": as_dicts(request, choices), "illegal": founds[0].illegal, "here": here})
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux" or num_cores() < 2, reason="forks need Linux and two cores")
def test_a_plan_in_forks_is_that_of_one_process(recipe: dict[str, object], write_recipe: object) -> None:
    path = write_recipe(recipe)  # pyright: ignore[reportCallIssue]
    short = ("train.max_steps=60", "schedule.warmup_steps=6", "train.precision=bf16", "data.max_length=64")
    command = [sys.executable, "-W", "ignore", "-c", PLANNED, path, *short]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    forked, alone = json.loads(done.stdout.splitlines()[-1])
    assert forked.pop("here") == 0 < alone.pop("here")
    assert forked == alone
    assert forked["choices"]
    assert forked["illegal"]


def test_this_process_does_the_work_of_forks_that_ended() -> None:
    here = os.getpid()

    def work(i: int) -> int:
        if os.getpid() != here:
            os._exit(1)
        return i * i

    assert side_by_side(work, 3) == [0, 1, 4]


def test_an_error_of_the_work_is_raised() -> None:
    def work(i: int) -> int:
        raise UserError(f"place {i}")

    with pytest.raises(UserError, match="place 0"):
        side_by_side(work, 2)
