"""An objective of the user's: a function in a Python file that returns sums, each with its unit.

    def my_loss(token_losses, num_targets):
        per_answer = [part.mean() for part in token_losses.split(num_targets)]
        return torch.stack(per_answer).sum(), "sequences"

It is called for each micro-batch with full sequences, wherever their tokens are computed, so the loss of a step is the
same on every config if the function gives as much for two sequences together as for each alone. A trial before the
run, on made-up losses, refuses one that does not.

Letters: S targets, D sequences.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from finetune.data.batch import Batch
from finetune.errors import UserError
from finetune.models.wrapped import Outputs
from finetune.objectives.objective import Objective, Sums, Term, Terms, TokenRanks, means
from finetune.objectives.sft import mean_nll
from finetune.recipe.objective_settings import Own
from finetune.user_code import Unusable, accepted, defined, one_line, place_of, run_file

UNITS = ("target_tokens", "tokens", "sequences")
ALONE = "objective"  # the term of a function that returns one; of several, objective/NAME
# Relative to the sizes of what is compared. Sums in fp32 differ by 1e-7 a token; a mean in place of a sum by half.
TOLERANCE = 1e-4


class Documents(NamedTuple):
    """What a function may ask for, by these names."""

    token_losses: Tensor  # (S,) fp32, -log p of each target, with a graph
    token_ids: Tensor  # (S,) int64, the targets
    sequence: Tensor  # (S,) int64, index of the sequence that each is from
    num_targets: tuple[int, ...]  # (D,), of each sequence; they sum to S
    num_tokens: tuple[int, ...]  # (D,), of each sequence, with those that are not trained


class Returned(NamedTuple):
    """A term as a function returns it."""

    total: Tensor  # (), with a graph if it is part of the loss; without one it is a metric
    unit: str


@dataclass(frozen=True)
class OwnFunction:
    """A function of the user's that has passed its trial."""

    path: str
    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    units: Mapping[str, str]  # of its terms, by name
    in_loss: frozenset[str]  # names of terms that are part of the loss

    def __call__(self, documents: Documents) -> dict[str, Returned]:
        """Returns its terms. Raises UserError."""
        try:
            terms = _called(self.path, self.function, self.arguments, documents)
            units = {name: term.unit for name, term in terms.items()}
            if units != self.units:
                raise Unusable(
                    f"{self.path}: `{self.name}` returned {units}, and before {dict(self.units)}. Fix: return the same "
                    "terms for any batch"
                )
            if documents.token_losses.requires_grad and not all(
                terms[name].total.requires_grad for name in self.in_loss
            ):
                raise Unusable(
                    f"{self.path}: `{self.name}` returned a sum without a gradient. Fix: let it follow from "
                    "`token_losses` for any batch"
                )
        except Unusable as reason:
            raise UserError(f"objective: {reason}") from reason
        return terms


def own(settings: Own, evaluating: bool, token_ranks: TokenRanks) -> Objective:
    """Returns the objective of the user's function; evaluation measures the plain negative log-likelihood."""
    if evaluating:
        return mean_nll(token_ranks)
    function = load_own(settings)

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        losses, has_sequences = outputs.token_losses, bool(batch.sequence_tokens)
        if has_sequences:
            documents = _documents(losses, batch, token_ranks)
            totals = {name: token_ranks.share(term.total.to(losses)) for name, term in function(documents).items()}
        else:  # of a dummy: nothing, with a graph
            totals = dict.fromkeys(function.units, losses.sum())
        own_terms = {
            name: Term(totals[name], unit, 1.0) if name in function.in_loss else Term(totals[name].detach(), unit)
            for name, unit in function.units.items()
        }
        return {**own_terms, "nll": Term(losses.detach().sum(), "target_tokens")}

    def metrics(sums: Sums) -> dict[str, float]:
        parts = [name for name in function.in_loss if name != ALONE and sums.counts[function.units[name]]]
        return {name: sums.mean(name) for name in sorted(parts)} | means(sums)

    return Objective(terms, metrics, differentiable=True, scales_last=True)


