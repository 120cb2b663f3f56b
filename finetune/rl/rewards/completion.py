"""A sampled answer with all that a reward may look at, and its reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Completion:
    """A sampled answer, and its row."""

    prompt: str  # rendered prompt, as text
    messages: tuple[dict, ...]  # of the prompt, without the reference answer
    text: str  # the sampled answer, without special tokens
    reference: str | None  # text of the row's last assistant turn, if there is one
    columns: Mapping[str, Any]  # the row's other columns, by name
    num_tokens: int  # sampled, in all turns
    is_truncated: bool  # stopped by max_new_tokens
    place: str = ""  # in messages: "rows.jsonl:3, sample 2"; "" is the number in the list
    outcome: Outcome | None = None  # the reward of `rollouts.environment`, which answered the turns before this one


@dataclass(frozen=True)
class Reward:
    """The weighted sum of all rewards of a completion, and its parts."""

    total: float  # weighted sum, with `on_failure` for a function that failed
    by_name: Mapping[str, float | None]  # unweighted, None if that function failed
    failures: tuple[str, ...]  # "name: what happened", empty if all answered


@dataclass(frozen=True)
class Outcome:
    """The value of one reward for one completion, or the reason why there is none."""

    value: float | None
    kind: str = ""  # of the failure, for counts: raised, timeout, died, not_a_number, unanswerable, refused
    what: str = ""  # one line
    details: str = field(default="", repr=False)  # traceback and output, for the log
