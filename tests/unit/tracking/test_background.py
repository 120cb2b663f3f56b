"""Calls beside the loop: in order, all of them, and a failure is not lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from finetune.tracking.metrics import Background


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
def test_a_full_disk_is_said_once_and_nothing_is_written_behind_the_gap():
    background, later, go = Background("test"), [], threading.Event()
    background.do(lambda: go.wait() and Path("/dev/full").write_text("line\n", "utf-8"))
    background.do(later.append, 1)
    go.set()
    with pytest.raises(OSError, match="No space left"):
        background.flush()
    background.do(later.append, 2)
    background.close()
    assert later == []


def test_close_makes_what_is_left_and_says_what_failed():
    background, made = Background("test"), []
    background.do(made.append, 1)
    background.do({}.pop, "missing")
    with pytest.raises(KeyError):
        background.close()
    assert made == [1]