def _documents(losses: Tensor, batch: Batch, token_ranks: TokenRanks) -> Documents:
    """Returns all targets of the batch's sequences, those of other ranks as well."""
    row = batch.row_targets
    if row is None:
        num_tokens = batch.sequence_lengths[: len(batch.sequence_tokens)]  # without padding
        # A copy, as the function may write to it.
        return Documents(losses.clone(), *batch.targets[1:], batch.sequence_targets, num_tokens)
    everywhere = token_ranks.sum(losses.new_zeros(len(row.ids)).index_copy(0, row.here, losses))
    return Documents(everywhere, row.ids, row.sequence, row.num_targets, row.num_tokens)


def load_own(settings: Own) -> OwnFunction:
    """Returns the function of a recipe, after a trial. Raises UserError."""
    assert settings.file is not None  # a rule of the recipe
    assert settings.function is not None
    path = Path(settings.file).expanduser()
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"objective.file: no such file: {path}. Relative paths start at {Path.cwd()}. Fix: correct the path"
        ) from None
    except OSError as error:
        raise UserError(
            f"objective.file: {path} cannot be read: {error.strerror}. Fix: check its permissions"
        ) from None
    try:
        function = defined(run_file(str(path), source, alone=False), settings.function, "function")
        if inspect.iscoroutinefunction(function):
            raise Unusable(f"{path}: `{settings.function}` is an `async def`. Fix: write it with `def`")
        return _tried(str(path), settings.function, function)
    except Unusable as reason:
        raise UserError(f"objective: {reason}") from reason


# --- the function's result


_TERM = '`return token_losses.sum(), "target_tokens"`'


def _called(
    path: str, function: Callable[..., Any], arguments: tuple[str, ...], documents: Documents
) -> dict[str, Returned]:
    """Returns a function's terms. Raises Unusable."""
    name = getattr(function, "__name__", "the function")
    try:
        returned = function(**{argument: getattr(documents, argument) for argument in arguments})
    except torch.OutOfMemoryError:
        raise  # of the device, not of the function
    except Exception as error:  # code of the user's, which may raise anything
        raise Unusable(f"{place_of(error, path)}: `{name}` raised {one_line(error)}. Fix: correct it") from error
    place = f"{path}: `{name}`"
    if not isinstance(returned, Mapping):
        return {ALONE: _term(place, returned)}
    if not returned:
        raise Unusable(f"{place} returned no term. Fix: return a sum and its unit, such as {_TERM}")
    for key in returned:
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", key):
            raise Unusable(f"{place} has a term of the name {key!r}. Fix: use letters, digits and `_`")
    return {f"{ALONE}/{key}": _term(place, value) for key, value in returned.items()}


def _term(place: str, value: Any) -> Returned:
    """Returns a term of the result. Raises Unusable."""
    if isinstance(value, Tensor):
        raise Unusable(f"{place} returned a tensor without its unit. Fix: add the unit of the sum, such as {_TERM}")
    if not isinstance(value, tuple | list) or len(value) != 2 or not isinstance(value[0], Tensor):
        hint = "; is a `return` missing?" if value is None else ""
        types = [type(one).__name__ for one in value] if isinstance(value, tuple | list) else []
        shown = f"({', '.join(types)})" if types else "None" if value is None else f"a {type(value).__name__}"
        raise Unusable(f"{place} returned {shown}, not a sum (a tensor) and its unit{hint}. Fix: such as {_TERM}")
    total, unit = value
    if unit not in UNITS:
        raise Unusable(f"{place} returned the unit {unit!r}. Fix: use one of {', '.join(UNITS)}")
    if total.shape != () or not total.is_floating_point():
        raise Unusable(
            f"{place} returned a tensor of shape {tuple(total.shape)} and {total.dtype}, not one number. Fix: add up "
            f"its values, such as {_TERM}"
        )
    return Returned(total, unit)


# --- the trial


