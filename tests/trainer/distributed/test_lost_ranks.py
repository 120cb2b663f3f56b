"""A rank that does not arrive: one message, which names it and its machine."""

from __future__ import annotations

import socket
from pathlib import Path

import forks
import pytest


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "name", "expected"),
    [
        (1, "SIGSTOP", f"rank 1 on {socket.gethostname()} did not arrive: the others waited 6 s. "),
        (0, "SIGSTOP", "rank 0 on 127.0.0.1 did not arrive: the others waited 6 s. "),
    ],
)
def test_a_rank_that_is_missing_is_named_once(
    victim: int, name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_TIMEOUT_S", "6")
    monkeypatch.setenv("FINETUNE_ANSWERED", "1")
    done = forks.torchrun(3, Path(__file__).with_name("lost_rank.py"), victim, name)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1, done.stderr
    assert errors[0].partition("error: ")[2].startswith(expected)
    assert "run the same command again" in errors[0]
    assert "fault of finetune" not in done.stderr


def test_a_rank_that_was_killed_is_no_fault_of_finetune(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ends the others, which may or may not have told of their lost connections before."""
    monkeypatch.setenv("FINETUNE_TIMEOUT_S", "6")
    monkeypatch.setenv("FINETUNE_ANSWERED", "1")
    done = forks.torchrun(3, Path(__file__).with_name("lost_rank.py"), 2, "SIGKILL")
    assert done.returncode != 0
    for error in (line.partition("error: ")[2] for line in done.stderr.splitlines() if "] error: " in line):
        assert error.startswith("the connection to another rank is lost. ")
    assert "fault of finetune" not in done.stderr
