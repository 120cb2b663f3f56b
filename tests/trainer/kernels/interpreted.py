"""Triton's interpreter for these tests: kernels run on the CPU, block by block, with numpy.

    pip install --no-deps --target FOLDER triton liger-kernel
    TRITON_INTERPRET=1 PYTHONPATH=FOLDER python -m pytest tests/trainer/kernels      # scripts/test.sh --all does both

The variable holds for a process, so these tests run in one of their own; elsewhere they are skipped.
"""

from __future__ import annotations

import importlib.util
import os

import pytest


def _missing() -> str | None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "needs TRITON_INTERPRET=1: scripts/test.sh --all sets it"
    packages = [name for name in ("triton", "liger_kernel") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(packages)}" if packages else None


needs_interpreter = pytest.mark.skipif(
    _missing() is not None, reason=f"NO KERNEL CHECKED BY THE INTERPRETER: {_missing()}"
)

if _missing() is None:
    import complete_interpreter  # noqa: F401  (completes Triton's)