def _tried(path: str, name: str, function: Callable[..., Any]) -> OwnFunction:
    """Returns a function that has passed its trial. Raises Unusable."""
    place = f"{path}: `{name}`"
    if "token_losses" not in (arguments := accepted(function, Documents._fields)):
        raise Unusable(f"{place} does not ask for `token_losses`. Fix: add this argument")
    whole = _trial_documents()
    terms, gradient = _measured(path, function, arguments, whole)
    again, _ = _measured(path, function, arguments, whole)
    for key, term in terms.items():
        if not bool(torch.isfinite(term.total)):
            raise Unusable(f"{place} returned {term.total.item()} for usual losses. Fix: return a finite sum")
        if key not in again or not torch.equal(term.total, again[key].total):
            fix = "Fix: let it draw nothing and keep nothing between calls"
            raise Unusable(f"{place} returned two values for the same batch. {fix}")
    if gradient is None:
        raise Unusable(f"{place} has no gradient. Fix: return a sum that follows from `token_losses`, not detached")
    parts = [_measured(path, function, arguments, one) for one in _each(whole)]
    units = {key: term.unit for key, term in terms.items()}
    if any({key: term.unit for key, term in part.items()} != units for part, _ in parts):
        raise Unusable(f"{place} returned other terms for another batch. Fix: return the same for any")
    for key, term in terms.items():
        _check_sum(place, term.total, torch.stack([part[key].total.detach() for part, _ in parts]))
    alone = torch.cat([one if one is not None else gradient[:0] for _, one in parts])
    if alone.shape != gradient.shape or not _is_close(gradient, alone, gradient):
        raise Unusable(
            f"{place} gave a token another gradient among other sequences. Fix: let each sequence's part of the sum "
            "follow from its own losses"
        )
    in_loss = frozenset(key for key, term in terms.items() if term.total.requires_grad)
    return OwnFunction(path, name, function, arguments, units, in_loss)


def _check_sum(place: str, together: Tensor, alone: Tensor) -> None:
    """Raises Unusable unless a total () is the sum of those of each sequence alone (D,)."""
    if not _is_close(together, alone.sum(), alone):
        raise Unusable(
            f"{place} gave {together.item():.6g} for {len(alone)} sequences, and {alone.sum().item():.6g} for each "
            "alone, added up. A step's loss would depend on how the step is divided. Fix: return a sum over tokens or "
            f"sequences, not a mean, and its unit, such as {_TERM}"
        )


def _is_close(one: Tensor, other: Tensor, sizes: Tensor) -> bool:
    return bool((one.detach() - other).abs().amax() <= TOLERANCE * sizes.abs().sum())  # False of NaN


def _trial_documents() -> Documents:
    """Returns sequences of different lengths, the last with as many targets as tokens but one."""
    num_targets, num_tokens = (3, 1, 6, 4), (7, 5, 9, 5)
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(sum(num_targets), generator=generator) * 3 + 0.05
    ids = torch.randint(0, 16, (len(losses),), generator=generator)
    return Documents(losses, ids, torch.arange(4).repeat_interleave(torch.tensor(num_targets)), num_targets, num_tokens)


def _each(documents: Documents) -> Iterator[Documents]:
    """Yields every sequence alone."""
    parts = [tensor.split(documents.num_targets) for tensor in documents[:3]]
    for i, (losses, ids, sequence) in enumerate(zip(*parts, strict=True)):
        yield Documents(losses, ids, sequence - i, documents.num_targets[i : i + 1], documents.num_tokens[i : i + 1])


def _measured(
    path: str, function: Callable[..., Any], arguments: tuple[str, ...], documents: Documents
) -> tuple[dict[str, Returned], Tensor | None]:
    """Returns the terms, and the gradient (S,) of the sum of those of the loss; None if it has none."""
    losses = documents.token_losses.clone().requires_grad_()
    with torch.enable_grad():
        terms = _called(path, function, arguments, documents._replace(token_losses=losses.clone()))
        weighted = [term.total for term in terms.values() if term.total.requires_grad]
        if not weighted:
            return terms, None
        (gradient,) = torch.autograd.grad(torch.stack(weighted).sum(), losses, allow_unused=True)
    return terms, gradient
