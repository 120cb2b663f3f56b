"""The process of one program with its tests, started by `programs.py` as a script, without the package.

Reads {code, tests, seconds, memory} from standard input, and writes {passed, missing} to standard output: whether each
test raised nothing, and the limits that the system does not offer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

# linux/sched.h, linux/mount.h, linux/fcntl.h; the call of the kernel that changes mounts below a folder, since 5.12
_NEW_MOUNTS, _NEW_USER, _NEW_PID, _NEW_NET = 0x20000, 0x10000000, 0x20000000, 0x40000000
_BIND, _REC, _PRIVATE, _READ_ONLY, _RECURSIVE, _HERE = 0x1000, 0x4000, 0x40000, 1, 0x8000, -100
_MOUNT_SETATTR = 442
_NO_NEW_PRIVILEGES, _CAPABILITY_VERSION = 38, 0x20080522  # linux/prctl.h, linux/capability.h
NAMESPACES = "a network that is closed off"
_FILE_BYTES, _OPEN_FILES, _PROCESSES = 16 << 20, 64, 32


def main() -> None:
    request = json.load(sys.stdin)
    sys.path.pop(0)  # this file's folder; the program's imports are those of the environment
    missing = limit(request)
    results = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    passed = run(request["code"], request["tests"])
    content = json.dumps({"passed": passed, "missing": missing}).encode()
    while content:
        content = content[os.write(results, content) :]
    os._exit(0)  # without waiting for threads of the program


def limit(request: Mapping[str, Any]) -> list[str]:
    """Sets the limits, in a process whose end is that of its namespaces; returns those that the system lacks."""
    missing, is_root = [], os.geteuid() == 0
    is_separate = _separate()
    if not is_separate:
        missing.append(NAMESPACES)
    elif not _read_only():
        missing.append("files that are read-only")
    seconds = max(1, int(-(-request["seconds"] // 1)))
    limits = {
        "a limit on CPU time": (resource.RLIMIT_CPU, seconds),
        "a limit on memory": (resource.RLIMIT_AS, request["memory"]),
        "a limit on files": (resource.RLIMIT_FSIZE, _FILE_BYTES),
        "a limit on open files": (resource.RLIMIT_NOFILE, _OPEN_FILES),
        "a limit on core dumps": (resource.RLIMIT_CORE, 0),
    }
    if is_root or not is_separate:  # root has no such limit, and elsewhere all processes of the user count
        missing.append("a limit on processes")
    else:
        limits["a limit on processes"] = (resource.RLIMIT_NPROC, _PROCESSES)
    for name, (which, value) in limits.items():
        try:
            resource.setrlimit(which, (value, value))
        except (ValueError, OSError):  # macOS has no limit on address space; a hard limit may be lower
            missing.append(name)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])  # ends the process, whatever it waits for
    return missing


def _separate() -> bool:
    """Moves to namespaces of users, processes, mounts and an empty network; False if the system does not offer them.
    Environments of processes of another namespace of users cannot be read. As the first process of the namespace ends
    with the program, the kernel ends what the program has left."""
    if not sys.platform.startswith("linux"):
        return False
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_MOUNTS | _NEW_PID | _NEW_NET) != 0:
        return False
    # The first process of the namespace would ignore signals without a handler, a time limit's among them: it waits.
    for _ in range(2):
        if child := os.fork():
            os.close(1)
            os.waitpid(child, 0)
            os._exit(0)
    return True


def _read_only() -> bool:
    """Makes all files read-only but those of this process's folder, for good: a namespace of users comes with every
    capability in it, by which the program could undo that. False if the system does not offer it."""
    libc, here = ctypes.CDLL(None, use_errno=True), os.getcwd().encode()

    def set_attributes(path: bytes, flags: int, on: int, off: int) -> bool:
        attributes = (ctypes.c_uint64 * 4)(on, off, 0, 0)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        return libc.syscall(_MOUNT_SETATTR, _HERE, path, flags, ctypes.byref(attributes), size) == 0

    return (
        libc.mount(None, b"/", None, _REC | _PRIVATE, None) == 0
        and libc.mount(here, here, None, _BIND, None) == 0
        and set_attributes(b"/", _RECURSIVE, _READ_ONLY, 0)
        and set_attributes(here, 0, 0, _READ_ONLY)
        and os.chdir(here) is None  # the folder was that of the mount below
        and libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
        and libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION), (ctypes.c_uint32 * 6)()) == 0
    )


def run(code: str, tests: list[str]) -> list[bool]:
    """Returns which tests raised nothing; none did if the program itself raised. Everything counts that may be raised,
    `SystemExit` included."""
    names: dict[str, Any] = {"__name__": "completion"}
    if not _raises_nothing(code, names):
        return [False] * len(tests)
    return [_raises_nothing(test, names) for test in tests]


def _raises_nothing(code: str, names: dict[str, Any]) -> bool:
    is_done = False
    with contextlib.suppress(BaseException):
        exec(compile(code, "<completion>", "exec"), names)
        is_done = True
    return is_done


if __name__ == "__main__":
    main()
