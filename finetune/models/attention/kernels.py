"""Attention within documents by one kernel for the row: torch's flash attention of many lengths, or FlexAttention; and
registration, boundaries and masked attention, which all implementations share.

Letters: B rows, T query tokens, L key tokens, N documents, R blocks of 128 tokens, H query heads, K key/value heads,
D head size.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import AuxRequest as VarlenRequest
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import dropout as drop
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from finetune.data.batch import row_places
from finetune.models.attention.sinks import Attended, add_sinks, sinks_gradient
from finetune.utils import copied_to


def boundaries(document_lengths: tuple[int, ...], device: str, compiled: bool) -> Tensor:
    """Returns (N + 1,) int32: 0, then the end of each document (`cu_seqlens`). compiled: one graph for every N."""
    ends = copied_to(torch.tensor([0, *accumulate(document_lengths)], dtype=torch.int32), device)
    if compiled:
        torch._dynamo.mark_dynamic(ends, 0)  # torch documents it under this name
    return ends


def in_one_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors in autocast's type: queries and keys that were normalized with fp32 weights are not in it,
    and autocast does not cast for these kernels."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[-1].dtype
    return tuple(tensor.to(dtype) for tensor in tensors)


def with_unread_mask(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns the arguments, if they have documents, with a mask that our implementations do not read.

    Without a mask transformers looks for documents in the positions, and waits for the device; one of four dimensions
    it hands through (masking_utils.py, `_preprocess_mask_arguments`). This one has no elements: a model that reads it
    fails by its shape, while with a mask that allows everything documents would see each other.
    """
    if "documents" not in arguments:
        return arguments
    return {**arguments, "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)}


class AttentionCall(NamedTuple):
    """Inputs of a layer to its attention, for the documents of one row."""

    query: Tensor  # (1, H, T, D)
    key: Tensor  # (1, K, T, D)
    value: Tensor  # (1, K, T, D)
    dropout: float = 0.0
    scaling: float | None = None  # of the scores; None: D ** -0.5
    window: int | None = None  # tokens that each sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,) a score of each head that takes weight

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scaling is None else self.scaling


def written_out(
    call: AttentionCall,
    seen: Tensor,  # broadcasts to (B, 1, T, L), True if attended to
) -> Tensor:  # (B, H, T, D)
    """Attention by its formula, for what torch's function has no argument for: scores that are squashed into +-softcap
    (Gemma 2, https://arxiv.org/abs/2408.00118, section 2), and sinks. Softmax in fp32, the rest with the roundings of
    transformers' eager attention. Heads that share keys are products with one and the same matrix."""
    query, key, value, softcap = call.query, call.key, call.value, call.softcap
    batch, heads, tokens, size = query.shape
    shared = (batch, key.shape[1], heads // key.shape[1] * tokens)
    scores = torch.matmul(query.reshape(*shared, size), key.transpose(2, 3)).view(batch, heads, tokens, key.shape[2])
    scores = scores * call.scale if softcap is None else softcap * torch.tanh(scores * call.scale / softcap)
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype)[:, None, None].expand(batch, -1, tokens, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : key.shape[2]].to(query.dtype)
    return torch.matmul(drop(weights, call.dropout).reshape(*shared, -1), value).view(batch, heads, tokens, -1)


# (call, documents) -> (1, T, H, D); documents: the result of the implementation's `prepare`
WithinDocuments = Callable[[AttentionCall, Any], Tensor]
WITHIN_DOCUMENTS: dict[str, WithinDocuments] = {}  # our own implementations, by name


def register(name: str, within_documents: WithinDocuments) -> None:
    """Let models be loaded with an implementation by this name (`attn_implementation`)."""

    def attention(
        module: torch.nn.Module,
        query: Tensor,  # (B, H, T, D); with documents B is 1
        key: Tensor,  # (B, K, L, D)
        value: Tensor,  # (B, K, L, D)
        attention_mask: Tensor | None,  # (B, 1, T, L), True if attended to
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,  # (H,) sinks
        documents: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:  # (B, T, H, D)
        if kwargs.get("position_bias") is not None:  # would be left out in silence
            raise ValueError("this model's attention takes `position_bias`: set model.attention: eager")
        call = AttentionCall(query, key, value, dropout, scaling, sliding_window, softcap, s_aux)
        if documents is not None:
            if attention_mask is not None and attention_mask.numel():
                raise ValueError("this model brings a mask of its own, which attention by documents would leave out")
            return within_documents(call, documents), None
        if attention_mask is None:
            raise ValueError("neither documents nor an attention mask: documents could see each other")
        if softcap is not None or s_aux is not None:  # generation, with a mask for its padding
            return written_out(call, attention_mask).transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal=False)

    def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        if attention_mask is None:  # training: the documents say it all
            return None
        return sdpa_mask(*args, attention_mask=attention_mask, **{**kwargs, "allow_is_causal_skip": False})

    WITHIN_DOCUMENTS[name] = within_documents
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


# --- varlen: all documents of the row in one call of torch.nn.attention.varlen. CUDA, 16 bit

VARLEN = "finetune_varlen"  # in transformers' table of attention functions
# Without this argument (torch 2.11) numbers of heads are not compared, and the kernel groups them itself.
_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
_activate = cache(torch.nn.attention.activate_flash_attention_impl)


class Boundaries:
    """Boundaries of one micro-batch's documents, on the device; created once for all layers."""

    def __init__(self, ends: Tensor, longest: int, keys: Keys | None = None):
        self.ends = ends  # (N + 1,) int32: 0, then the end of each document (`cu_seqlens`)
        self.longest = longest  # tokens; may be more than any document has
        self.keys = keys  # if documents share their beginning


class Keys(NamedTuple):
    """Visible tokens of documents: each sees the shared beginning, which is in the row once, and its own tokens."""

    places: Tensor  # (keys,) int64 in the row, document after document
    ends: Tensor  # (N + 1,) int32, as those of the documents
    longest: int


def prepare_varlen(
    document_lengths: tuple[int, ...],
    prefix_lengths: tuple[int, ...] = (),
    *,
    device: str,
    longest: int | None = None,
    flash_3: bool = False,
) -> dict[str, Any]:
    """Returns the boundaries of documents. longest: a bound on their tokens, as torch.compile recompiles for another
    number; flash_3: FlashAttention-3 becomes the kernel of torch's flash attention, everywhere."""
    if flash_3:
        _activate("FA3")
    compiled = longest is not None
    most = max(document_lengths) if longest is None else longest
    ends = boundaries(document_lengths, device, compiled)
    if not any(prefix_lengths):
        return {"documents": Boundaries(ends, most)}
    lengths = tuple(own + prefix for own, prefix in zip(document_lengths, prefix_lengths, strict=True))
    places = copied_to(torch.from_numpy(row_places(document_lengths, prefix_lengths)), device)
    return {"documents": Boundaries(ends, most, Keys(places, boundaries(lengths, device, compiled), max(lengths)))}


def varlen_attention(call: AttentionCall, documents: Boundaries) -> Tensor:  # (1, T, H, D)
    if call.dropout or call.softcap is not None:
        raise ValueError("varlen attention has neither dropout nor soft-capping: set model.attention: auto")
    # Not `tensor[0]`, whose gradient would be a copy in zeros.
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in in_one_type(*call[:3]))  # (T, H or K, D)
    # (-1, 0) is the kernel's word for causal; (w - 1, 0) for the token itself and w - 1 before it.
    window = (-1, 0) if call.window is None else (call.window - 1, 0)
    ends = key_ends = documents.ends
    longest = longest_keys = documents.longest
    if documents.keys is not None:  # the kernel takes queries for the last of their keys (flash attention 2.1)
        places, key_ends, longest_keys = documents.keys
        k, v = k[places], v[places]
    if call.sinks is not None:
        # The compiler does not take one tensor twice.
        bounds = ends, None if key_ends is ends else key_ends, longest, longest_keys
        of_sinks: Any = _VarlenWithSinks.apply(q, k, v, call.sinks, *bounds, call.scaling, window)
        return of_sinks[None]
    bounds = ends, key_ends, longest, longest_keys
    out = varlen_attn(q, k, v, *bounds, scale=call.scaling, window_size=window, **_grouped(q, k))
    assert isinstance(out, Tensor)  # a tuple only if the log-sum-exp is requested
    return out[None]


