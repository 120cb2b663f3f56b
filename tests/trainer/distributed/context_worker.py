"""Inside each of several gloo processes: attention over a row whose tokens they share, against the row on one.

Started by `torch.multiprocessing.spawn`; what does not hold raises there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.testing import assert_close

LAYOUTS = ((16,), (1,) * 16, (1, 14, 1), (3, 8, 1, 4), (9, 7))


def run(rank: int, size: int, meeting: str, check: Callable[[int, Any], None], divisions: list[dict[str, Any]]) -> None:
    """meeting: a file by which the processes find each other. divisions: of `Parallelism`."""
    from finetune.engine.parallelism import Parallelism

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(meeting).as_uri(), rank=rank, world_size=size)
    try:
        for sizes in divisions:
            check(rank, Parallelism(**sizes))
    finally:
        dist.destroy_process_group()


def shared(rank: int, sizes: Any) -> tuple[Any, Any]:
    """(this rank's share, its attention)"""
    from finetune.data.batch import TokenShare
    from finetune.engine.context_parallel import apply_context_parallel
    from finetune.models.attention import DOCUMENTS, AttentionChoice, per_document

    place = sizes.coordinates(rank)
    share = TokenShare(sizes.context, sizes.sequence, place["context"], place["sequence"])
    within = AttentionChoice(DOCUMENTS, "one call a document", True, per_document.prepare)
    return share, apply_context_parallel(within, share, sizes, rank)


def exchanges(rank: int, sizes: Any) -> None:
    """Values and gradients, with as many key heads as there can be; in fp64, and bf16 stays near."""
    for lengths in LAYOUTS:
        for groups in (1, 2, 4):
            compared(rank, sizes, lengths, groups, torch.float64, 1e-12)
    compared(rank, sizes, (3, 8, 1, 4), 2, torch.float32, 2e-5)
    compared(rank, sizes, (3, 8, 1, 4), 2, torch.bfloat16, 0.06)
    if sizes.context == 1:
        compared(rank, sizes, (3, 8, 1, 4), 2, torch.float64, 1e-12, window=3)
        compared(rank, sizes, (3, 8, 1, 4), 2, torch.float64, 1e-12, softcap=0.5)
        compared(rank, sizes, (3, 8, 1, 4), 2, torch.float64, 1e-12, window=3, sinks=True)
    for lengths in LAYOUTS:
        compared(rank, sizes, lengths, 2, torch.float64, 1e-12, sinks=True)


def sums(rank: int, sizes: Any) -> None:
    """Of a loss that is not linear in a sum over the row's tokens: its value on each rank, and tokens' gradients."""
    from finetune.data.batch import TokenShare
    from finetune.engine.context_parallel import token_ranks

    place, ranks = sizes.coordinates(rank), token_ranks(sizes, rank)
    here = TokenShare(sizes.context, sizes.sequence, place["context"], place["sequence"]).places(16)
    whole = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    loss = torch.stack([part.sum() for part in whole.split(8)]).exp().sum()
    (expected,) = torch.autograd.grad(loss, whole)
    mine = whole.detach()[here].requires_grad_()
    parts = torch.stack([mine[here < 8].sum(), mine[here >= 8].sum()])  # some ranks have nothing of one
    share = ranks.share(ranks.sum(parts).exp().sum())
    assert_close(share.detach() * sizes.tokens, loss.detach())
    share.backward()
    assert_close(mine.grad, expected[here])
    assert ranks.count == sizes.tokens
    assert ranks.sum(torch.zeros(0)).shape == (0,)


def compared(
    rank: int,
    sizes: Any,
    lengths: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
    close: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> None:
    from finetune.engine.context_parallel import shared_attention
    from finetune.models.attention import per_document
    from finetune.models.attention.kernels import AttentionCall

    share, attention = shared(rank, sizes)
    generator, tokens = torch.Generator().manual_seed(sum(lengths[:2]) + groups), sum(lengths)
    whole = [
        torch.randn(1, h, tokens, 8, generator=generator, dtype=dtype).requires_grad_() for h in (4, groups, groups)
    ]
    gradient = torch.randn(1, tokens, 4, 8, generator=generator, dtype=dtype)
    scores = torch.randn(4, generator=generator, dtype=dtype).requires_grad_()

    def call(query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        return AttentionCall(query, key, value, window=window, softcap=softcap, sinks=scores if sinks else None)

    out = per_document.one_by_one(call(*whole), per_document.DocumentLengths(lengths))
    expected = torch.autograd.grad(out, [*whole, scores], gradient, allow_unused=True)

    here = torch.from_numpy(share.places(tokens))
    mine = [tensor.detach()[:, :, here].requires_grad_() for tensor in whole]
    row = attention.forward_arguments(lengths)["documents"]
    found = shared_attention(call(*mine), row)
    gradients = torch.autograd.grad(found, [*mine, scores], gradient[:, here], allow_unused=True)
    where = f"rank {rank} of {sizes.summary()} {sizes.exchange}, {lengths}, {groups} groups, {dtype}"
    pairs = [(found, out[:, here]), *((a, b[:, :, here]) for a, b in zip(gradients[:3], expected[:3], strict=True))]
    if sinks:  # a parameter of every rank: its gradients are added up
        total = gradients[3].clone()
        dist.all_reduce(total)
        pairs.append((total * sizes.tokens / dist.get_world_size(), expected[3]))
    for a, b in pairs:
        assert a.dtype == dtype
        assert_close(a, b, rtol=close, atol=close, msg=lambda text: f"{where}: {text}")


def documents(rank: int, sizes: Any) -> None:
    """Through a whole model: a token that changes moves nothing in another document, and no gradient goes there."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from finetune.engine.context_parallel import SHARED_TOKENS
    from finetune.models.activations import recompute_activations

    torch.manual_seed(0)
    shape = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, attn_implementation=SHARED_TOKENS)
    model = AutoModelForCausalLM.from_config(config).train()
    lengths, changed_place = (7, 21, 3, 9), 9  # the second document, which every cut divides
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 380, (1, sum(lengths)), generator=generator)
    other = ids.clone()
    other[0, changed_place] = 5 if ids[0, changed_place] != 5 else 6
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))

    share, attention = shared(rank, sizes)
    here = torch.from_numpy(share.places(sum(lengths)))
    row = attention.forward_arguments(lengths)

    def logits(of: Tensor) -> Tensor:
        embedded = model.get_input_embeddings()(of[:, here]).detach().requires_grad_()
        out = model(inputs_embeds=embedded, position_ids=positions[:, here], use_cache=False, **row).logits[0]
        (gradient,) = torch.autograd.grad(out[document[here] == 1].square().sum(), embedded)
        touched.append(gradient[0].abs().sum(-1) > 0)
        return out.detach()

    for checkpointing in (False, True):
        recompute_activations(model, checkpointing)
        touched: list[Tensor] = []
        before, after = logits(ids), logits(other)
        moved = (before != after).any(-1)
        behind = (document[here] == 1) & (here >= changed_place)
        assert torch.equal(moved, behind), f"rank {rank} of {sizes.summary()} {sizes.exchange}: {here[moved]} moved"
        for found in touched:
            assert torch.equal(found, document[here] == 1), f"rank {rank} of {sizes.summary()} {sizes.exchange}"


def generating(rank: int, sizes: Any) -> None:
    """No documents but a padding mask: every rank has whole prompts, and asks no other."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from finetune.engine.context_parallel import SHARED_TOKENS

    shape = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    found = []
    for implementation in (SHARED_TOKENS, "sdpa"):
        torch.manual_seed(0)
        config = LlamaConfig(**shape, num_attention_heads=4, attn_implementation=implementation)
        model = AutoModelForCausalLM.from_config(config).eval()
        ids, mask = torch.arange(12).view(2, 6) + 3, torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
        found.append(model(input_ids=ids, attention_mask=mask, use_cache=True).logits[:, -1])
    assert_close(found[0], found[1])


def everything(rank: int, sizes: Any) -> None:
    sums(rank, sizes)
    exchanges(rank, sizes)
    documents(rank, sizes)
    generating(rank, sizes)
