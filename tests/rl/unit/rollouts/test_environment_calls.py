"""Calls of the user's environment: every way to fail is told, other episodes go on, no process stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from repository import ROOT

from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.recipe.schema import EnvironmentSettings
from finetune.rl.rewards.completion import Outcome
from finetune.rl.rollouts.environment import EnvironmentCall, Environments

FILE = """
import json, math, os, random, sys, time
from beside import helper


def forge(reply):
    frame = sys._getframe()
    while "task" not in frame.f_locals:
        frame = frame.f_back
    content = json.dumps({**reply, "id": frame.f_locals["task"]["id"]}).encode()
    for fd in range(3, 256):
        try:
            os.write(fd, len(content).to_bytes(8, "big") + content)
        except OSError:
            pass
    time.sleep(1000)


class Tools:
    def reset(self, row, messages, reference, tools, seed):
        self.said = [row["name"], random.random(), seed]
        return helper(messages), tools

    def step(self, text, calls):
        self.said.append(random.random())
        return {
            "raise": lambda: {}["missing"],
            "hang": lambda: time.sleep(1000),
            "exit": lambda: os._exit(3),
            "sys.exit": sys.exit,
            "print": lambda: [print("x" * 10**6), "printed"][1],
            "number": lambda: 3,
            "object": lambda: [{"role": "user", "content": object()}],
            "large": lambda: "x" * 10**6,
            "nothing": lambda: [],
            "mixed": lambda: ["a", 1],
            "over": lambda: None,
            "message": lambda: {"role": "user", "content": "more"},
            "many": lambda: ["a", "b"],
            "said": lambda: repr(self.said),
            "forge nothing": lambda: forge({}),
            "forge text": lambda: forge({"messages": "all"}),
            "forge kind": lambda: forge({"kind": {"a": 1}, "what": "x"}),
        }[text]()

    def reward(self):
        return len(self.said)


class Forges(Tools):
    def reset(self, row):
        return forge({"messages": None}) if row["name"] == "row 1" else None

    def reward(self):
        return forge({"value": math.nan} if self.said == "nan" else {})

    def step(self, text):
        self.said = text


class Late(Tools):
    def reset(self):
        return 5


def make():
    return Tools()


class NoStep:
    def reset(self):
        pass


class NoReward(NoStep):
    def step(self, text):
        pass


class Asynchronous(NoStep):
    async def step(self, text):
        pass


class Asks(NoStep):
    def step(self, answer):
        pass


class Needs(NoReward):
    def __init__(self, path):
        pass


number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("def helper(messages):\n    return messages\n")
    (tmp_path / "env.py").write_text(FILE)
    return tmp_path / "env.py"


def environment(file: Path, name: str = "Tools", is_rewarded: bool = True, **keys: Any) -> Environments:
    return Environments(EnvironmentSettings(file=str(file), name=name, **keys), is_rewarded, None)


def request(episode: int, *texts: str, ends: bool = False, calls: tuple[str, ...] = ()) -> EnvironmentCall:
    begin = {"row": {"name": f"row {episode}"}, "messages": [{"role": "user", "content": "Hi"}], "tools": []}
    called = [{"name": name, "arguments": {}} for name in calls]
    turns = [{"text": text, "calls": called} for text in texts]
    seeds = [f"{episode}", *(f"{episode}:{i}" for i in range(len(texts)))]
    return EnvironmentCall(episode, {**begin, "reference": None, "seed": 9}, seeds, turns, ends)


def test_replies_of_calls(file: Path) -> None:
    user, tool = {"role": "user"}, {"role": "tool", "name": "add"}
    with environment(file) as tried:
        for reply in tried.replies([request(0), request(1)]):
            assert (reply["messages"], reply["tools"]) == ([{**user, "content": "Hi"}], [])
        replies = tried.replies([request(0, "print"), request(1, "over")])
        assert [reply["messages"] for reply in replies] == [[{**user, "content": "printed"}], None]
        (answered,) = tried.replies([request(0, "print", "many", calls=("add", "add"))])
        assert answered["messages"] == [{**tool, "content": "a"}, {**tool, "content": "b"}]
        (given,) = tried.replies([request(2, "message")])
        assert given["messages"] == [{**user, "content": "more"}]
        (end,) = tried.replies([request(0, "print", "many", ends=True)])
        assert end["value"] == 5.0
        assert tried._children[0] is not None
        process = psutil.Process(tried._children[0]._process.pid)
    assert not process.is_running()


