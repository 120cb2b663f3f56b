"""Processes that run the user's environment: started fresh, killed at the time limit, replaced, replies in order.

    requests of a turn -> pickled frames -> `environment_child.py` -> messages, or the end, or a failure

Episode i is in process i modulo `processes`. One that hangs or ends takes the others of its process with it: the
process that replaces it repeats their calls, so an environment has to follow from row, seed and turns alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import UserError, without_secrets
from finetune.recipe.schema import EnvironmentSettings
from finetune.rl.rewards.completion import Outcome
from finetune.rl.rewards.pool import FORGED, WHAT_CHARACTERS, Child, NoReply
from finetune.rl.rewards.scoring import append_to_log

LOG = "environment-failures.log"  # in the run's folder
_MODULE = "finetune.rl.rollouts.environment_child"
_LOGGED = 100  # failures with traceback and output; of others one line
_KINDS = ("invalid", "raised", "not_a_number")  # of failures that `environment_child.py` replies with


@dataclass(frozen=True)
class EnvironmentCall:
    """The next call of an episode, with all that has happened in it."""

    episode: int  # within a batch of episodes
    begin: Mapping[str, Any]  # arguments of `reset`
    seeds: Sequence[str]  # of `random`, for `reset` and each turn
    turns: Sequence[Mapping[str, Any]] = ()  # text and calls, one for each call of `step`
    ends: bool = False  # the episode is over: a request for its reward


def _is_list_of_dicts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


class Environments:
    """Episodes of a recipe's environment. A context manager, which starts and ends processes."""

    def __init__(self, settings: EnvironmentSettings, is_rewarded: bool, folder: Path | None):
        """is_rewarded: whether a reward of the recipe is the environment's; folder: of the run, for the log."""
        self._settings, self._is_rewarded, self._folder = settings, is_rewarded, folder
        self._children: list[Child | None] = [None] * settings.processes
        self._held: list[set[int]] = [set() for _ in self._children]  # episodes that a process has seen
        self._logged = 0

    def __enter__(self) -> Environments:
        """Raises UserError for a file or class that cannot be used."""
        path = Path(self._settings.file).expanduser()
        try:
            source = path.read_bytes()
        except FileNotFoundError:
            place = f"{path}. Relative paths start at {Path.cwd()}"
            raise UserError(f"rollouts.environment: no such file: {place}. Fix: correct the path") from None
        except OSError as error:
            problem = f"{path} cannot be read: {error.strerror}"
            raise UserError(f"rollouts.environment: {problem}. Fix: check its permissions") from None
        self._child = {"place": "rollouts.environment", "file": str(path), "source": source}
        self._child |= {"name": self._settings.name, "is_rewarded": self._is_rewarded}
        self._children[0] = Child(self._child, _MODULE)
        return self

    def __exit__(self, *_: object) -> None:
        for child in filter(None, self._children):
            child.end()

    def replies(self, requests: Sequence[EnvironmentCall]) -> list[dict[str, Any] | Outcome]:
        """Returns the replies in order, see `environment_child.answer`; an outcome without a value if a call failed.
        Raises UserError if a process that replaces another cannot load the file."""
        slots = len(self._children)
        replies: dict[int, dict[str, Any] | Outcome] = {}

        def work(slot: int) -> None:
            for i, request in enumerate(requests):
                if request.episode % slots == slot:
                    replies[i] = self._reply(slot, request)

        with ThreadPoolExecutor(slots, "environment") as threads:
            try:
                for done in [threads.submit(work, slot) for slot in range(slots)]:
                    done.result()
            except BaseException:
                for child in filter(None, self._children):
                    child.kill()
                raise
        return [replies[i] for i in range(len(requests))]

    def _reply(self, slot: int, request: EnvironmentCall) -> dict[str, Any] | Outcome:
        child, held = self._children[slot], self._held[slot]
        if child is None:
            child = self._children[slot] = Child(self._child, _MODULE)
            held.clear()
        # A process that has not seen the episode repeats its calls.
        calls = 1 if request.episode in held else 1 + len(request.turns)
        seconds = self._settings.seconds * calls
        task = {**vars(request), "seconds": seconds, "is_rewarded": self._is_rewarded}
        held.discard(request.episode)
        try:
            reply = child.ask(task, seconds)
        except NoReply as failure:
            self._children[slot] = None
            kind, what = failure.args
            return Outcome(None, kind, what, child.output.decode("utf-8", "replace"))
        if (is_failure := reply.get("kind") in _KINDS) or not self._is_expected(request, reply):
            printed = child.output.decode("utf-8", "replace")
            details = "\n".join(filter(None, (str(reply.get("details", "")), printed)))
            if is_failure:
                what = " ".join(str(reply.get("what")).split())[:WHAT_CHARACTERS]
                return Outcome(None, reply["kind"], without_secrets(what), details)
            child.end()  # the environment has written the reply, in place of its process
            self._children[slot] = None
            return Outcome(None, "died", FORGED, details)
        if not request.ends:
            held.add(request.episode)
        return reply

    def _is_expected(self, request: EnvironmentCall, reply: Mapping[str, Any]) -> bool:
        """Whether a reply has what `environment_child.answer` sends for such a request."""
        if request.ends:
            value = reply.get("value")
            return not self._is_rewarded or (isinstance(value, float) and math.isfinite(value))
        lists = [reply.get("messages"), reply.get("tools")]
        are_messages = all(one is None or _is_list_of_dicts(one) for one in lists)
        return are_messages and "messages" in reply and (bool(request.turns) or "tools" in reply)

    def tell(self, place: str, failure: Outcome) -> None:
        """Writes a failure to the log of the run."""
        if self._folder is None:
            return
        self._logged += 1
        details = failure.details.splitlines() if self._logged <= _LOGGED else []
        entry = "\n".join([f"{place}: {failure.what}", *(f"    {line}" for line in details)])
        append_to_log(self._folder / LOG, without_secrets(entry + "\n"))
