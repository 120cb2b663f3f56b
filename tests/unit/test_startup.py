"""What a process sets for the large libraries, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.startup import _begin, growing_segments
from finetune.utils import num_cores

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


# Which model files this process opens, and which class transformers takes from which of its modules.
IMPORTED = """
import collections, hashlib, os, sys
opened = collections.Counter()
sys.addaudithook(lambda event, found: opened.update([found[0]] if event == "open" else []))
if sys.argv[1] != "plain":
    from finetune.startup import import_transformers
    import_transformers(own_process=sys.argv[1] == "command")
import transformers, transformers.models
from transformers import AutoConfig
print(AutoConfig.for_model("llama").model_type)
models = {str(path): times for path, times in opened.items() if os.path.basename(str(path)).startswith("modeling_")}
print(len(models), sum(times > 1 for times in models.values()))
packages = [transformers, transformers.models]
places = [(package._class_to_module, package._modules, package._object_missing_backend) for package in packages]
print(sorted(repr((sorted(a.items()), sorted(b), sorted((k, sorted(v)) for k, v in c.items()))) for a, b, c in places))
print(transformers.utils.import_utils.__name__, transformers.utils.logging.__name__)
"""
ENDED = """
import atexit, sys, threading, time
from finetune.startup import end_process
atexit.register(lambda: print("registered"))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main")
end_process(3)
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no large pages")
@pytest.mark.parametrize(("said", "expected"), [(None, "advised"), ("0", "usual")])
def test_blocks_of_torch(said: str | None, expected: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    if said is not None:
        environment["THP_MEM_ALLOC_ENABLE"] = said
    done = subprocess.run(
        [sys.executable, "-c", LARGE_PAGES], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [expected]


def imported(how: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", IMPORTED, how], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_transformers_reads_its_models_once() -> None:
    plain, library, command = (imported(how) for how in ("plain", "library", "command"))
    for ours in (library, command):
        assert [*ours[:1], *ours[2:]] == [*plain[:1], *plain[2:]]  # what is found where
    files, again = map(int, library[1].split())
    assert files > 100
    assert again < 10  # the packages in use look through their own folder
    if sys.platform == "linux" and num_cores() > 1:
        assert int(command[1].split()[0]) < 10  # a fork has read them


def test_what_a_fork_cannot_do_is_done_here() -> None:
    here = os.getpid()
    assert _begin(lambda: os.getpid() != here)() is True
    assert _begin(lambda: [1] if os.getpid() == here else os._exit(1))() == [1]


def test_the_end_waits_for_threads_and_calls_what_is_registered() -> None:
    done = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == (["main", "thread", "registered"], 3)


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