def test_the_calculator_of_the_guide_adds_and_rewards(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "rewards-and-rollouts.md").read_text(encoding="utf-8")
    code = guide.partition("```python\n# sums.py\n")[2].partition("```")[0]
    (tmp_path / "sums.py").write_text(code)
    begin = {"row": {}, "messages": [{"role": "user", "content": "1 + 2?"}], "reference": "3.0", "tools": [], "seed": 0}
    asked = {"text": "", "calls": [{"name": "add", "arguments": {"sum": "1+2"}}]}
    turns = [asked, {"text": "It is 3.0.", "calls": []}]
    calls = [EnvironmentCall(0, begin, ["0", "1", "2"], turns[:n]) for n in range(3)]
    with environment(tmp_path / "sums.py", "Calculator") as tried:
        (begun,), (added,), (over,) = (tried.replies([call]) for call in calls)
        (end,) = tried.replies([replace(calls[-1], ends=True)])
    assert begun["tools"][0]["name"] == "add"
    assert added["messages"] == [{"role": "tool", "name": "add", "content": "3.0"}]
    assert (over["messages"], end["value"]) == (None, 1.0)


FAILURES = {
    "raise": ("raised", "raised KeyError: 'missing'"),
    "hang": ("timeout", "gave no answer in 2 s"),
    "exit": ("died", "ended its process (status 3)"),
    "sys.exit": ("raised", "raised SystemExit"),
    "number": ("invalid", "step returned int (3); expected a text, messages, or None at the end"),
    "object": ("invalid", "returned what JSON cannot hold: TypeError: Object of type object is not JSON serializable"),
    "large": ("invalid", "returned more than 524,288 bytes"),
    "nothing": ("invalid", "step returned list ([]); expected a text, messages, or None at the end"),
    "mixed": ("invalid", "step returned list (['a', 1]); expected a text, messages, or None at the end"),
    "other": ("raised", "raised KeyError: 'other'"),
}


def test_failures_are_told_and_other_episodes_of_the_process_go_on(file: Path) -> None:
    """A process that is replaced repeats the calls of its other episodes, with the same random numbers."""
    with environment(file, seconds=1.0, processes=1) as tried:
        tried.replies([request(100)])
        (said,) = tried.replies([request(100, "said")])
        for i, (text, (kind, what)) in enumerate(FAILURES.items()):
            (reply,) = tried.replies([request(i, text)])
            assert isinstance(reply, Outcome)
            assert (reply.value, reply.kind, reply.what) == (None, kind, what)
        (again,) = tried.replies([request(100, "said", "said")])
        first = said["messages"][0]["content"].removesuffix("]")
        assert again["messages"][0]["content"].startswith(first)
        assert first.startswith("['row 100', 0.")
        (much,) = tried.replies([request(1, "many", calls=("add",))])
        assert isinstance(much, Outcome)
        assert much.what == "step returned 2 texts for 1 tool calls; give one for each"


def test_a_forged_reply_is_a_failure_and_its_process_is_replaced(file: Path) -> None:
    forged = Outcome(None, "died", "wrote to the pipe of replies, which is not its own")
    with environment(file, processes=1, seconds=10) as calls:
        texts = ("forge nothing", "forge text", "forge kind", "message")
        *replies, last = calls.replies([request(i, text) for i, text in enumerate(texts)])
    assert replies == [forged] * 3
    assert last["messages"] == [{"role": "user", "content": "more"}]
    with environment(file, "Forges", processes=1, seconds=10) as calls:
        asked = [request(0), request(1), request(2, "nan", ends=True), request(3, "none", ends=True)]
        first, *replies = calls.replies(asked)
    assert first["messages"] is None
    assert replies == [forged] * 3


