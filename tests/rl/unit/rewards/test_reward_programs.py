"""Programs of completions, with a row's tests: what passes, and the limits that end the rest."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from completions import completion, reward, values

from finetune.errors import UserError
from finetune.rl.rewards.program_runner import NAMESPACES
from finetune.rl.rewards.programs import Program, missing_limits, run_program
from finetune.rl.rewards.scoring import Rewards

PROGRAM = Program(column="tests", partial=False, memory_mb=512, seconds=5.0)
MISSING = missing_limits(PROGRAM) or []


def passes(code: str, *tests: str, program: Program = PROGRAM) -> list[bool]:
    return run_program(code, tests or ("pass",), program)


def wait_for_no(mark: str) -> None:
    """Waits until no process has `mark` in its command line: the kernel ends a namespace in its own time."""
    deadline = time.monotonic() + 60
    while left := [one for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or [])]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_code_with_its_tests() -> None:
    code = "def add(a, b):\n    return a + b\n"
    cases = ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]
    rows = [completion(f"Sure:\n```python\n{code}```\nDone.", tests=cases), completion(code, tests=cases[0])]
    assert values(rows, name="tests") == [0, 1]
    assert values(rows, name="tests", partial=True) == [0.5, 1]


@pytest.mark.parametrize(
    "code",
    [
        "def f(:",
        "1 / 0",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise KeyboardInterrupt",
        "x = [0]\nwhile True: x = x + x",
        "def f(): f()\nf()",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.close(1); os.closerange(0, 64); os._exit(0)",
        "input()",
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_what_passes_nothing(code: str) -> None:
    assert passes(code) == [False]


def test_a_program_that_never_ends_is_ended() -> None:
    for code in ("while True: pass", "import time; time.sleep(1000)"):
        begun = time.monotonic()
        assert passes(code, program=Program("tests", False, 512, 1.0)) == [False]
        assert time.monotonic() - begun < 60  # not a timing: it ends


def test_prints_and_later_tests() -> None:
    assert passes("print('x' * 10**7)", "print(1)", "assert False", "pass") == [True, False, True]
    assert passes("if __name__ == '__main__': 1 / 0") == [True]  # the part for people does not run


def test_memory_files_and_open_files_are_limited(tmp_path: Path) -> None:
    assert passes("x = bytearray(2**30)") == [False]
    assert passes("x = bytearray(2**20)") == [True]
    assert passes("f = open('big', 'wb')\nfor _ in range(64): f.write(bytes(2**20))\nf.close()") == [False]
    assert passes("open('small', 'w').write('x')", "assert open('small').read() == 'x'") == [True]
    assert passes("files = [open('/dev/null') for _ in range(200)]") == [False]


def test_no_key_of_ours_and_a_folder_that_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import os\nopen('x', 'w').write('y')"
    assert passes(code, "assert 'HF_TOKEN' not in os.environ", "assert os.listdir() == ['x']") == [True, True]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif("files that are read-only" in MISSING, reason="this kernel has no mounts that are read-only below")
@pytest.mark.skipif("a network that is closed off" in MISSING, reason="this system has no namespaces for users")
def test_files_of_ours_are_read_only_and_our_environment_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = tmp_path / "ours"
    ours.write_text("ours")
    assert passes("x = 1", f"assert open({str(ours)!r}).read() == 'ours'") == [True]
    writes = (
        f"open({str(ours)!r}, 'w')",
        f"import os; os.remove({str(ours)!r})",
        f"open({str(tmp_path / 'new')!r}, 'w')",
    )
    assert passes("x = 1", *writes) == [False] * 3
    undo = """import ctypes
libc = ctypes.CDLL(None)
for path, flags in ((b"/", 0x8000), (b"/", 0), (b"/tmp", 0)):
    libc.syscall(442, -100, path, flags, ctypes.byref((ctypes.c_uint64 * 4)(0, 1, 0, 0)), ctypes.c_size_t(32))
libc.mount(None, b"/", None, 0x20 | 0x1000, None)
libc.umount2(b"/tmp", 2)
libc.unshare(0x10000000 | 0x20000)
libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)
"""
    assert passes(undo, *writes) == [False] * 3
    caps = "int(next(one for one in open('/proc/self/status') if one.startswith('CapPrm')).split()[1], 16)"
    assert passes("x = 1", f"assert {caps} == 0") == [True]
    assert ours.read_text() == "ours"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    reads = [f"assert b'hf_secret' in open('/proc/{pid}/environ', 'rb').read()" for pid in (os.getpid(), os.getppid())]
    assert passes("x = 1", *reads) == [False] * 2


# In a namespace of users that may have none below it, as a container without the right to make them.
WITHOUT = """echo 0 >/proc/sys/user/max_user_namespaces && exec "$0" -c '
import sys
from finetune.rl.rewards.builtin import REWARDS, Unanswerable
keys = {"column": "tests", "partial": False, "memory_mb": 512, "seconds": 5.0}
try:
    print(REWARDS["tests"].prepare({**keys, "isolation": sys.argv[1]})[1])
except Unanswerable as error:
    print("refused:", error)
' "$1"
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs `unshare` of util-linux")
@pytest.mark.skipif(NAMESPACES in MISSING, reason="this system has no namespaces for users")
@pytest.mark.parametrize(
    ("isolation", "said"),
    [
        ("required", "refused: this system forbids namespaces"),
        ("none", "programs of completions run without a network that is closed off"),
    ],
)
def test_a_system_without_namespaces_is_refused_unless_the_recipe_says_so(isolation: str, said: str) -> None:
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", WITHOUT, sys.executable, isolation]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said in done.stdout


@pytest.mark.skipif("a network that is closed off" in MISSING, reason="this system has no namespaces for users")
def test_no_network_and_nothing_survives(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = server.getsockname()
        connect = f"import socket; socket.create_connection({address!r}, 1)"
        assert passes(connect) == [False]
    mark = f"survivor-{os.getpid()}"
    sleeper = f"os.execv({shutil.which('sleep')!r}, [{mark!r}, '1000'])"
    daemon = f"import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: {sleeper}\n    os._exit(0)"
    assert passes(daemon) == [True]
    wait_for_no(mark)
    # Root's processes are not limited, but they end as well.
    forks = f"import os\nfor _ in range(40):\n    if os.fork() == 0: {sleeper}"
    assert passes(forks, program=Program("tests", False, 512, 30.0)) == ["a limit on processes" in MISSING]
    wait_for_no(mark)


def test_a_program_cannot_reach_the_reward_s_process() -> None:
    """A program that kills its parents: they are of another namespace, or the process is replaced."""
    killer = completion("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", tests="pass")
    good = completion("x = 1", tests="assert x == 1")
    with Rewards((reward(name="tests", on_failure=0.0),), None) as rewards:
        assert [one.total for one in rewards.score([killer, good, good])][1:] == [1, 1]


@pytest.mark.parametrize("tests", [None, 3, [], "", [1], ["", "pass"]], ids=repr)
def test_tests_that_are_none(tests: object) -> None:
    with Rewards((reward(name="tests", on_failure=-1.0),), None) as rewards:
        (result,) = rewards.score([completion("x = 1", tests=tests)])
    assert result.failures[0].startswith("tests: column `tests`: expected Python code, or a list of it, not ")


def test_a_limit_that_no_program_fits() -> None:
    message = r"\(tests\): even an empty program fails within 1024 MB and 0\.001 s\. Fix: raise"
    with pytest.raises(UserError, match=message):
        Rewards((reward(name="tests", seconds=0.001),), None).__enter__()
