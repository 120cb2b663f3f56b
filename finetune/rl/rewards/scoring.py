"""The rewards of a recipe: computes each for every completion, in order; counts failures and writes them to the log."""

from __future__ import annotations

import ast
import inspect
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from finetune.errors import RunFailure, UserError, without_secrets
from finetune.recipe.reward_settings import (
    EnvironmentReward,
    FileReward,
    JudgeReward,
    LengthReward,
    ModelReward,
    RewardSettings,
    TestsReward,
)
from finetune.rl.rewards.builtin import REWARDS
from finetune.rl.rewards.completion import Completion, Outcome, Reward
from finetune.rl.rewards.judge import Judge
from finetune.rl.rewards.pool import Pool

LOG = "reward-failures.log"
_LOGGED = 100  # failures of a reward with traceback and output; of the others one line
_PROGRAM_S = 30.0  # beyond the limit of `tests`, for the start of the program's process


class Scoring(Protocol):
    """One reward, started. Outcomes are in the order of completions; None after a failure that stops the run."""

    def outcomes(self, completions: Sequence[Completion]) -> Sequence[Outcome | None]: ...


class EnvironmentRewards:
    """`environment`: what the environment returned at the end of the sample, see `rollouts/episodes.py`."""

    def outcomes(self, completions: Sequence[Completion]) -> list[Outcome]:
        without = Outcome(None, "unanswerable", "the completion is not of an environment")
        return [completion.outcome or without for completion in completions]


class Rewards:
    """Scores completions. A context manager, which starts and ends processes.

    folder: of the run, for the log of failures (0600); None: no log. Values do not depend on `processes`.
    """

    def __init__(self, settings: tuple[RewardSettings, ...], folder: Path | None):
        self._settings, self._folder = settings, folder
        self._stack, self._started = ExitStack(), list[Scoring]()
        self.notes: list[str] = []  # for the user, such as limits that this system does not offer
        self.counts: Counter[tuple[str, str]] = Counter()  # failures by name and kind, see `Outcome`

    def __enter__(self) -> Rewards:
        """Raises UserError for a function, file or folder that cannot be used."""
        with ExitStack() as stack:
            for i, settings in enumerate(self._settings):
                self._started.append(_start(settings, f"rewards[{i}] ({settings.label})", stack, self.notes))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def score(self, completions: Sequence[Completion]) -> list[Reward]:
        """Returns the rewards, in order. Raises UserError for the first failure of a reward without `on_failure`."""
        columns: list[list[Outcome]] = []
        for i, settings in enumerate(self._settings):
            outcomes = self._started[i].outcomes(completions)
            self._tell(settings, completions, outcomes)
            for j, outcome in enumerate(outcomes):
                if outcome is None or (outcome.value is None and settings.on_failure is None):
                    raise UserError(self._stopped(i, completions, outcomes, j))
            columns.append([outcome for outcome in outcomes if outcome is not None])
        rewards = []
        for j in range(len(completions)):
            total, by_name, failures = 0.0, dict[str, float | None](), list[str]()
            for settings, column in zip(self._settings, columns, strict=True):
                value = by_name[settings.label] = column[j].value
                if value is None:
                    failures.append(f"{settings.label}: {column[j].what}")
                    value = settings.on_failure or 0.0  # given, see above
                total += settings.weight * value
            rewards.append(Reward(total, by_name, tuple(failures)))
        return rewards

    def _stopped(self, i: int, completions: Sequence[Completion], outcomes: Sequence[Outcome | None], j: int) -> str:
        """Returns the message for a failure that stops the run."""
        outcome = outcomes[j]
        assert outcome is not None  # those before the first failure are all answered
        log = f". Traceback and output are in {self._folder / LOG}" if self._folder and outcome.details else ""
        return (
            f"rewards[{i}] ({self._settings[i].label}): {_place(completions, j)}: {outcome.what}{log}. Fix: correct "
            "the reward or the row, or set `on_failure` to the value that such a completion gets"
        )

    def _tell(
        self, settings: RewardSettings, completions: Sequence[Completion], outcomes: Sequence[Outcome | None]
    ) -> None:
        """Counts the failures and writes them to the log."""
        entries = []
        for j, outcome in enumerate(outcomes):
            if outcome is None or outcome.value is not None:
                continue
            self.counts[settings.label, outcome.kind] += 1
            entry = f"{settings.label}: {_place(completions, j)}: {outcome.what}\n"
            if outcome.details and sum(n for (name, _), n in self.counts.items() if name == settings.label) <= _LOGGED:
                entry += "".join(f"    {line}\n" for line in outcome.details.splitlines())
            entries.append(entry)
        if entries and self._folder is not None:
            append_to_log(self._folder / LOG, without_secrets("".join(entries)))


