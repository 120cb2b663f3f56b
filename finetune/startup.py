"""Settings before and around the imports of large libraries, which are most of a short command's time."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import inspect
import marshal
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def fast_imports() -> Iterator[None]:
    """Within, imports of large libraries take a fifth less time. There are fewer garbage collections, then and later:
    what libraries create there stays. And torch learns file and line of each operator that it registers, without the
    source around."""
    default, frame_info = gc.get_threshold(), inspect.getframeinfo
    gc.set_threshold(1_000_000, *default[1:])
    inspect.getframeinfo = lambda frame, context=0: frame_info(frame, context)  # its own default reads a line
    try:
        yield
    finally:
        inspect.getframeinfo = frame_info
        gc.freeze()
        gc.set_threshold(*default)


# --- transformers reads its 1,600 model files whenever it is imported, twice: a sixth of a short command's time

_LISTING = "create_import_structure_from_path"


def import_transformers(own_process: bool = False) -> None:
    """Import torch and transformers, whose model files are read once. own_process: it is a command's, which may fork:
    they are read while torch is imported."""
    if "transformers" not in sys.modules:
        _import_with_listing(own_process)
    importlib.import_module("transformers.models")


def _import_with_listing(own_process: bool) -> None:
    helpers = _helpers_of_transformers()
    original = getattr(helpers, _LISTING, None)
    if original is None:  # another version
        return
    models = Path(helpers.__file__ or "").parents[1] / "models"
    listing = _begin(lambda: original(models)) if own_process and _has_spare_core() else lambda: original(models)
    importlib.import_module("torch")
    listed = listing()
    asked = (models, models / "__init__.py")  # one after the other; then the packages that are used
    setattr(helpers, _LISTING, lambda path: listed if Path(path) in asked else original(path))
    early = [name for name in sys.modules if name.startswith("transformers.")]
    try:
        importlib.import_module("transformers.models")
    finally:
        setattr(helpers, _LISTING, original)
    for package, _, name in (one.rpartition(".") for one in early):  # as if they had been imported from within
        setattr(sys.modules[package], name, sys.modules[f"{package}.{name}"])


def _helpers_of_transformers() -> types.ModuleType:
    """Returns transformers' module that lists its models, before transformers itself is imported: under packages that
    are empty meanwhile."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
    folder, packages = Path(found.origin).parent, ("transformers", "transformers.utils")
    for name, path in zip(packages, (folder, folder / "utils"), strict=True):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    try:
        return importlib.import_module("transformers.utils.import_utils")
    finally:
        for name in packages:
            del sys.modules[name]


def _has_spare_core() -> bool:
    """Whether a fork would have a core: ranks of a launch have theirs. A thread could hold a lock that it needs."""
    if sys.platform != "linux" or "RANK" in os.environ or threading.active_count() > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1


def _begin(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begins `work` in a fork; returns what waits for its result, which is of plain types."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        # Threads that wait here, such as those of a BLAS, hold nothing that the fork needs.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        fork = os.fork()
    if not fork:
        try:
            with open(writes, "wb") as pipe:
                pipe.write(marshal.dumps(work()))
        finally:
            os._exit(0)
    os.close(writes)

    def result() -> Any:
        with open(reads, "rb") as pipe:
            answer = pipe.read()
        with contextlib.suppress(ChildProcessError):  # the shell has asked that nobody waits
            os.waitpid(fork, 0)
        try:
            return marshal.loads(answer)
        except (EOFError, ValueError):  # the fork was ended
            return work()

    return result


def import_adapters() -> None:
    """Import peft for a process that only looks at shapes. bitsandbytes, which peft imports, marks functions for
    torch.compile, and torch imports its compiler for that, most of the time that peft takes: here they stay as they
    are written."""
    switch = "TORCHDYNAMO_DISABLE"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        importlib.import_module("peft")
    finally:
        os.environ.pop(switch) if before is None else os.environ.update({switch: before})


def large_pages() -> None:
    """Use large pages for torch's host memory, on Linux; before torch is imported. Fewer page faults, and freed blocks
    are reused: a sixth less memory where activations are recomputed on the CPU (benchmarks/README.md)."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def growing_segments() -> None:
    """Let torch's segments of CUDA memory grow, on Linux; before torch is imported. Packed rows differ in length from
    step to step, and freed blocks of fixed segments would not fit the next ones. Without effect where the user has
    configured the allocator."""
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


_VERBOSE = "FINETUNE_VERBOSE"


def verbose_libraries() -> None:
    """Let `quiet_libraries` be, in this process and in those that it starts."""
    os.environ[_VERBOSE] = "1"


def is_verbose() -> bool:
    return os.environ.get(_VERBOSE) == "1"


def quiet_libraries() -> None:
    """Limit libraries to warnings on the main process and errors on the others; before they are imported. With -v
    their messages are shown instead."""
    import logging

    if is_verbose():
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info")
        logging.basicConfig(level=logging.INFO)
        return
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


@contextlib.contextmanager
def heavy_imports() -> Iterator[None]:
    """Quiets libraries and imports transformers; the block imports what else a command needs."""
    quiet_libraries()
    with fast_imports():
        import_transformers(own_process=True)
        yield


# --- the end

_SKIPS_TEARDOWN = False


def skip_teardown() -> None:
    """Let this command end without the teardown of torch's modules and libraries, a twentieth of a short command's
    time. For those that read and print: a rank's own ends what it has with others."""
    global _SKIPS_TEARDOWN
    _SKIPS_TEARDOWN = True


def skips_teardown() -> bool:
    return _SKIPS_TEARDOWN


def end_process(status: int) -> None:
    """End this process as Python would (threads, what was registered for the exit, what is still to be written), but
    for the teardown. Returns where what is left cannot be written; Python then says so."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return
    os._exit(status)
