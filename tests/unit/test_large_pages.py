"""Large pages for torch's blocks: asked of the kernel in every training process, unless its user says no."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from finetune.cli import large_pages
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
@pytest.mark.parametrize(("said", "expected"), [(None, "advised"), ("0", "usual")])
def test_blocks_of_torch(said: str | None, expected: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    if said is not None:
        environment["THP_MEM_ALLOC_ENABLE"] = said
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected]
