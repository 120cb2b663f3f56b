"""One call of attention for each document: no mask, no work across documents, on any device.

Letters: T tokens of the row, t of one document, N documents, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from finetune.models.attention.kernels import (
    AttentionCall,
    boundaries,
    in_one_type,
    register,
    written_out,
)
from finetune.models.attention.pieces import attend_block, attend_block_backward
from finetune.models.attention.sinks import Attended, add_sinks, sinks_gradient
from finetune.models.base_config import depends_on_length
from finetune.models.patches import replace_forward

DOCUMENTS = "finetune_documents"  # in transformers' table of attention functions


class DocumentLengths:
    """Lengths of one micro-batch's documents. A plain object: torch.compile guards the values in a tuple or a frozen
    dataclass, and would recompile for every row."""

    def __init__(self, lengths: tuple[int, ...], ends: Tensor | None = None, prefixes: tuple[int, ...] = ()):
        self.lengths = lengths
        self.ends = ends  # (N + 1,) if layers are compiled
        self.prefixes = prefixes or (0,) * len(lengths)  # tokens of the document before that each begins with
        self.whole: dict[int, Tensor] = {}  # by document, if it has images: (t,) of each token the image, else -1
        self.whole_in_windows_only = False  # these do nothing in layers without a sliding window
        self._seen: dict[tuple[int, ...], Tensor] = {}

    def mask(self, document: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
        """Returns the mask of a document; None: each token sees those up to itself. window: of the layer."""
        shortened = None if window is None or keys <= window else window
        if shortened is None and not self.prefixes[document] and self._images(document, window) is None:
            return None  # torch's word for a square only
        return self.seen(document, keys, window, device)

    def seen(self, document: int, keys: int, window: int | None, device: torch.device) -> Tensor:
        """Returns the mask of a document, created once for all layers. window: of the layer."""
        queries, image = self.lengths[document], self._images(document, window)
        window = None if window is None or keys <= window else window
        key = (queries, keys, window or 0) if image is None else (document, window or 0)
        if key not in self._seen:
            self._seen[key] = seen(queries, keys, window, device, image)
        return self._seen[key]

    def _images(self, document: int, window: int | None) -> Tensor | None:
        """Returns, of each token of a document, the image that it sees all of in a layer; None if there is none."""
        return None if self.whole_in_windows_only and window is None else self.whole.get(document)


def seen(queries: int, keys: int, window: int | None, device: torch.device, image: Tensor | None = None) -> Tensor:
    """Returns (queries, keys) of the last tokens of a document and all of them, True if token i sees token j:
    i - window < j <= i. image: (keys,) of each token the image whose tokens see each other, else -1."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    mask = distance >= 0
    if image is not None:
        mask |= (image[:, None] == image[None, :]) & (image >= 0)[:, None]
    return mask if window is None else mask & (distance < window)


def prepare(
    document_lengths: tuple[int, ...], prefix_lengths: tuple[int, ...] = (), compiled: bool = False
) -> dict[str, Any]:
    if compiled and any(prefix_lengths):
        raise ValueError("compiled layers do not share beginnings")
    ends = boundaries(document_lengths, "cpu", True) if compiled else None
    return {"documents": DocumentLengths(document_lengths, ends, prefix_lengths)}


def with_whole_images(
    arguments: dict[str, Any], input_ids: Tensor, tokens: Sequence[int], in_windows_only: bool = False
) -> None:
    """Let the tokens of an image see each other in a forward with these arguments, built by `prepare` (Gemma 3 and 4:
    an image, or a frame, is so many of these tokens in a row). in_windows_only: see `Family`."""
    documents: DocumentLengths = arguments["documents"]
    documents.whole_in_windows_only = in_windows_only
    of_image = torch.stack([input_ids[0] == token for token in tokens]).any(0)  # (T,)
    begins = of_image & ~of_image.roll(1)
    begins[0] = of_image[0]
    images = torch.where(of_image, begins.cumsum(0), -1).split(documents.lengths)
    have = torch.stack([image.max() for image in images]).tolist()  # waits for the device once
    documents.whole = {i: image for i, image in enumerate(images) if have[i] >= 0}


