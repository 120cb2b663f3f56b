"""What a process sets for the large libraries, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.startup import growing_segments, sleep_at_barriers

LARGE_PAGES = """
from finetune.startup import large_pages
large_pages()
import torch
block = torch.zeros(2**22)
address = block.data_ptr()
inside = False
for line in open("/proc/self/smaps"):
    first = line.split()[0]
    if "-" in first and not first.endswith(":"):
        begin, end = (int(one, 16) for one in first.split("-"))
        inside = begin <= address < end
    elif inside and first == "VmFlags:":
        print("advised" if "hg" in line.split() else "usual")
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no large pages")
@pytest.mark.parametrize(("said", "expected"), [pytest.param(None, "advised", marks=pytest.mark.long), ("0", "usual")])
def test_blocks_of_torch(said: str | None, expected: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    if said is not None:
        environment["THP_MEM_ALLOC_ENABLE"] = said
    done = subprocess.run(
        [sys.executable, "-c", LARGE_PAGES], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [expected]


@pytest.mark.skipif(sys.platform != "linux", reason="segments grow on Linux alone")
@pytest.mark.parametrize(
    ("users", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None),  # the older name
    ],
)
def test_the_allocator_is_the_user_s(
    monkeypatch: pytest.MonkeyPatch, users: dict[str, str], expected: str | None
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    growing_segments()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
    os.environ.pop("PYTORCH_ALLOC_CONF", None)


SPINS = "from finetune.startup import sleep_at_barriers; sleep_at_barriers(); import torch"
WAITS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Every core has a program that never sleeps."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    yield
    for program in programs:
        program.kill()
        program.wait()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="another OpenMP")
@pytest.mark.usefixtures("busy_cores")
@pytest.mark.parametrize(
    ("users", "expected"),
    [
        ({}, "0"),
        pytest.param({"GOMP_SPINCOUNT": "7"}, "7", marks=pytest.mark.long),
        pytest.param({"OMP_WAIT_POLICY": "PASSIVE"}, "0", marks=pytest.mark.long),
    ],
)
def test_threads_of_torch_sleep_at_barriers_beside_other_programs(users: dict[str, str], expected: str) -> None:
    """By what the OpenMP that torch has loaded says itself."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITS}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **users}
    done = subprocess.run([sys.executable, "-c", SPINS], env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr


def test_threads_spin_as_they_do_where_nobody_wants_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10_000)  # more than there are programs
    sleep_at_barriers()
    assert "GOMP_SPINCOUNT" not in os.environ
