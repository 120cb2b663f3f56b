"""Bytes that a process sends in an optimizer step, from the architecture and how the work is divided.

Every line is a collective, by the algorithm that moves the least: an all-reduce of b bytes over n ranks sends
2 (n-1)/n b from each (ring: https://andrew.gibiansky.com/blog/machine-learning/baidu-allreduce/), an all-gather or a
reduce-scatter that ends or begins with b bytes (n-1)/n b, an all-to-all of b bytes on each (n-1)/n b. What libraries
send besides (headers, sizes, small reductions of the loss and the norm) is left out. Measured beside it:
benchmarks/communication.py.

Letters, each of one process: M micro-batches of a step, T tokens of a row's forward, D hidden size, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from finetune.engine.parallelism import Parallelism


class Traffic(NamedTuple):
    what: str
    collective: str
    sent: float  # bytes, by one process on average, in an optimizer step


@dataclass(frozen=True)
class Work:
    """A model and its step, as far as they are communicated. Sizes of whole tensors in bytes, times in a step."""

    layer_weights: float  # of all decoder layers, in the type they are gathered in
    other_weights: float  # embedding, final norm, head
    tail_weights: float  # of these norm and head, which FSDP2 keeps between forward and backward
    gradients: float  # of all that trains, fp32
    layers: int
    hidden: int
    query: int  # heads x head size
    keys: int  # key/value heads x head size
    element: int  # bytes of an activation
    micro_batches: int
    tokens: int  # of one forward's rows, over all ranks that share them
    recomputes: bool  # activation checkpointing of whole layers: a layer's forward runs twice
    expert_weights: float = 0.0  # of `layer_weights`, with their gradients' share of `gradients`
    experts_per_token: int = 0
    moe_layers: int = 0


def all_reduce(ranks: int, size: float) -> float:
    return 2 * (ranks - 1) / ranks * size


def one_way(ranks: int, size: float) -> float:
    """All-gather to `size`, reduce-scatter from `size`, all-to-all of `size` on each rank."""
    return (ranks - 1) / ranks * size


def traffic(backend: str, parallelism: Parallelism, work: Work) -> list[Traffic]:
    """backend: ddp, fsdp2, zero2 or zero3. Lines that send nothing are left out."""
    lines = [*_WEIGHTS[backend](parallelism, work), *_activations(parallelism, work)]
    return [line for line in lines if line.sent > 0]


def _ddp(parallelism: Parallelism, work: Work) -> Iterator[Traffic]:
    """Of a pipeline's stages on average. Tensor ranks share embedding and head, which they keep, as FSDP2 does it."""
    if parallelism.tensor > 1:
        yield from _fsdp2(parallelism, work, gathers=1)
        return
    gradients = work.gradients / parallelism.pipeline
    yield Traffic("gradients", "all-reduce", all_reduce(parallelism.data * parallelism.tokens, gradients))


def _fsdp2(parallelism: Parallelism, work: Work, gathers: int = 2) -> Iterator[Traffic]:
    """A micro-batch gathers for the forward, again for the backward, and scatters its gradients. Tensor ranks share
    embedding and head as shards."""
    group = parallelism.shard * parallelism.tokens
    everyone = group * parallelism.tensor
    ratio = work.gradients / (work.layer_weights + work.other_weights)  # of what trains
    layers = (work.layer_weights - (work.expert_weights if parallelism.expert > 1 else 0.0)) / parallelism.tensor
    if parallelism.expert > 1:
        held, same = work.expert_weights / parallelism.expert, group // parallelism.expert
        yield Traffic("experts", "all-gather", work.micro_batches * gathers * one_way(same, held))
        yield Traffic("experts' gradients", "reduce-scatter", work.micro_batches * one_way(same, held * ratio))
    ends = gathers * (work.other_weights - work.tail_weights) + work.tail_weights
    gathered = gathers * one_way(group, layers) + one_way(everyone, ends)
    yield Traffic("weights", "all-gather", work.micro_batches * gathered)
    scattered = one_way(group, layers * ratio) + one_way(everyone, work.other_weights * ratio)
    yield Traffic("gradients", "reduce-scatter", work.micro_batches * scattered)
    if parallelism.replicate > 1:
        shard = layers * ratio / group + work.other_weights * ratio / everyone
        yield Traffic(
            "gradients of a shard", "all-reduce", work.micro_batches * all_reduce(parallelism.replicate, shard)
        )


