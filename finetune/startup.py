"""Settings of large libraries for before their import."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from pathlib import Path


def large_pages() -> None:
    """Use large pages for torch's host memory, on Linux; before torch is imported. Fewer page faults, and freed blocks
    are reused: a sixth less memory if activations are recomputed on the CPU (benchmarks/README.md)."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


_SPINS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def sleep_at_barriers() -> None:
    """Let threads of torch's OpenMP (GNU's) sleep at a barrier at once, without a spin, if other programs want this
    process's cores now; before torch is imported, in this process and its children.

    A thread that spins for one without a core takes its core from others: by default a step beside one busy process
    takes four times as long. On quiet cores the sleep costs up to half of the speed (benchmarks/README.md). The
    threads are the same, so results are. No effect if the user has set how they wait.
    """
    if not any(name in os.environ for name in _SPINS) and cores_are_wanted():
        os.environ["GOMP_SPINCOUNT"] = "0"


def cores_are_wanted() -> bool:
    """Returns whether other programs run on cores that this process may use, on Linux: by the median of what the kernel
    counts as runnable, over a few hundredths of a second."""
    counts = list[int]()
    for _ in range(5):
        try:
            runnable = Path("/proc/loadavg").read_text(encoding="ascii").split()[3]  # man 5 proc_loadavg
        except OSError:
            return False
        counts.append(int(runnable.partition("/")[0]) - 1)  # this process runs as well
        time.sleep(0.005)
    return sorted(counts)[2] > (os.cpu_count() or 1) - len(os.sched_getaffinity(0))


def growing_segments() -> None:
    """Let torch's segments of CUDA memory grow, on Linux; before torch is imported. Packed rows differ in length from
    step to step, and freed blocks of fixed segments would not fit the next ones. No effect if the user has
    configured the allocator."""
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


_VERBOSE = "FINETUNE_VERBOSE"


def verbose_libraries() -> None:
    """Disable `quiet_libraries`, in this process and its children."""
    os.environ[_VERBOSE] = "1"


def is_verbose() -> bool:
    return os.environ.get(_VERBOSE) == "1"


def quiet_libraries() -> None:
    """Limit libraries to warnings on the main process and errors on the others; before they are imported. With -v
    their messages are shown instead."""
    if is_verbose():
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info")
        logging.basicConfig(level=logging.INFO)
        return
    main_process = int(os.environ.get("RANK", "0")) == 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forks after threads; the tokenizer warns at each fork
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if main_process else "error")
    if not (main_process and sys.stderr.isatty()):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # DeepSpeed (also imported by peft) sets its own level and warns on standard output, which programs may read.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    # torch 2.13 deprecates collectives that its own FSDP2 and DeepSpeed call at every layer.
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    # peft 0.21 reads transformers' old name of activation checkpointing.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of an optional kernel at every import
    logging.basicConfig(level=logging.WARNING if main_process else logging.ERROR, format="%(message)s")
