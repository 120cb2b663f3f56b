"""Signals become a wish; a second one ends the process, also while its main thread waits in a library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from finetune.errors import STOPPED_STATUS
from finetune.training.signals import SIGNALS, listening


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_wish(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with listening() as stop:
        stop.steps_begun = True
        assert stop.reason is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the launcher passes on what the process got itself
        while stop.reason is None:
            time.sleep(0.01)
        assert stop.reason == number.name
    assert signal.getsignal(number) == before


# The main thread waits for a peer that will never come, as in a collective: Python runs no handler there.
_STUCK = """
import torch.distributed as dist
from finetune.training.signals import listening
with listening() as stop:
    stop.steps_begun = True
    print("ready", flush=True)
    dist.TCPStore("127.0.0.1", 0, world_size=2, is_master=True)
"""


def test_a_second_signal_ends_a_process_that_is_stuck() -> None:
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    stuck = subprocess.Popen([sys.executable, "-c", _STUCK], text=True, **both)
    assert stuck.stdout is not None
    assert stuck.stderr is not None
    assert stuck.stdout.readline() == "ready\n"
    time.sleep(0.5)
    stuck.send_signal(signal.SIGTERM)
    assert stuck.stderr.readline().startswith("SIGTERM received: the run saves and stops at the end of this step")
    time.sleep(1.5)
    assert stuck.poll() is None
    stuck.send_signal(signal.SIGTERM)
    assert stuck.stderr.readline() == "SIGTERM received again: the run ends now, without saving\n"
    assert stuck.wait(30) == 128 + signal.SIGTERM
    stuck.stdout.close()
    stuck.stderr.close()


_SETTING_UP = """
import time
from finetune.training.signals import listening
with listening() as stop:
    print("ready", flush=True)
    time.sleep(60)
"""


def test_where_there_is_nothing_to_save_the_first_signal_ends_it() -> None:
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    loading = subprocess.Popen([sys.executable, "-c", _SETTING_UP], text=True, **both)
    assert loading.stdout is not None
    assert loading.stdout.readline() == "ready\n"
    loading.send_signal(signal.SIGTERM)
    _, said = loading.communicate(timeout=30)
    assert loading.returncode == STOPPED_STATUS
    assert said == "SIGTERM received before the first step: the run ends now, there is nothing to save\n"


_ORPHAN = """
import os, sys, time
from finetune.training.signals import listening
if os.fork():
    time.sleep(1)
    os._exit(0)
with listening() as stop:
    stop.steps_begun = sys.argv[1] == "begun"
    stop.watch_launcher()
    assert stop.reason is None
    while stop.reason is None or not stop.steps_begun:
        time.sleep(0.01)
    print(stop.reason)
"""


@pytest.mark.parametrize("state", ["begun", "not begun"])
def test_the_end_of_the_launcher_is_a_wish(state: str) -> None:
    """Before the first step it ends the process."""
    done = subprocess.run([sys.executable, "-c", _ORPHAN, state], capture_output=True, text=True, timeout=60)
    assert done.stdout == ("the end of its launcher\n" if state == "begun" else ""), done.stderr
    what = "saves and stops at the end of this step" if state == "begun" else "ends now"
    assert done.stderr == f"the launcher of this run has ended: the run {what}\n"