def test_replies_do_not_depend_on_processes(file: Path) -> None:
    requests = [request(i, "said") for i in range(5)]
    answered = []
    for processes in (1, 3):
        with environment(file, processes=processes) as tried:
            answered.append([reply["messages"] for reply in tried.replies(requests)])
    assert answered[0] == answered[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Tool", "env.py has no class `Tool`; it has Tools, Forges, Late, NoStep, NoReward, Asynchronous, Asks, Needs"),
        ("number", "`number` is int, not a class"),
        ("NoStep", "`NoStep` has no method `step`"),
        ("NoReward", r"`NoReward` has no method `reward`, which `rewards: \[{name: environment}\]` asks for"),
        ("Asynchronous", "`Asynchronous.step` is an `async def`, and nothing awaits it"),
        ("Asks", "`step` asks for `answer`, which is not given. Fix: ask only for text, calls$"),
        ("Needs", r"`Needs\(\)` raised TypeError: .*\. It is called without arguments"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_at_the_start(file: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=f"rollouts.environment: .*{message}"), environment(file, name):
        pass


def test_functions_and_other_files(file: Path, tmp_path: Path) -> None:
    with environment(file, "make") as tried:
        assert tried.replies([request(0)])[0]["tools"] == []
    with environment(file, "Late") as tried:
        (reply,) = tried.replies([request(0)])
        assert isinstance(reply, Outcome)
        assert reply.what.startswith("reset returned int (5); expected a list of messages, (messages, tools), or None")
    with (
        pytest.raises(UserError, match=r"no such file: .*absent.py\. Relative paths start at"),
        environment(tmp_path / "absent.py"),
    ):
        pass
    file.write_text("import os\n\nclass Tools\n")
    with pytest.raises(UserError, match=r"env.py:3: .*SyntaxError"), environment(file):
        pass
    file.write_text("import os\nos._exit(4)\n")
    with pytest.raises(UserError, match=r"ended its process \(status 4\) while it was loaded"), environment(file):
        pass


@pytest.fixture
def online(recipe: dict[str, Any], write_recipe: Callable[..., Path]) -> Path:
    recipe["data"] |= {"packing": False}
    rollouts = {"prompts": 2, "samples": 4, "max_new_tokens": 8, "environment": "env.py"}
    rewards, batch = [{"name": "environment"}], {"rows": 8, "rows_per_device": 2}
    return write_recipe(
        recipe | {"objective": {"name": "grpo"}, "rollouts": rollouts, "rewards": rewards, "batch": batch}
    )


def test_a_path_is_short_for_an_environment(online: Path) -> None:
    rollouts = load_recipe(online).rollouts
    assert rollouts is not None
    assert rollouts.environment == EnvironmentSettings(file="env.py")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollouts.environment=null"], "rewards[0]: `environment` is what `rollouts.environment` returns: add that"),
        (["rollouts.environment={name: Tools}"], "rollouts.environment.file: is missing"),
        (["rollouts.environment={file: env.py, name: a-b}"], "rollouts.environment.name"),
        (["rollouts.environment={file: env.py, max_turns: 0}"], "rollouts.environment.max_turns"),
        (["rollouts.environment={file: env.py, seconds: 0}"], "rollouts.environment.seconds"),
        (["rollouts.environment={file: env.py, on_failure: 0}"], "rollouts.environment.on_failure"),
        (["rollouts.environment={file: env.py, turns: 3}"], "rollouts.environment.turns"),
        (["rollouts.environment=3"], "rollouts.environment: expected"),
        (
            ["rollouts.engine=vllm", "rollouts.url=http://gpu:8000"],
            "rollouts.environment: `engine: vllm` samples one turn of each prompt: use `engine: own`",
        ),
        (
            ["rollouts.replay=runs/other/rollouts", "rewards=[]"],
            "rollouts.environment: has no effect under `rollouts.replay`, which samples nothing",
        ),
        (
            ["rewards=[{name: environment, seconds: 3}]"],
            "rewards[0].seconds: has no effect on `environment`, which is called as `rollouts.environment` says",
        ),
        (["rewards=[{name: environment, pattern: x}]"], "rewards[0].pattern: has no effect on `environment`"),
    ],
)
def test_a_recipe_with_a_mistake_is_refused(overrides: list[str], message: str, online: Path) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(online, overrides)
    assert message in str(error.value)
