"""Modules that carry something along the row besides attention, run once for each document of a packed row.

Gated delta nets, Mamba, short convolutions, lightning attention, token shift, attention with masks of its own: which
they are is seen on a tiny copy of the model, not known by name. A module mixes documents where its results for one move
when another one's inputs are changed. The smallest such modules get each document's slice of their inputs, and their
results are laid end to end; all else of the model (attention that keeps documents apart, feed-forward, head) takes the
row as a whole. `isolation` verifies losses and gradients afterwards.

Letters: T tokens of the row.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

# class of a module -> {"inputs" | "outputs": {place of a tensor in them: the dimensions that are T}}. Of plain types,
# for it is kept as JSON
Mixers = dict[str, dict[str, dict[str, list[int]]]]

_LEAK = 1e-5  # of the largest result: rounding is below
# Boundaries of the row's documents, which a document's slice must not be given.
_OF_THE_ROW = ("documents", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

_lengths: tuple[int, ...] = ()  # of the documents of the forward, or of its recomputation, that runs


@contextmanager
def documents_of_forward(lengths: tuple[int, ...]) -> Iterator[None]:
    """Around a forward: the documents that mixers take one by one. Not an argument of the forward: few models would
    hand it to their mixers. Plain state: threads of autograd recompute with it, see `recomputed_alike`."""
    global _lengths
    before, _lengths = _lengths, lengths
    try:
        yield
    finally:
        _lengths = before


def recomputed_alike(contexts: Callable[[], tuple[Any, Any]] | None = None) -> tuple[Any, Any]:
    """Returns the contexts of a forward and of its recomputation in the backward (`context_fn` of torch's checkpoint),
    by when another forward may have run. contexts: others to be in as well."""
    forward, recomputation = contexts() if contexts else (nullcontext(), nullcontext())
    return forward, _with_documents(recomputation, _lengths)


@contextmanager
def _with_documents(inner: Any, lengths: tuple[int, ...]) -> Iterator[None]:
    with inner, documents_of_forward(lengths):
        yield


def run_per_document(model: Any, mixers: Mixers) -> list[Any]:
    """Let a model's mixers, in place, take the documents of a row one by one; returns them."""
    found = [module for module in model.modules() if type(module).__name__ in mixers]
    for module in found:
        module.forward = _per_document(module.forward, mixers[type(module).__name__])
        module.mixes_documents = True
    return found


def with_positional_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook before the forward of a mixer, for hooks around a module's backward, which see positional inputs only and
    run where these have gradients: its first argument becomes one that has."""
    name = next(iter(inspect.signature(module.forward).parameters))
    value = args[0] if args else kwargs.pop(name)
    if torch.is_grad_enabled() and not value.requires_grad:
        value = value.detach().requires_grad_()
    return (value, *args[1:]), kwargs


def is_mixer(module: Any) -> bool:
    """Returns whether a module's own modules run once for each document, which ranks have different numbers of."""
    return getattr(module, "mixes_documents", False)


def _per_document(original: Callable[..., Any], places: dict[str, dict[str, list[int]]]) -> Callable[..., Any]:
    names = tuple(inspect.signature(original).parameters)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        lengths = _lengths
        if len(lengths) < 2:  # or a generation
            return original(*args, **kwargs)
        arguments, results, begin = _by_name(names, args, kwargs), [], 0
        with documents_of_forward(()):  # for mixers inside this one
            for length in lengths:
                results.append(original(**_sliced(arguments, places["inputs"], begin, length, sum(lengths))))
                begin += length
        return _joined(results, places["outputs"])

    return forward


def _by_name(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a forward without what describes the row."""
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in named.items() if name not in _OF_THE_ROW}


def _sliced(
    arguments: dict[str, Any], places: dict[str, list[int]], begin: int, length: int, tokens: int
) -> dict[str, Any]:
    """Returns the arguments for tokens begin .. begin + length of T. A mask without elements says nothing: none."""

    def own(path: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.numel():
            return None
        for dimension in places.get(pytree.keystr(path), ()):
            if value.shape[dimension] != tokens:
                raise ValueError(f"a mixer got {tuple(value.shape)}, without the {tokens} tokens of the row")
            value = value.narrow(dimension, begin, length)
        return value

    return pytree.tree_map_with_path(own, arguments)


def _joined(results: Sequence[Any], places: dict[str, list[int]]) -> Any:
    """Returns the documents' results end to end. Of those without tokens (a state) or with pairs of them (attention
    weights), which the row does not have, none."""

    def whole(path: Any, *parts: Any) -> Any:
        if not isinstance(parts[0], Tensor):
            return parts[0]
        dimensions = places.get(pytree.keystr(path), ())
        return torch.cat(parts, dim=dimensions[0]) if len(dimensions) == 1 else None

    return pytree.tree_map_with_path(whole, *results)


# --- finding them


class NoMixers(Exception):
    """Documents see each other in a way that no module can be blamed for, or in one that takes the model as a whole."""


FAILURES = (  # of a model's own code, with a config or arguments that it does not know
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NoMixers,
    NotImplementedError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def find_mixers(model: Any, forward: Callable[[], Any], lengths: tuple[int, ...]) -> Mixers:
    """Returns the mixers of a tiny model, in which they run per document from here on.

    forward: of a row of documents of these lengths, whose sum T is the size of nothing else in the model. Raises
    NoMixers.
    """
    calls = _calls(model, forward)
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
                other.forward = original
    if not mixers:
        raise NoMixers("no module was seen to mix documents")
    return mixers


def _calls(model: Any, forward: Callable[[], Any]) -> dict[Any, tuple[Any, Any]]:
    """Returns the arguments of the first call of each module that takes hidden states."""
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
    return calls


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


def _places(module: Any, args: Any, kwargs: Any, tokens: int) -> dict[str, dict[str, list[int]]] | None:
    """Returns where tensors have T; None for a module that has it in no input or in no result."""

    def of(tree: Any) -> dict[str, list[int]]:
        leaves = {pytree.keystr(path): x for path, x in pytree.tree_flatten_with_path(tree)[0] if isinstance(x, Tensor)}
        return {p: d for p, x in leaves.items() if (d := [i for i, n in enumerate(x.shape) if n == tokens])}

    names = tuple(inspect.signature(module.forward).parameters)
    places = {"inputs": of(_by_name(names, args, kwargs)), "outputs": of(module(*args, **kwargs))}
    return places if all(places.values()) else None
