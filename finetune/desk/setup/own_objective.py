"""`new --objective own`: a loss of the user's, or a file with one to begin with, tried before the recipe is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import UserError
from finetune.objectives.own import load_own
from finetune.recipe.objective_settings import Own
from finetune.utils import write_atomically

STARTER = "my_loss.py:my_loss"
_TEXT = '''"""A loss of your own, for `objective: {{file: {file}, function: {function}}}`: edit it, `check` tries it.

What it may ask for and what it returns: docs/reference/objectives.md#your-own-objective
"""


def {function}(token_losses):
    """The loss of `sft`, to begin with: the mean of -log p over the trained tokens.

    token_losses: -log p of each of them, (S,). Further arguments by their names: token_ids, sequence, num_targets,
    num_tokens. Returns a sum, not a mean, and what to divide it by: target_tokens, tokens or sequences.
    """
    return token_losses.sum(), "target_tokens"
'''


@dataclass(frozen=True)
class OwnObjective:
    """A function in a file, as a recipe names both."""

    file: str
    function: str
    is_new: bool = False  # the file was written for it


def objective_name(text: str | None) -> str | None:
    """Returns the name of the objective that `--objective` asks for.

    >>> objective_name("losses.py:short"), objective_name("dpo")
    ('own', 'dpo')
    """
    return "own" if text is not None and _parts(text) else text


def own_objective(text: str, overrides: Sequence[str], ask: Callable[[str, str], str] | None) -> OwnObjective | None:
    """Returns the function of `--objective FILE.py:FUNCTION`; for `own` that of an answer, whose file is written if it
    is missing; None if overrides name it. Raises UserError, also for a function that fails its trial."""
    given = _parts(text)
    if given is None:
        if any(one.partition("=")[0].strip() in ("objective", "objective.file") for one in overrides):
            return None
        question = "Your loss (FILE.py:FUNCTION; a file that is missing is written, with that of sft)"
        answer = ask(question, STARTER) if ask else STARTER
        if (given := _parts(answer)) is None:
            raise UserError(f"--objective {answer}: not of the form FILE.py:FUNCTION. Fix: write it like {STARTER}")
    elif not Path(given[0]).expanduser().exists():
        raise UserError(
            f"--objective {text}: no such file. Fix: correct the path, or give --objective own, which writes {STARTER}"
        )
    own, path = OwnObjective(*given), Path(given[0]).expanduser()
    if path.exists():
        load_own(Own(file=own.file, function=own.function))
        return own
    return OwnObjective(*given, is_new=True)


def write_starter(own: OwnObjective) -> None:
    """Writes the file of a function, with the loss of `sft`."""
    path = Path(own.file).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _TEXT.format(file=own.file, function=own.function))
    load_own(Own(file=own.file, function=own.function))


def _parts(text: str) -> tuple[str, str] | None:
    """Returns file and function of `FILE.py:FUNCTION`."""
    file, colon, function = text.strip().rpartition(":")
    return (file, function) if colon and file.endswith(".py") and function.isidentifier() else None
