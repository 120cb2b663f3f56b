"""Functions of the user's file: every way to fail is told and counted, no answer loses its place, no process stays."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from completions import completion, reward

from finetune.errors import RunFailure, UserError
from finetune.rl.rewards.completion import Completion
from finetune.rl.rewards.scoring import LOG, Rewards

FUNCTIONS = """
import ctypes, json, os, random, signal, sys, threading, time
from fractions import Fraction

import numpy
from beside import helper

print("imported")
calls = 0


class Odd(Exception):
    def __str__(self):
        raise ValueError("not even this")


class Stranger:
    def __repr__(self):
        os._exit(7)


def deep(n):
    return deep(n + 1)


def judge(completion, reference, row):
    global calls
    calls += 1
    print(f"judging {completion}")
    if completion in ACTIONS:
        return ACTIONS[completion]()
    return helper(completion)


def raises(error):
    raise error


def flood():
    for _ in range(200):
        os.write(1, b"x" * 100_000)
    return 1.0


def forge(reply):
    frame = sys._getframe()
    while "task" not in frame.f_locals:
        frame = frame.f_back
    content = json.dumps({**reply, "id": frame.f_locals["task"]["id"]}).encode()
    for fd in range(3, 4096):
        if WRITABLE(fd):
            os.write(fd, len(content).to_bytes(8, "big") + content)
    time.sleep(1000)


def thread_that_stays():
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return 1.0


ACTIONS = {
    "value error": lambda: raises(ValueError("broken\\nin two lines")),
    "odd error": lambda: raises(Odd()),
    "long error": lambda: raises(ValueError("x" * 10**6)),
    "system exit": lambda: sys.exit(0),
    "interrupt": lambda: raises(KeyboardInterrupt()),
    "recursion": lambda: deep(0),
    "exit": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(1000),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "close pipes": lambda: (os.closerange(3, 4096), time.sleep(1000)),
    "forge": lambda: [os.write(fd, b"this is no frame") for fd in range(3, 4096) if WRITABLE(fd)] and time.sleep(1000),
    "forge nan": lambda: forge({"value": float("nan")}),
    "forge infinity": lambda: forge({"value": float("inf")}),
    "forge kind": lambda: forge({"kind": {"a": 1}, "what": "x"}),
    "nan": lambda: float("nan"),
    "infinity": lambda: -numpy.inf,
    "none": lambda: None,
    "text": lambda: "1.0",
    "list": lambda: [1.0],
    "complex": lambda: 1j,
    "long list": lambda: list(range(10**6)),
    "stranger": lambda: Stranger(),
    "array": lambda: numpy.zeros(3),
    "long integer": lambda: 10**400,
    "true": lambda: True,
    "integer": lambda: 3,
    "numpy": lambda: numpy.float32(0.5),
    "numpy bool": lambda: numpy.True_,
    "zero-dimensional": lambda: numpy.array(2),
    "fraction": lambda: Fraction(1, 4),
    "flood": flood,
    "thread": thread_that_stays,
    "sigterm": lambda: (os.kill(os.getpid(), signal.SIGTERM), 1.0)[1],
    "rank": lambda: float("RANK" in os.environ),
    "random": lambda: random.random(),
    "set": lambda: float(list({"a", "b", "c", "d"}).index("a")),
}


def WRITABLE(fd):
    import fcntl
    try:
        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
    except OSError:
        return False
