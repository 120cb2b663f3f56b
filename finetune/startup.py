"""What a process sets before and around the imports of the large libraries: they are most of a short command's time."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Around imports: what the libraries make there stays, and to look through it for garbage again and again is a
    fifth of their time. Nor is it looked through afterwards."""
    usual = gc.get_threshold()
    gc.set_threshold(1_000_000, *usual[1:])
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*usual)


def import_transformers() -> None:
    """transformers, which reads each of its 1,600 model files at import, and then once more: it keeps what it found for
    `.../models`, and asks for `.../models/__init__.py`. A tenth of a short command's time."""
    from transformers.utils import import_utils

    found_in = getattr(import_utils, _LISTING, None)
    if found_in is None:  # another version's business
        return
    setattr(import_utils, _LISTING, lambda path: found_in(_folder(Path(path))))
    try:
        importlib.import_module("transformers.models")
    finally:
        setattr(import_utils, _LISTING, found_in)


_LISTING = "create_import_structure_from_path"


def _folder(path: Path) -> Path:
    return path.parent if path.is_file() else path


def large_pages() -> None:
    """For torch's large blocks of host memory, on Linux; before it is imported. Fewer page faults, and freed blocks fit
    the next ones: a sixth less memory where activations are recomputed on the CPU (benchmarks/README.md)."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def growing_segments() -> None:
    """For torch's blocks of CUDA memory, on Linux; before it is imported. Packed rows differ in length from step to
    step, and freed blocks of fixed segments would not fit the next ones. Nothing where the user has set the
    allocator."""
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def quiet_libraries() -> None:
    """Warnings of the libraries on the main process, errors only on the others; before they are imported."""
    import logging
    import warnings

    main_process = int(os.environ.get("RANK", "0")) == 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forks after threads; the tokenizer warns on every one
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if main_process else "error")
    if not (main_process and sys.stderr.isatty()):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # DeepSpeed (peft imports it, too) sets its own level and warns on standard output, which programs may read.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    # torch 2.13 deprecates collectives that its own FSDP2 and DeepSpeed call at every layer.
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    # peft 0.21 reads transformers' old name of activation checkpointing.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of an optional kernel at every import
    logging.basicConfig(level=logging.WARNING if main_process else logging.ERROR, format="%(message)s")
