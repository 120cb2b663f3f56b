"""Modules other than attention that mix the tokens of a row, run once for each document of a packed row.

Gated delta nets, Mamba, short convolutions, lightning attention, token shift, attention with masks of its own: they are
detected by a trial of a tiny copy of the model, not by name. A module mixes documents if its results for one move
when another one's inputs are changed. The smallest such modules get each document's slice of their inputs, and their
results are laid end to end; all else of the model (attention that keeps documents apart, feed-forward, head) takes the
full row. If a batch of documents gives the same as each alone, documents of like length are one call: padded at
the right, which cannot affect earlier tokens in a causal module. `isolation` verifies losses and gradients afterwards.

Letters: T tokens of the row, B documents of a call, L tokens of the longest of them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public one, with paths of leaves
from transformers import PreTrainedModel

from finetune.models.patches import replace_forward
from finetune.models.trials import FAILURES, NoMixers


class Mixer(TypedDict):
    """Document handling of a class of modules. Of plain types, as it is stored as JSON."""

    inputs: dict[str, list[int]]  # place of a tensor in the arguments -> the dimensions that are T
    outputs: dict[str, list[int]]
    batched: bool  # several documents are one call


Mixers = dict[str, Mixer]  # by name of the class

# Fixed cost of a call, in tokens: the smaller it is, the more calls there are and the less is padded. Of 8, 64 and 256
# the fastest in benchmarks/hybrids.py.
_CALL_TOKENS = 64
_LEAK = 1e-5  # of the largest result: rounding is below
# Boundaries of the row's documents, which a document's slice must not be given.
_OF_THE_ROW = ("documents", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class _Row:
    """The documents of a forward, or of its recomputation, and their layout in calls."""

    def __init__(self, lengths: tuple[int, ...]):
        self.lengths = lengths
        self._indices: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the tokens of the row that the batches have, padded with each document's last token (no norm of
        zeros), and the position in the batches of each token of the row."""
        if device not in self._indices:
            calls = calls_of(self.lengths)
            ends = tuple(itertools.accumulate(self.lengths))
            tokens: list[int] = []
            places = [0] * ends[-1]
            for call in calls:
                longest = max(self.lengths[i] for i in call)
                for i in call:
                    begin, length = ends[i] - self.lengths[i], self.lengths[i]
                    places[begin : ends[i]] = range(len(tokens), len(tokens) + length)
                    tokens += [*range(begin, ends[i]), *([ends[i] - 1] * (longest - length))]
            self._indices[device] = torch.tensor(tokens, device=device), torch.tensor(places, device=device)
        return self._indices[device]


_row = _Row(())