"""
FAILURES = {  # completion: kind, message
    "value error": ("raised", "raised ValueError: broken in two lines"),
    "odd error": ("raised", "raised finetune_user_file.Odd: <exception str() failed>"),
    "long error": ("raised", f"raised ValueError: {'x' * 285}..."),
    "system exit": ("raised", "raised SystemExit: 0"),
    "interrupt": ("raised", "raised KeyboardInterrupt"),
    "recursion": ("raised", "raised RecursionError: maximum recursion depth exceeded"),
    "exit": ("died", "ended its process (status 0)"),
    "exit 3": ("died", "ended its process (status 3)"),
    "kill": ("died", "ended its process (signal SIGKILL)"),
    "crash": ("died", "ended its process (signal SIGSEGV)"),
    "hang": ("timeout", "gave no answer in 3 s"),
    "stop": ("timeout", "gave no answer in 3 s"),
    "close pipes": ("died", "closed the pipes of its process"),
    "forge": ("died", "wrote to the pipe of replies, which is not its own"),
    "forge nan": ("died", "wrote to the pipe of replies, which is not its own"),
    "forge infinity": ("died", "wrote to the pipe of replies, which is not its own"),
    "forge kind": ("died", "wrote to the pipe of replies, which is not its own"),
    "nan": ("not_a_number", "returned nan"),
    "infinity": ("not_a_number", "returned -inf"),
    "none": ("not_a_number", "returned NoneType, not a number; is a `return` missing?"),
    "text": ("not_a_number", "returned str ('1.0'), not a number"),
    "list": ("not_a_number", "returned list ([1.0]), not a number"),
    "complex": ("not_a_number", "returned complex, not a number"),
    "long list": ("not_a_number", "returned list ([0, 1, 2, 3, 4, 5, ...]), not a number"),
    "stranger": ("not_a_number", "returned Stranger, not a number"),
    "array": ("not_a_number", "returned ndarray, not a number"),
    "long integer": ("not_a_number", "returned an integer that is too large for a float"),
}
VALUES = {
    "true": 1.0,
    "integer": 3.0,
    "numpy": 0.5,
    "numpy bool": 1.0,
    "zero-dimensional": 2.0,
    "fraction": 0.25,
    "flood": 1.0,
    "thread": 1.0,
    "sigterm": 1.0,
    "rank": 0.0,
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(source: str) -> Path:
        (tmp_path / "beside.py").write_text("def helper(text):\n    return float(len(text))\n")
        (tmp_path / "rewards.py").write_text(source, encoding="utf-8")
        return tmp_path / "rewards.py"

    return write


def own(path: Path, function: str = "judge", **keys: Any) -> Any:
    return reward(file=str(path), function=function, **{"on_failure": -7.0, "seconds": 5.0, **keys})


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_every_failure_is_told_and_every_value_is_in_its_place(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    settings = own(write(FUNCTIONS), weight=2.0, seconds=3.0, processes=3)
    texts = [
        text for name in (*FAILURES, *VALUES) for text in (name, f"{name}!")
    ]  # between them, answers that are fine
    others = set(psutil.Process().children(recursive=True))  # of other tests, such as their servers
    with Rewards((settings,), tmp_path) as rewards:
        before = set(psutil.Process().children(recursive=True)) - others
        results = rewards.score([completion(text) for text in texts])
        counts = dict(rewards.counts)
        running = set(psutil.Process().children(recursive=True)) - others
    assert 1 <= len(before) <= 3
    assert 1 <= len(running) <= 3  # one that was killed is replaced when its turn comes
    assert all(is_gone(process) for process in (*before, *running))
    for text, result in zip(texts, results, strict=True):
        kind, message = FAILURES.get(text, ("", ""))
        expected = VALUES.get(text, None if kind else float(len(text)))
        assert result.by_name == {"judge": expected}, text
        assert result.failures == ((f"judge: {message}",) if kind else ()), text
        assert result.total == 2.0 * (-7.0 if expected is None else expected)
    kinds = [kind for kind, _ in FAILURES.values()]
    assert counts == {("judge", kind): kinds.count(kind) for kind in set(kinds)}
    log = (tmp_path / LOG).read_text(encoding="utf-8")
    assert stat.S_IMODE((tmp_path / LOG).stat().st_mode) == 0o600
    position = texts.index("value error") + 1
    assert f"judge: completion {position} of {len(texts)}: raised ValueError: broken in two lines\n    Traceback" in log
    assert f'File "{tmp_path / "rewards.py"}", line ' in log
    assert "    judging value error\n" in log
    assert "child.py" not in log
    assert len(log) < 60_000


def test_answers_do_not_depend_on_the_number_of_processes(write: Any, tmp_path: Path) -> None:
    """Nor does what a function draws or the order of its sets; what it remembers between calls would."""
    path = write(FUNCTIONS)
    completions = [completion(text) for text in ["random", "set", "abc", "nan", "kill", "random", "a"] * 3]
    results = []
    for processes in (1, 3):
        with Rewards((own(path, processes=processes),), None) as rewards:
            results.append([*rewards.score(completions), *rewards.score(completions[::-1])[::-1]])
    assert results[0] == results[1]
    assert results[0][:21] == results[0][21:]


def test_the_first_failure_stops_the_run(write: Any, tmp_path: Path) -> None:
    """The first in the order of the rows, not in time; nothing behind it is handed out."""
    source = (
        "import time, pathlib\n"
        "def f(completion):\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'seen-{{completion}}').touch()\n"
        "    time.sleep({'slow': 0.5}.get(completion, 0))\n"
        "    if completion in ('slow', 'quick'):\n"
        "        raise ValueError(completion)\n"
        "    return 0\n"
    )
    settings = own(write(source), "f", on_failure=None, processes=2)
    texts = ["fine", "slow", "quick", *(f"later {i}" for i in range(50))]
    places = [f"rows.jsonl:{i}, sample 0" for i in range(len(texts))]
    completions = [
        Completion("", (), text, None, {}, 1, False, place) for text, place in zip(texts, places, strict=True)
    ]
    with Rewards((settings,), tmp_path) as rewards, pytest.raises(UserError) as error:
        rewards.score(completions)
    assert str(error.value) == (
        f"rewards[0] (f): rows.jsonl:1, sample 0: raised ValueError: slow. Traceback and output are in "
        f"{tmp_path / LOG}. Fix: correct the reward or the row, or set `on_failure` to the value that such a "
        "completion gets"
    )
    assert len(list(tmp_path.glob("seen-later*"))) < 50


def test_several_rewards_are_summed_by_their_weights(write: Any) -> None:
    path = write("def a(completion): return 2\ndef b(completion, row): return 1 / row['n']\n")
    settings = (own(path, "a", weight=0.5), own(path, "b", metric="inverse", on_failure=-1.0), reward(name="number"))
    with Rewards(settings, None) as rewards:
        first, second = rewards.score([completion("42", n=4), completion("42", n=0)])
    assert (first.total, first.by_name, first.failures) == (2.25, {"a": 2.0, "inverse": 0.25, "number": 1.0}, ())
    assert second.total == 1.0
    assert second.by_name["inverse"] is None
    assert second.failures == ("inverse: raised ZeroDivisionError: division by zero",)


def test_a_function_gets_what_it_names(write: Any) -> None:
    source = (
        "def some(reference, *, prompt, unused=0): return float((reference, prompt) == ('42', 'How many?'))\n"
        "def all(**kwargs): return len(kwargs)\n"
        "def row(row, messages, num_tokens, is_truncated):\n"
        "    messages.clear(); row['n'] += 1\n"
        "    return row['n'] + num_tokens + is_truncated\n"
        "def none(reference): return reference is None\n"
        "class Callable:\n"
        "    def __call__(self, completion): return len(completion)\n"
        "callable = Callable()\n"
    )
    path = write(source)
    names = ("some", "all", "row", "none", "callable")
    with Rewards(tuple(own(path, name, on_failure=None) for name in names), None) as rewards:
        for _ in range(2):  # a row is as it was, whatever the call before did to it
            (result,) = rewards.score([completion("abc", n=1)])
            assert list(result.by_name.values()) == [1, 7, 5, 0, 3]
        assert rewards.score([completion("abc", None, n=1)])[0].by_name["none"] == 1
        assert rewards.score([]) == []


def test_rows_may_hold_anything(write: Any) -> None:
    from datetime import datetime
    from decimal import Decimal

    path = write("def f(row): return row['when'].year + float(row['price']) + len(row['data'])\n")
    row = {"when": datetime(2026, 1, 1), "price": Decimal("0.5"), "data": b"\xff" * 100_000}
    with Rewards((own(path, "f"),), None) as rewards:
        assert rewards.score([completion("", **row)] * 3)[2].total == 2026 + 0.5 + 100_000


def test_an_edit_during_the_run_changes_nothing(write: Any) -> None:
    path = write("import os\ndef f(completion):\n    return 1 if completion else os._exit(1)\n")
    with Rewards((own(path, "f", processes=1),), None) as rewards:
        write("def f(completion): return 2\n")
        assert [one.total for one in rewards.score([completion("a"), completion(""), completion("a")])] == [1, -7, 1]


def test_the_log_is_no_other_file(write: Any, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / LOG).symlink_to(target)
    settings = (own(write("def f(completion): raise ValueError"), "f"),)
    message = r"reward-failures\.log could not be written: Too many levels of symbolic links"
    with Rewards(settings, tmp_path) as rewards, pytest.raises(RunFailure, match=message):
        rewards.score([completion("a")])
    assert target.read_text() == "mine"


def test_secrets_in_urls_are_not_logged_and_long_logs_are_cut(write: Any, tmp_path: Path) -> None:
    path = write("def f(completion):\n    raise ValueError('https://me:secret@host/a?token=abc')\n")
    with Rewards((own(path, "f"),), tmp_path) as rewards:
        failures = rewards.score([completion("a")] * 150)[0].failures
    log = (tmp_path / LOG).read_text()
    assert "me:secret" not in log
    assert "abc" not in log
    assert failures == ("f: raised ValueError: https://***@host/a?***",)
    assert log.count("Traceback") == 100
    assert log.count("f: completion ") == 150


@pytest.mark.long
def test_processes_end_with_a_run_that_is_killed(write: Any, tmp_path: Path) -> None:
    """An idle one at once; one within a call at its limit, even if it never releases Python's lock."""
    source = "import ctypes\ndef f(completion): return completion == '' or ctypes.PyDLL(None).sleep(1000)\n"
    program = (
        "import os, signal, threading, time, psutil\n"
        "from completions import completion, reward\n"
        "from finetune.rl.rewards.scoring import Rewards\n"
        "def end():\n"
        "    while len(children := psutil.Process().children()) < 2: time.sleep(0.05)\n"
        "    time.sleep(1)\n"
        "    print(*[child.pid for child in children], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"settings = reward(file={str(write(source))!r}, function='f', processes=2, seconds=3.0)\n"
        "rewards = Rewards((settings,), None).__enter__()\n"
        "threading.Thread(target=end).start()\n"
        "rewards.score([completion('hang'), completion('')])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    deadline = time.monotonic() + 120
    while not all(is_gone(process) for process in left) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(is_gone(process) for process in left)