def per_document_attention(call: AttentionCall, documents: DocumentLengths) -> Tensor:  # (1, T, H, D)
    if torch.compiler.is_compiling() and documents.ends is not None and not call.dropout:
        q, k, v = in_one_type(*call[:3])
        settings = documents.ends, call.scale, call.window, call.softcap
        return torch.ops.finetune.per_document(q, k, v, call.sinks, *settings)
    return one_by_one(call, documents)


@torch.compiler.disable()  # a loop over lengths that change with every row: traced, each row would recompile
def one_by_one(call: AttentionCall, documents: DocumentLengths) -> Tensor:  # (1, T, H, D)
    query, key, value, dropout, scaling, sliding_window, softcap, sinks = call
    pieces, before = [], (key[:, :, :0], value[:, :, :0])
    rows = (tensor.split(documents.lengths, dim=2) for tensor in (query, key, value))
    each = zip(documents.lengths, documents.prefixes, *rows, strict=True)
    for index, (length, prefix, q, k, v) in enumerate(each):
        if prefix:
            k, v = (torch.cat([b[:, :, :prefix], own], dim=2) for b, own in zip(before, (k, v), strict=True))
        before, keys = (k, v), prefix + length
        if softcap is not None or (sinks is not None and dropout):
            mask = documents.seen(index, keys, sliding_window, q.device)
            piece = written_out(call._replace(query=q, key=k, value=v), mask)
        elif sinks is not None:
            mask = documents.mask(index, keys, sliding_window, q.device)
            of_sinks: Any = _WithSinks.apply(q, k, v, sinks, call.scale, mask)
            piece = of_sinks
        else:
            mask = documents.mask(index, keys, sliding_window, q.device)
            piece = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        pieces.append(piece.transpose(1, 2))  # as the CPU's kernel lays it out, so that cat is the only copy
    return torch.cat(pieces, dim=1)


class _WithSinks(torch.autograd.Function):
    """Attention of one document, with sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # (1, H, t, D)
        key: Tensor,  # (1, K, s, D)
        value: Tensor,
        sinks: Tensor,  # (H,)
        scale: float,
        seen: Tensor | None,  # (t, s); None: each token sees those up to itself
    ) -> Tensor:  # (1, H, t, D)
        query, key, value = in_one_type(query, key, value)
        with torch.autocast(query.device.type, enabled=False):
            out, lse = add_sinks(attend_block(query, key, value, scale, seen is None, seen), sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse, seen)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, sinks, out, lse, seen = ctx.saved_tensors
        (gradient,), attended = gradients, Attended(out, lse)
        of_sinks = sinks_gradient(gradient, attended, sinks) if ctx.needs_input_grad[3] else None
        of_rest = attend_block_backward(gradient, query, key, value, attended, ctx.scale, seen is None, seen)
        return (*of_rest, of_sinks, None, None)


# --- compiled layers
#
# One operation that torch.compile does not look into: a compiled layer stays one graph, even if its activations are
# recomputed (a graph break there would leave the full layer uncompiled, in silence).


@torch.library.custom_op("finetune::per_document", mutates_args=())
def per_document(
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    sinks: Tensor | None,  # (H,)
    ends: Tensor,  # (N + 1,) on the CPU: 0, then the end of each document
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:  # (1, T, H, D)
    lengths = DocumentLengths(tuple(ends.diff().tolist()))
    call = AttentionCall(query, key, value, 0.0, scaling, sliding_window, softcap, sinks)
    return one_by_one(call, lengths).contiguous()


@per_document.register_fake
def _(query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


@torch.library.custom_op("finetune::per_document_backward", mutates_args=())
def per_document_backward(
    gradient: Tensor,  # (1, T, H, D)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    ends: Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients by the chain rule, in fp32: weights P = softmax(S), S = scaling Q K', capped or not, and
    next to them the sinks, whose gradients are the last (0 of them without)."""
    heads, size, groups = query.shape[1], query.shape[3], key.shape[1]
    gradients: list[tuple[Tensor, Tensor, Tensor]] = []
    grad_sinks = query.new_zeros(0 if sinks is None else heads, dtype=torch.float32)
    lengths = ends.diff().tolist()
    pieces = (tensor[0].split(lengths, dim=1) for tensor in (gradient.transpose(1, 2), query, key, value))
    for length, *piece in zip(lengths, *pieces, strict=True):
        # Heads that share keys lie end to end: (K, G * t, D) against (K, t, D).
        g, q, k, v = (tensor.float().reshape(groups, -1, size) for tensor in piece)
        scores = q @ k.transpose(1, 2) * scaling  # (K, G * t, t)
        squashed = None if softcap is None else torch.tanh(scores / softcap)
        hidden = ~seen(length, length, sliding_window, query.device).repeat(heads // groups, 1)
        capped = scores if squashed is None or softcap is None else softcap * squashed
        capped = capped.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            of_rows = sinks.float().repeat_interleave(length).view(groups, -1, 1)
            capped = torch.cat([capped, of_rows], dim=-1)
        weights = torch.softmax(capped, dim=-1)
        weights, of_sinks = weights[..., :length], weights[..., length:]
        grad_weights = g @ v.transpose(1, 2)
        products = (grad_weights * weights).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - products)
        if sinks is not None:
            grad_sinks -= (of_sinks * products).view(heads, length).sum(1)
        if squashed is not None:
            grad_scores = grad_scores * (1 - squashed.square())
        grad_query = (grad_scores @ k * scaling).view(heads, length, size)
        gradients.append((grad_query, grad_scores.transpose(1, 2) @ q * scaling, weights.transpose(1, 2) @ g))
    grad_query, grad_key, grad_value = (torch.cat(parts, dim=1)[None] for parts in zip(*gradients, strict=True))
    if sinks is not None:
        grad_sinks = grad_sinks.to(sinks.dtype)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks


@per_document_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = query.new_empty(0, dtype=torch.float32) if sinks is None else sinks.new_empty(sinks.shape)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), of_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    *gradients, of_sinks = per_document_backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return (*gradients, of_sinks if of_sinks.numel() else None, None, None, None, None)


per_document.register_autograd(_backward, setup_context=_setup_context)

register(DOCUMENTS, per_document_attention)


# --- rotary positions whose frequencies depend on the length of a sequence
#
# transformers takes the longest position of a forward for it: with `dynamic` RoPE the frequencies of every document
# would follow the longest one of its row, and of rows before it; with `longrope` a short document next to a long one
# would get the long one's. Here each document has the angles that it would have alone.


def rotate_per_document(model: Any) -> None:
    """Let the rotary modules of a model, in place, compute each document's angles as if it were alone."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)  # a type, or one for each kind of layer that the module serves
        types = {"": types} if isinstance(types, str) else {f"{kind}_": name for kind, name in (types or {}).items()}
        if any(depends_on_length(name) for name in types.values()):
            growing = [prefix for prefix, name in types.items() if "dynamic" in name]
            replace_forward(module, _per_document(module, module.forward, growing), "rotations per document")


def _per_document(module: Any, original: Callable[..., Any], growing: list[str]) -> Callable[..., Any]:
    """growing: prefixes of the attributes of `dynamic` RoPE, which keeps the frequencies of the longest sequence."""

    @functools.wraps(original)
    def forward(
        x: Tensor,
        position_ids: Tensor,  # (1, T), or (axes, 1, T)
        *args: Any,
        **kwargs: Any,
    ) -> Any:  # (1, T, rotary size), or several of these
        if position_ids.shape[-2] > 1 or bool((position_ids[..., 0] != 0).any()):  # generation
            return original(x, position_ids, *args, **kwargs)
        positions = position_ids.reshape(-1, position_ids.shape[-1])[0]
        # Waits for the device, as transformers' own test of the longest position does.
        starts = (positions == 0).nonzero()[:, 0].tolist()
        lengths = [end - start for start, end in zip(starts, [*starts[1:], len(positions)], strict=True)]
        angles = []
        for document in position_ids.split(lengths, dim=-1):
            for prefix in growing:  # as in a new module
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
                setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
            angles.append(original(x, document, *args, **kwargs))
        if isinstance(angles[0], Tensor):
            return torch.cat(angles, dim=1)
        return tuple(torch.cat(parts, dim=1) for parts in zip(*angles, strict=True))

    return forward