@functools.lru_cache(maxsize=1024)
def calls_of(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the documents of each call, longest first: those that cost least with padding and calls counted."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    cost, begins = [0], []  # of the first documents, and the begin of their last call
    for end in range(1, len(order) + 1):
        costs = [cost[k] + _CALL_TOKENS + (end - k) * lengths[order[k]] for k in range(end)]
        cost.append(min(costs))
        begins.append(costs.index(cost[-1]))
    calls, end = [], len(order)
    while end:
        calls.append(tuple(order[begins[end - 1] : end]))
        end = begins[end - 1]
    return tuple(reversed(calls))


@contextmanager
def documents_of_forward(lengths: tuple[int, ...]) -> Iterator[None]:
    """A context for a forward: the documents that mixers take one by one. Few models would hand an argument to their
    mixers; and threads of autograd recompute with this state, see `recomputed_alike`."""
    global _row
    before, _row = _row, _Row(lengths)
    try:
        yield
    finally:
        _row = before


def recomputed_alike(contexts: Callable[[], tuple[Any, Any]] | None = None) -> tuple[Any, Any]:
    """Returns the contexts of a forward and of its recomputation (`context_fn` of torch's checkpoint), by when another
    forward may have run. contexts: others to be in as well."""
    forward, recomputation = contexts() if contexts else (nullcontext(), nullcontext())
    lengths = _row.lengths

    @contextmanager
    def again() -> Iterator[None]:
        with recomputation, documents_of_forward(lengths):
            yield

    return forward, again()


def run_per_document(model: Any, mixers: Mixers) -> list[Any]:
    """Let a model's mixers, in place, take the documents of a row one by one; returns them."""
    modules = [module for module in model.modules() if type(module).__name__ in mixers]
    for module in modules:
        forward = _per_document(module.forward, mixers[type(module).__name__])
        replace_forward(module, forward, "mixer per document")
        module.mixes_documents = True
    return modules


def with_positional_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook before the forward of a mixer: its first argument becomes positional and, unless it has integers,
    gets a gradient, which hooks around a module's backward need."""
    name = next(iter(inspect.signature(module.forward).parameters))
    value = args[0] if args else kwargs.pop(name)
    if torch.is_grad_enabled() and value.is_floating_point() and not value.requires_grad:  # not ids, as MVP's positions
        value = value.detach().requires_grad_()
    return (value, *args[1:]), kwargs


def is_mixer(module: Any) -> bool:
    """Returns whether a module's own modules run once for each document, which ranks have different numbers of."""
    return getattr(module, "mixes_documents", False)


def _per_document(original: Callable[..., Any], mixer: Mixer) -> Callable[..., Any]:
    names = tuple(inspect.signature(original).parameters)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        row = _row
        if len(row.lengths) < 2:  # or a generation
            return original(*args, **kwargs)
        calls = _Calls(row, mixer["batched"])
        with documents_of_forward(()):  # for mixers inside this one
            each = calls.divided(_by_name(names, args, kwargs), mixer["inputs"])
            results = [original(**arguments) for arguments in each]
        return calls.joined(results, mixer["outputs"])

    return forward


def _by_name(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a forward without those that describe the row."""
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in named.items() if name not in _OF_THE_ROW}


class _Calls:
    """A row's documents in the calls of a mixer: one by one, or in batches of like length."""

    def __init__(self, row: _Row, batched: bool):
        self._row, self._batched = row, batched
        self._documents = calls_of(row.lengths) if batched else tuple((i,) for i in range(len(row.lengths)))
        self._longest = tuple(max(row.lengths[i] for i in call) for call in self._documents)
        self._sizes = [len(c) * longest for c, longest in zip(self._documents, self._longest, strict=True)]

    def divided(self, arguments: dict[str, Any], places: dict[str, list[int]]) -> list[dict[str, Any]]:
        """Returns the arguments of each call. A mask without elements becomes None."""
        tokens, count = sum(self._row.lengths), len(self._documents)

        def of_calls(path: Any, value: Any) -> Sequence[Any]:
            if not isinstance(value, Tensor):
                return [value] * count
            if not value.numel():
                return [None] * count
            dimensions = places.get(pytree.keystr(path), ())
            if any(value.shape[dimension] != tokens for dimension in dimensions):
                raise ValueError(f"a mixer got {tuple(value.shape)}, without the {tokens} tokens of the row")
            if len(dimensions) != 1:
                return self._of_pairs(value, dimensions) if dimensions else [value] * count
            (dimension,) = dimensions  # (1, .., T, ..) -> (B, .., L, ..) each
            if not self._batched:
                return value.split(self._sizes, dimension)
            padded = value.index_select(dimension, self._row.indices(value.device)[0]).split(self._sizes, dimension)
            return [
                one.unflatten(dimension, (-1, longest)).movedim(dimension, 0).squeeze(1)
                for one, longest in zip(padded, self._longest, strict=True)
            ]

        leaves, tree = pytree.tree_flatten_with_path(arguments)
        by_call = zip(*(of_calls(path, value) for path, value in leaves), strict=True)
        return [pytree.tree_unflatten(list(values), tree) for values in by_call]

    def _of_pairs(self, value: Tensor, dimensions: Sequence[int]) -> list[Tensor]:  # (1, .., T, T) -> (B, .., L, L)
        """Divides a mask: queries of padding see the same as the last token, and no query sees keys of padding."""
        ends = tuple(itertools.accumulate(self._row.lengths))
        calls = []
        for call, longest in zip(self._documents, self._longest, strict=True):
            blocks = []
            for i in call:
                block, length = value, self._row.lengths[i]
                for dimension in dimensions:
                    block = block.narrow(dimension, ends[i] - length, length)
                if longest > length:
                    last = block.narrow(dimensions[0], length - 1, 1)
                    more = [longest - length if d == dimensions[0] else -1 for d in range(block.dim())]
                    block = torch.cat([block, last.expand(more)], dimensions[0])
                    hidden = False if block.dtype == torch.bool else torch.finfo(block.dtype).min
                    shape = [longest - length if d == dimensions[1] else n for d, n in enumerate(block.shape)]
                    block = torch.cat([block, block.new_full(shape, hidden)], dimensions[1])
                blocks.append(block)
            calls.append(torch.cat(blocks) if len(blocks) > 1 else blocks[0])
        return calls

    def joined(self, results: Sequence[Any], places: dict[str, list[int]]) -> Any:
        """Returns the documents' results end to end; None for those without tokens (a state) or with pairs (attention
        weights), which the row does not have."""

        def whole(path: Any, *parts: Any) -> Any:
            if not isinstance(parts[0], Tensor):
                return parts[0]
            dimensions = places.get(pytree.keystr(path), ())
            if len(dimensions) != 1:
                return None
            if not self._batched:
                return torch.cat(parts, dim=dimensions[0])
            dimension = dimensions[0]
            flat = [part.unsqueeze(1).movedim(0, dimension).flatten(dimension, dimension + 1) for part in parts]
            joined = torch.cat(flat, dim=dimension)
            return joined.index_select(dimension, self._row.indices(joined.device)[1])

        return pytree.tree_map_with_path(whole, *results)


# --- finding them


def find_mixers(model: Any, forward: Callable[[], Any], lengths: tuple[int, ...]) -> Mixers:
    """Returns the mixers of a tiny model, in which they run per document from now on.

    forward: of a row of documents of these lengths, whose sum T is no other size in the model. Raises
    NoMixers.
    """
    # The arguments of the first call of each module that takes hidden states.
    calls: dict[Any, tuple[Any, Any]] = {}

    def record(module: Any, args: Any, kwargs: Any) -> None:
        calls.setdefault(module, (args, kwargs))

    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in model.modules()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    mixers: Mixers = {}
    with torch.no_grad(), documents_of_forward(lengths):
        for module in reversed(list(model.modules())):  # those inside a module before it
            name = type(module).__name__
            if module not in calls or name in mixers or not _mixes(module, *calls[module], lengths):
                continue
            if isinstance(module, PreTrainedModel):
                raise NoMixers(f"{name} itself lets documents see each other")
            if (places := _places(module, *calls[module], sum(lengths))) is None:
                continue
            before = {other: other.forward for other in calls if type(other).__name__ == name}
            run_per_document(model, {name: places})
            if not _leaks(module, *calls[module], lengths):
                mixers[name] = places
                continue
            for other, original in before.items():
                replace_forward(other, original, "mixer per document")  # it was not this one
    if not mixers:
        raise NoMixers("no module was seen to mix documents")
    return mixers


def _mixes(module: Any, args: Any, kwargs: Any, lengths: tuple[int, ...]) -> bool:
    """Returns whether documents of a row see each other, or get other results than each gets by itself: among tokens
    of the others, one that chooses a few may choose otherwise."""
    if _leaks(module, args, kwargs, lengths):
        return True
    if (places := _places(module, args, kwargs, sum(lengths))) is None:
        return False
    try:
        whole, alone = (
            pytree.tree_leaves(forward(*args, **kwargs)) for forward in (module, _per_document(module.forward, places))
        )
    except FAILURES:  # it needs to know the documents of the row
        return False
    return not all(_same(*pair) for pair in zip(whole, alone, strict=True) if isinstance(pair[1], Tensor))


def _same(one: Tensor, other: Tensor) -> bool:
    return not one.is_floating_point() or bool((one - other).abs().max() <= _LEAK * one.abs().max())


def _leaks(module: Any, args: Any, kwargs: Any, lengths: tuple[int, ...]) -> bool:
    """Returns whether other documents' results follow the inputs of the first."""
    first, tokens = lengths[0], sum(lengths)

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor) and tokens in value.shape and value.is_floating_point():
            value = value.clone()
            part = value.narrow(list(value.shape).index(tokens), 0, first)
            part.copy_(part.flip(-1) + 1)
        return value

    before, after = (
        pytree.tree_leaves(module(*a, **k)) for a, k in ((args, kwargs), pytree.tree_map(changed, (args, kwargs)))
    )
    for one, other in zip(before, after, strict=True):
        if not isinstance(one, Tensor) or list(one.shape).count(tokens) != 1:
            continue
        rest = (list(one.shape).index(tokens), first, tokens - first)
        if not _same(one.narrow(*rest), other.narrow(*rest)):
            return True
    return False


def _places(module: Any, args: Any, kwargs: Any, tokens: int) -> Mixer | None:
    """Returns the dimensions of tensors that are T; None for a module that has it in no input or in no result."""

    def of(tree: Any) -> dict[str, list[int]]:
        leaves = {pytree.keystr(path): x for path, x in pytree.tree_flatten_with_path(tree)[0] if isinstance(x, Tensor)}
        return {p: d for p, x in leaves.items() if (d := [i for i, n in enumerate(x.shape) if n == tokens])}

    names = tuple(inspect.signature(module.forward).parameters)
    inputs, outputs = of(_by_name(names, args, kwargs)), of(module(*args, **kwargs))
    return Mixer(inputs=inputs, outputs=outputs, batched=False) if inputs and outputs else None


def takes_batches(mixer: Mixer) -> bool:
    """Returns whether a mixer's tensors have room for a batch: whether it gives the same is to be tried."""
    places = [*mixer["inputs"].values(), *mixer["outputs"].values()]
    return all(dimensions[0] > 0 and len(dimensions) < 3 for dimensions in places)