class _VarlenWithSinks(torch.autograd.Function):
    """The kernel, then sinks; its backward with the log-sum-exp that includes them (see `sinks`)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # (T, H, D)
        key: Tensor,  # (L, K, D)
        value: Tensor,
        sinks: Tensor,  # (H,)
        ends: Tensor,
        key_ends: Tensor | None,  # None: as `ends`
        longest: int,
        longest_keys: int,
        scale: float | None,
        window: tuple[int, int],
    ) -> Tensor:  # (T, H, D)
        bounds = ends, ends if key_ends is None else key_ends, longest, longest_keys
        # torch documents lse as (T, H); its kernels return, and its operator declares, (H, T).
        out, lse = varlen_attn(
            *(query, key, value, *bounds),
            return_aux=VarlenRequest(True),
            scale=scale,
            window_size=window,
            **_grouped(query, key),
        )
        if lse.shape != (query.shape[1], query.shape[0]):
            raise ValueError(f"the log-sum-exp of torch {torch.__version__} has another layout: {tuple(lse.shape)}")
        lse = add_sinks(Attended(out.transpose(0, 1), lse), sinks).lse
        ctx.save_for_backward(query, key, value, sinks, out, lse, ends, key_ends)
        ctx.settings = longest, longest_keys, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, sinks, out, lse, ends, key_ends = ctx.saved_tensors
        longest, longest_keys, scale, window = ctx.settings
        (gradient,) = gradients
        random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none of
        bounds = ends, ends if key_ends is None else key_ends, longest, longest_keys
        inputs = gradient, query, key, value, out, lse, *bounds
        # Nothing public takes the log-sum-exp that a backward is to use.
        of_kernel = torch.ops.torch_attn._varlen_attn_backward(*inputs, window == (-1, 0), random, scale, list(window))
        of_sinks = None
        if ctx.needs_input_grad[3]:
            of_sinks = sinks_gradient(gradient.transpose(0, 1), Attended(out.transpose(0, 1), lse), sinks)
        return (*of_kernel, of_sinks, *(None,) * 6)


def _grouped(query: Tensor, key: Tensor) -> dict[str, Any]:
    return {"enable_gqa": True} if _TAKES_GROUPS and query.shape[1] != key.shape[1] else {}


register(VARLEN, varlen_attention)


def flash_3_missing() -> str | None:
    """Returns what is missing on any device; None if torch and the package have it."""
    listed = getattr(torch.nn.attention, "list_flash_attention_impls", list[str])
    if "FA3" not in listed():
        return f"torch {torch.__version__} does not offer FlashAttention-3"
    if importlib.util.find_spec("flash_attn_interface") is None:
        return "FlashAttention-3 is not installed: https://github.com/Dao-AILab/flash-attention (`hopper`)"
    return None


# --- flex: a kernel that torch.compile writes for the documents' mask, and that skips invisible blocks

FLEX = "finetune_flex"  # in transformers' table of attention functions
BLOCK = 128  # tokens; flex_attention's own default


class BlockMasks:
    """Masks of one micro-batch, for each window that a layer of the model has; created once for all layers."""

    def __init__(self, masks: dict[int | None, BlockMask]):
        self.masks = masks


def prepare_flex(
    document_lengths: tuple[int, ...],
    prefix_lengths: tuple[int, ...] = (),
    *,
    device: str,
    windows: Iterable[int | None],
) -> dict[str, Any]:
    masks = {window: block_mask(document_lengths, window, device, prefix_lengths) for window in windows}
    return {"documents": BlockMasks(masks)}


def block_mask(
    document_lengths: tuple[int, ...], window: int | None, device: str, prefix_lengths: tuple[int, ...] = ()
) -> BlockMask:
    """Returns the mask in which token i sees token j of the same document with i - window < j <= i.

    prefix_lengths: of each document the tokens of the one before that it begins with, see `Batch`. Built from the
    lengths in R x R steps; `create_block_mask` would evaluate T x T pairs.
    """
    document = np.repeat(np.arange(len(document_lengths)), document_lengths)  # (T,)
    tokens = len(document)
    first = np.arange(0, tokens, BLOCK)  # (R,)
    last = np.minimum(first + BLOCK, tokens) - 1
    # Documents lie end to end: if the nearest pair of two blocks is of one document some pair is, and if the
    # farthest pair is all are. Rows are queries, columns keys.
    before = first[:, None] > first[None, :]
    some = before & (document[first][:, None] == document[last][None, :])
    every = before & (document[last][:, None] == document[first][None, :]) & ((last - first) == BLOCK - 1)[:, None]
    if window is not None:
        some &= first[:, None] - last[None, :] < window
        every &= last[:, None] - first[None, :] < window
    some |= np.eye(len(first), dtype=bool)
    document_of_token = copied_to(torch.from_numpy(document.astype(np.int32)), device)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        mine = (document_of_token[query] == document_of_token[key]) & (key <= query)
        return mine if window is None else mine & (query - key < window)

    mask_function: Callable[..., Tensor] = seen
    if any(prefix_lengths):
        begins, prefixes = np.concatenate(([0], np.cumsum(document_lengths))), np.array(prefix_lengths)
        numbers = np.arange(len(prefixes))
        # First place of the document that has the shared tokens: the nearest before without a prefix of its own.
        shared = begins[np.maximum.accumulate(np.where(prefixes == 0, numbers, 0))]
        for i in np.flatnonzero(prefixes):
            queries = slice(begins[i] // BLOCK, (begins[i + 1] - 1) // BLOCK + 1)
            some[queries, shared[i] // BLOCK : (shared[i] + prefixes[i] - 1) // BLOCK + 1] = True
        mask_function = _seen_with_prefixes(document_of_token, begins[:-1], shared, prefixes, window)
    return BlockMask.from_kv_blocks(
        *_in_order(some & ~every, device), *_in_order(every, device), BLOCK, mask_function, (tokens, tokens)
    )


def _seen_with_prefixes(
    document: Tensor,  # (T,) int32
    begins: np.ndarray,  # (N,) first place of each document
    before: np.ndarray,  # (N,) first place of the tokens that it shares
    prefixes: np.ndarray,  # (N,)
    window: int | None,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Returns a mask function for documents that begin with a part of an earlier one."""
    # By document: the begin and end of the shared tokens, and how much farther they are than they look.
    begin_of, end_of, farther_of = (
        copied_to(torch.from_numpy(table.astype(np.int32)), document.device)[document]
        for table in (before, before + prefixes, begins - prefixes - before)
    )

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (document[query] == document[key]) & (key <= query)
        shared = (key >= begin_of[query]) & (key < end_of[query])
        if window is None:
            return own | shared
        distance = query - key
        return (own & (distance < window)) | (shared & (distance - farther_of[query] < window))

    return seen