def _place(completions: Sequence[Completion], j: int) -> str:
    return completions[j].place or f"completion {j + 1} of {len(completions)}"


def append_to_log(path: Path, text: str) -> None:
    """Appends to a file that only its owner can read, and never to the target of a link. Raises RunFailure."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    try:
        with open(os.open(path, flags, 0o600), "a", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as error:
        raise RunFailure(
            f"{path} could not be written: {error.strerror}. Fix: free space, or make it a file that can be written, "
            "and run the same command again"
        ) from None


def _start(settings: RewardSettings, place: str, stack: ExitStack, notes: list[str]) -> Scoring:
    """Returns a reward, started; `stack` ends its processes. Adds to `notes`. Raises UserError."""
    if isinstance(settings, JudgeReward):
        return Judge(settings, place)
    if isinstance(settings, EnvironmentReward):
        return EnvironmentRewards()
    if isinstance(settings, ModelReward):
        from finetune.rl.rewards.scorer import ScoringModel  # torch and transformers

        return ScoringModel(settings, place)
    seconds = settings.seconds + (_PROGRAM_S if isinstance(settings, TestsReward) else 0.0)
    child: dict[str, Any] = {"place": place, "name": None, "file": None, "seconds": seconds}
    if isinstance(settings, FileReward):
        child |= _source(settings, place)
    else:
        values = {key: getattr(settings, key) for key in settings.parameters()}
        if isinstance(settings, LengthReward):
            values["margin"] = settings.margin or settings.target
        if isinstance(settings, TestsReward):
            values["seconds"] = settings.seconds
        child |= {"name": settings.name, "parameters": values}
    pool = stack.enter_context(Pool(child, settings.processes, seconds, settings.on_failure is None))
    notes += [f"{place}: {note}" for note in pool.notes]
    return pool


def reads_reference(settings: RewardSettings) -> bool:
    """Returns whether a reward has no value for a completion without a reference: its function has a parameter of that
    name without a default, or the judge's own prompt a place for it. An own function is read, not run."""
    if isinstance(settings, JudgeReward):
        return "{reference}" in (settings.prompt or "")
    if isinstance(settings, FileReward):
        try:
            tree = ast.parse(_source(settings, "rewards")["source"])
        except (SyntaxError, ValueError, UserError):  # the start of the reward says so
            return False
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == settings.function:
                arguments = node.args
                positional = [*arguments.posonlyargs, *arguments.args]
                required = positional[: len(positional) - len(arguments.defaults)]
                pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                required += [argument for argument, default in pairs if default is None]
                return any(argument.arg == "reference" for argument in required)
        return False
    if isinstance(settings, ModelReward | EnvironmentReward):
        return False
    return "reference" in inspect.signature(REWARDS[settings.name].function).parameters


def _source(settings: FileReward, place: str) -> dict[str, Any]:
    """Returns the user's file as it is now, whatever is edited during the run. Raises UserError."""
    path = Path(settings.file).expanduser()
    try:
        return {"file": str(path), "source": path.read_bytes(), "function": settings.function}
    except FileNotFoundError:
        raise UserError(
            f"{place}: no such file: {path}. Relative paths start at {Path.cwd()}. Fix: correct the path"
        ) from None
    except OSError as error:
        raise UserError(f"{place}: {path} cannot be read: {error.strerror}. Fix: check its permissions") from None
