"""Attention put together from pieces of a row is attention within each document: values and gradients, in fp64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.data.batch import Stretches, TokenShare
from finetune.models.attention import per_document
from finetune.models.attention.kernels import AttentionCall
from finetune.models.attention.pieces import (
    attend,
    attend_backward,
    attend_block,
    attend_block_backward,
    merge,
    nothing_seen,
    pieces,
)

HEADS, SIZE, SCALE = 4, 8, 0.3
Tensors = tuple[Tensor, Tensor, Tensor]


def row(tokens: int, groups: int, value_size: int = SIZE, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, SIZE), (groups, SIZE), (groups, value_size))
    made = (torch.randn(1, h, tokens, d, generator=generator, dtype=torch.float64) for h, d in shapes)
    query, key, value = (tensor.requires_grad_() for tensor in made)
    return query, key, value


def reference(tensors: Tensors, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensors]:
    """(output, its gradient, gradients)"""
    out = per_document.one_by_one(
        AttentionCall(*tensors, scaling=SCALE), per_document.DocumentLengths(lengths)
    ).transpose(1, 2)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    q, k, v = torch.autograd.grad(out, tensors, gradient)
    return out.detach(), gradient, (q, k, v)


def places(stretches: Stretches) -> Tensor:
    return torch.cat([torch.arange(*stretch) for stretch in stretches])


def check(lengths: tuple[int, ...], context: int, groups: int, arrivals_of: str, value_size: int = SIZE) -> None:
    tokens, share = sum(lengths), TokenShare(context)
    tensors = row(tokens, groups, value_size)
    expected, gradient, (of_query, of_key, of_value) = reference(tensors, lengths)
    query, key, value = (tensor.detach() for tensor in tensors)
    key_value = torch.cat([key, value], dim=-1)
    of_key_value = torch.zeros_like(key_value)
    ranks = [share.stretches(tokens, rank) for rank in range(context)]
    for mine in ranks:
        here = places(mine)
        arrivals = [((0, tokens),)] if arrivals_of == "the row" else ranks
        whole, mine_of_query = nothing_seen(query[:, :, here], value_size), torch.zeros_like(query[:, :, here])
        for theirs in arrivals:
            attend(query[:, :, here], key_value[:, :, places(theirs)], pieces(lengths, mine, theirs), SCALE, whole)
        torch.testing.assert_close(whole.out, expected[:, :, here], rtol=0, atol=1e-12)
        for theirs in arrivals:
            there = places(theirs)
            part = torch.zeros_like(key_value[:, :, there])
            found = pieces(lengths, mine, theirs)
            q, g = query[:, :, here], gradient[:, :, here]
            attend_backward(g, q, key_value[:, :, there], whole, found, SCALE, mine_of_query, part)
            of_key_value[:, :, there] += part
        torch.testing.assert_close(mine_of_query, of_query[:, :, here], rtol=0, atol=1e-12)
    torch.testing.assert_close(of_key_value, torch.cat([of_key, of_value], dim=-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("arrivals_of", ["the row", "each rank"])
@given(
    context=st.integers(2, 4),
    chunk=st.integers(1, 5),
    ends=st.sets(st.integers(1, 39)),
    groups=st.sampled_from([1, 2, 4]),
)
def test_any_documents_on_any_ranks(arrivals_of: str, context: int, chunk: int, ends: set[int], groups: int) -> None:
    tokens = 2 * context * chunk
    bounds = [0, *sorted(end for end in ends if end < tokens), tokens]
    lengths = tuple(b - a for a, b in pairwise(bounds))
    check(lengths, context, groups, arrivals_of)


@pytest.mark.parametrize("arrivals_of", ["the row", "each rank"])
@pytest.mark.parametrize("cut", range(1, 8))
def test_a_document_cut_at_every_place(arrivals_of: str, cut: int) -> None:
    check((cut, 8 - cut), 2, 2, arrivals_of)


@pytest.mark.parametrize("lengths", [(1,) * 8, (8,), (1, 6, 1)])
def test_the_shortest_and_the_longest(lengths: tuple[int, ...]) -> None:
    check(lengths, 2, 2, "each rank")


def test_values_of_another_size() -> None:
    """Multi-head latent attention; no fused kernel takes it."""
    check((3, 8, 5), 2, 4, "the row", value_size=4)


def test_every_pair_is_in_one_piece_and_no_other() -> None:
    """Of the places, not of the numbers that attention gives."""
    lengths, context = (3, 8, 1, 12), 3
    tokens, share = sum(lengths), TokenShare(context)
    seen = torch.zeros(tokens, tokens, dtype=torch.int64)
    ranks = [share.stretches(tokens, rank) for rank in range(context)]
    for mine in ranks:
        for theirs in ranks:
            for piece in pieces(lengths, mine, theirs):
                q, k = places(mine)[piece.queries], places(theirs)[piece.keys]
                pairs = torch.ones(len(q), len(k), dtype=torch.int64)
                seen[q[:, None], k[None, :]] += pairs.tril() if piece.causal else pairs
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    assert torch.equal(seen, (document[:, None] == document[None, :]).long().tril())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_the_fused_kernel_is_the_formula(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, causal: bool) -> None:
    query, key, value = (tensor.detach().to(dtype) for tensor in row(6, 2))
    gradient = torch.ones_like(query)
    found = []
    for kernel in ("cpu", None):
        monkeypatch.setattr("finetune.models.attention.pieces._kernel", lambda *_, kernel=kernel: kernel)
        there = attend_block(query, key, value, SCALE, causal)
        found.append((*there, *attend_block_backward(gradient, query, key, value, there, SCALE, causal)))
    close = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
    for fused, plain in zip(*found, strict=True):
        assert fused.shape == plain.shape
        torch.testing.assert_close(fused.double(), plain.double(), rtol=close, atol=close)


def test_merging_nothing_changes_nothing() -> None:
    query, key, value = (tensor.detach() for tensor in row(5, 4))
    part = attend_block(query, key, value, SCALE, True)
    into = nothing_seen(query, SIZE)
    merge(into, part)
    assert torch.equal(into.out, part.out)
    assert torch.equal(into.lse, part.lse)


def test_cuda_kernels_are_given_keys_of_each_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices that are not there: shapes alone. Repeated to all heads they would take their memory H / K times."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    seen: dict[str, list[tuple[int, ...]]] = {}

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "flash_attention" in func.name():
                seen[func.name()] = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.device("cuda"), Kernels():
        query, key = (torch.empty(1, heads, 32, 64, dtype=torch.bfloat16) for heads in (4, 2))
        part = attend_block(query, key, key, SCALE, causal=True)
        gradients = attend_block_backward(query, query, key, key, part, SCALE, causal=True)
    assert [tuple(gradient.shape) for gradient in gradients] == [tuple(t.shape) for t in (query, key, key)]
    forward, backward = seen["aten::_flash_attention_forward"], seen["aten::_flash_attention_backward"]
    assert forward[:3] == [(1, 32, 4, 64), (1, 32, 2, 64), (1, 32, 2, 64)]
    assert backward[1:4] == forward[:3]