def _zero2(parallelism: Parallelism, work: Work) -> Iterator[Traffic]:
    """DeepSpeed reduces on every rank and keeps a part (deepspeed/runtime/zero/stage_1_and_2.py,
    allreduce_and_scatter), at each micro-batch."""
    group = parallelism.data * parallelism.tokens
    yield Traffic("gradients", "all-reduce", work.micro_batches * all_reduce(group, work.gradients))
    yield Traffic("stepped weights", "all-gather", one_way(group, work.gradients))


def _zero3(parallelism: Parallelism, work: Work) -> Iterator[Traffic]:
    group, weights = parallelism.data * parallelism.tokens, work.layer_weights + work.other_weights
    forwards = 3 if work.recomputes else 2  # a recomputed layer is gathered for it, and for its backward
    yield Traffic("weights", "all-gather", work.micro_batches * forwards * one_way(group, weights))
    yield Traffic("gradients", "reduce-scatter", work.micro_batches * one_way(group, work.gradients))


_WEIGHTS = {"ddp": _ddp, "fsdp2": _fsdp2, "zero2": _zero2, "zero3": _zero3}


def _activations(parallelism: Parallelism, work: Work) -> Iterator[Traffic]:
    passes = 3 if work.recomputes else 2  # forward, again, backward
    here = work.tokens / parallelism.tokens  # tokens of this rank
    times = work.micro_batches * work.layers / parallelism.pipeline
    hidden = here * work.hidden * work.element
    keys = 2 * work.keys * work.element  # keys and values of a token
    if (n := parallelism.tensor) > 1:
        yield Traffic("hidden states", "all-reduce", times * passes * 2 * all_reduce(n, hidden))
    if (n := parallelism.context) > 1:
        row = here * n * keys
        if parallelism.exchange == "allgather":
            yield Traffic("keys and values", "all-gather", times * passes * one_way(n, row))
            yield Traffic("gradients of keys and values", "reduce-scatter", times * one_way(n, row))
        else:
            yield Traffic(
                "keys, values and their gradients", parallelism.exchange, times * (passes + 1) * one_way(n, row)
            )
    if (n := parallelism.sequence) > 1:
        exchanged = here * (2 * work.query * work.element + keys)
        yield Traffic("queries, keys, values and outputs", "all-to-all", times * passes * one_way(n, exchanged))
    if (n := parallelism.pipeline) > 1:
        borders = (n * parallelism.stages_per_rank - 1) / n  # for each rank, on average
        yield Traffic("hidden states to the next stage and back", "send", work.micro_batches * 2 * borders * hidden)
    if (n := parallelism.expert) > 1:
        routed = hidden * work.experts_per_token
        moe = work.micro_batches * work.moe_layers
        yield Traffic("tokens to their experts and back", "all-to-all", moe * passes * 2 * one_way(n, routed))


def work_of(
    config: Any, parameters: dict[str, tuple[int, bool]], micro_batches: int, tokens: int, recomputes: bool
) -> Work:
    """config: transformers'. parameters: (numel, trained) by name, of the whole model, in fp32."""
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    in_layers = {name: numel for name, (numel, _) in parameters.items() if ".layers." in name}
    experts = {name: numel for name, numel in in_layers.items() if ".experts." in name}
    others = {name: numel for name, (numel, _) in parameters.items() if name not in in_layers}
    return Work(
        layer_weights=4.0 * sum(in_layers.values()),
        other_weights=4.0 * sum(others.values()),
        tail_weights=4.0
        * sum(numel for name, numel in others.items() if "embed" not in name or config.tie_word_embeddings),
        gradients=4.0 * sum(numel for numel, trained in parameters.values() if trained),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        query=text.num_attention_heads * size,
        keys=(getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * size,
        element=4,
        micro_batches=micro_batches,
        tokens=tokens,
        recomputes=recomputes,
        expert_weights=4.0 * sum(experts.values()),
        experts_per_token=getattr(text, "num_experts_per_tok", 0) or 0,
        moe_layers=len({name.split(".experts.")[0] for name in experts}),
    )
