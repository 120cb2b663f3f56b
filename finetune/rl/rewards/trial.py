"""A trial of rewards before a run: whether they tell the reference answers of some rows from garbage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from finetune.recipe.reward_settings import JsonSchemaReward, LengthReward, RegexReward, RewardSettings
from finetune.rl.rewards.completion import Completion, Reward
from finetune.rl.rewards.scoring import Rewards

TRIED_ROWS, JUDGED_ROWS = 16, 4  # judges cost money
_FORM = (RegexReward, JsonSchemaReward, LengthReward)  # look at the form alone: garbage of the right form gets the same


@dataclass(frozen=True)
class RewardTrial:
    """Means by kind of answer (`reference`, `empty`, `another row's`, `reversed`) and reward; None if all failed.

    problems: the rewards cannot train anything, or a run would stop; notes: worth a look.
    """

    rows: int
    means: Mapping[str, Mapping[str, float | None]]  # with `total`
    failures: Mapping[str, int]  # by reward
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def table(self) -> str:
        """Returns the means as lines of text, in columns."""
        names = [*self.failures, "total"]
        rows = [
            ("", *names),
            *((kind, *(_shown(of_kind[name]) for name in names)) for kind, of_kind in self.means.items()),
        ]
        if any(self.failures.values()):
            rows.append(("failures", *(str(self.failures[name]) for name in names[:-1]), ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        aligned = [
            [row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))]
            for row in rows
        ]
        return "\n".join("  ".join(row).rstrip() for row in aligned)


def _shown(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.3f}"


def try_rewards(settings: tuple[RewardSettings, ...], rows: Sequence[Completion]) -> RewardTrial:
    """Computes the rewards of the reference answers of `rows`, and of garbage in their place.

    rows: completions whose text is the row's reference, such as 16. Rows without a reference, and garbage that equals
    the reference, are left out. Raises UserError for rewards that cannot start.
    """
    tried = [row for row in rows if row.reference is not None]
    answers = {kind: [garbage(tried, i) for i in range(len(tried))] for kind, garbage in _ANSWERS.items()}
    tolerant = tuple(one.model_copy(update={"on_failure": one.on_failure or 0.0}) for one in settings)
    with Rewards(tolerant, None) as rewards:
        flat = [one for column in answers.values() for one in column if one is not None]
        scored = iter(rewards.score(flat))
        notes = list(rewards.notes)
    by_kind = {kind: [None if one is None else next(scored) for one in column] for kind, column in answers.items()}
    means: dict[str, dict[str, float | None]] = {}
    for kind, column in by_kind.items():
        if given := [reward for reward in column if reward is not None]:
            values = {one.label: [reward.by_name[one.label] for reward in given] for one in settings}
            answered = {name: [value for value in all_of if value is not None] for name, all_of in values.items()}
            answered["total"] = [reward.total for reward in given]
            means[kind] = {name: sum(some) / len(some) if some else None for name, some in answered.items()}
    every = [one for column in by_kind.values() for one in column if one is not None]
    failures = {one.label: sum(reward.by_name[one.label] is None for reward in every) for one in settings}
    if not tried:
        notes.append("no row that was tried has a reference answer, so the rewards were only loaded")
    stopping = _failing(settings, answers, by_kind)
    for one in settings:
        told = [text for reward in every for text in reward.failures if text.startswith(f"{one.label}: ")]
        if told and one.on_failure is not None:
            first = told[0].removeprefix(f"{one.label}: ")
            notes.append(
                f"rewards: `{one.label}` failed for {len(told)} of {len(every)} answers that were tried ({first})"
            )
    weak, weak_notes = _weak(settings, by_kind, means) if tried and not stopping else ([], [])
    return RewardTrial(len(tried), means, failures, (*stopping, *weak), (*notes, *weak_notes))


def _of_another_row(rows: Sequence[Completion], i: int) -> Completion | None:
    """The reference of the next row that has another one."""
    following = (rows[(i + step) % len(rows)] for step in range(1, len(rows)))
    other = next((row for row in following if row.reference != rows[i].reference), None)
    return other and _unless_equal(rows[i], other.reference or "", other.num_tokens)


def _unless_equal(row: Completion, text: str, num_tokens: int) -> Completion | None:
    same = text.strip() == (row.reference or "").strip()
    return None if same else replace(row, text=text, num_tokens=num_tokens, is_truncated=False)


_ANSWERS: dict[str, Callable[[Sequence[Completion], int], Completion | None]] = {
    "reference": lambda rows, i: replace(rows[i], text=rows[i].reference or ""),
    "empty": lambda rows, i: _unless_equal(rows[i], "", 0),
    "another row's": _of_another_row,
    "reversed": lambda rows, i: _unless_equal(rows[i], (rows[i].reference or "")[::-1], rows[i].num_tokens),
}


def _failing(
    settings: tuple[RewardSettings, ...],
    answers: Mapping[str, Sequence[Completion | None]],
    by_kind: Mapping[str, Sequence[Reward | None]],
) -> list[str]:
    """Returns the first failure of each reward that a run would stop at."""
    problems = []
    for i, one in enumerate(settings):
        failed = [
            (kind, j, failure)
            for kind, column in by_kind.items()
            for j, reward in enumerate(column)
            if reward is not None
            for failure in reward.failures
            if failure.startswith(f"{one.label}: ")
        ]
        if failed and one.on_failure is None:
            kind, j, failure = failed[0]
            place = (
                completion.place
                if (completion := answers[kind][j]) is not None and completion.place
                else f"row {j + 1}"
            )
            answer = "the reference answer" if kind == "reference" else f"garbage ({kind})"
            what = failure.removeprefix(f"{one.label}: ")
            problems.append(
                f"rewards[{i}] ({one.label}): {place}: {answer}: {what}. Such a completion stops the run: fix the "
                "reward or the rows, or set `on_failure`"
            )
    return problems


def _weak(
    settings: tuple[RewardSettings, ...],
    by_kind: Mapping[str, Sequence[Reward | None]],
    means: Mapping[str, Mapping[str, float | None]],
) -> tuple[list[str], list[str]]:
    """Returns problems and notes if the rewards do not prefer the references."""
    pairs = [
        (reference.total, garbage.total)
        for kind, column in by_kind.items()
        if kind != "reference"
        for reference, garbage in zip(by_kind["reference"], column, strict=True)
        if reference is not None and garbage is not None
    ]
    if not pairs:
        return [], []
    each = (f"{kind} {_shown(of_kind['total'])}" for kind, of_kind in means.items())
    totals = f"mean totals: {', '.join(each)}"
    won = sum(reference > garbage for reference, garbage in pairs)
    if won == 0:
        text = f"rewards: no reference answer gets more than garbage in its place ({totals})"
        if all(isinstance(one, _FORM) for one in settings):
            return [], [f"{text}; these rewards look at the form of an answer alone"]
        hint = "do references have the form that the rewards ask for? `python -m finetune inspect` shows them"
        return [f"{text}, so a run would learn nothing, or the opposite: {hint}"], []
    notes = []
    if won < 0.9 * len(pairs):
        notes.append(
            f"rewards: {won} of {len(pairs)} reference answers get more than garbage in their place ({totals})"
        )
    for one in settings:
        values = {reward.by_name[one.label] for column in by_kind.values() for reward in column if reward is not None}
        if len(values) == 1 and len(settings) > 1:
            notes.append(f"rewards: `{one.label}` gives {_shown(values.pop())} to every answer that was tried")
    return [], notes