def _in_order(blocks: np.ndarray, device: str) -> tuple[Tensor, Tensor]:
    """Returns the number of key blocks of each block of queries (1, 1, R), and (1, 1, R, R) indices, theirs first."""
    counts = torch.from_numpy(blocks.sum(1, dtype=np.int32))
    indices = torch.from_numpy(np.argsort(~blocks, axis=1, kind="stable").astype(np.int32))
    return copied_to(counts[None, None], device), copied_to(indices[None, None], device)


def flex_documents_attention(call: AttentionCall, documents: BlockMasks) -> Tensor:  # (1, T, H, D)
    if call.dropout:
        raise ValueError("FlexAttention has no dropout: set model.attention: auto")
    query, key, value = in_one_type(*call[:3])
    softcap: Any = call.softcap

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    attend: Any = partial(
        flex_attention if torch.compiler.is_compiling() else _compiled(),
        query,
        key,
        value,
        score_mod=None if softcap is None else cap,
        block_mask=documents.masks[call.window],
        scale=call.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if call.sinks is None:
        return attend().transpose(1, 2).contiguous()
    out, aux = attend(return_aux=AuxRequest(lse=True))  # its backward takes the gradient of lse, unlike varlen's
    share = torch.sigmoid(aux.lse - call.sinks.to(aux.lse.dtype)[:, None])  # (1, H, T)
    return (out * share[..., None]).to(out.dtype).transpose(1, 2).contiguous()


@cache
def _compiled() -> Any:
    """Returns the compiled kernel, at first use: torch.compile takes seconds to import."""
    return torch.compile(flex_attention)


register(FLEX, flex_documents_attention)
