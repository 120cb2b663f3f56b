"""Communication of an optimizer step and memory of a run's state, per process, from architecture and parallelism.

Each line of `traffic` is a collective, by the algorithm that sends the least: an all-reduce of b bytes over n ranks
sends 2 (n-1)/n b from each (ring: https://andrew.gibiansky.com/blog/machine-learning/baidu-allreduce/), an all-gather
or reduce-scatter of b bytes (n-1)/n b, an all-to-all of b bytes on each (n-1)/n b. Headers, sizes and small reductions
(loss, norm) are left out. Compared with measurements by benchmarks/communication.py.

`state_bytes` counts weights, gradients and AdamW's two moments, all in fp32; activations and libraries come on top.
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
class StepSizes:
    """Sizes that communication depends on. Unsharded tensors, in bytes."""

    layer_weights: float  # of all decoder layers, in the type they are gathered in
    other_weights: float  # embedding, final norm, head
    tail_weights: float  # norm and head only, which FSDP2 keeps between forward and backward
    gradients: float  # of all trained parameters, fp32
    layers: int
    hidden: int
    query: int  # heads x head size
    keys: int  # key/value heads x head size
    element: int  # bytes of an activation
    micro_batches: int
    tokens: int  # of one micro-batch, over all ranks that share it
    recomputes: bool  # full activation checkpointing: a layer's forward runs twice
    expert_weights: float = 0.0  # part of `layer_weights`; their gradients are part of `gradients`
    experts_per_token: int = 0
    moe_layers: int = 0


def all_reduce(ranks: int, size: float) -> float:
    return 2 * (ranks - 1) / ranks * size


def one_way(ranks: int, size: float) -> float:
    """Bytes sent by an all-gather to `size`, a reduce-scatter from `size`, or an all-to-all of `size` per rank."""
    return (ranks - 1) / ranks * size


def traffic(backend: str, parallelism: Parallelism, work: StepSizes) -> list[Traffic]:
    """Returns the collectives that send something. backend: ddp, fsdp2, zero2 or zero3."""
    lines = [*_WEIGHTS[backend](parallelism, work), *_activations(parallelism, work)]
    return [line for line in lines if line.sent > 0]


def _ddp(parallelism: Parallelism, work: StepSizes) -> Iterator[Traffic]:
    """Averages over pipeline stages. Tensor ranks shard embedding and head, and keep them gathered, through FSDP2."""
    if parallelism.tensor > 1:
        yield from _fsdp2(parallelism, work, gathers=1)
        return
    gradients = work.gradients / parallelism.pipeline
    yield Traffic("gradients", "all-reduce", all_reduce(parallelism.data * parallelism.tokens, gradients))


def _fsdp2(parallelism: Parallelism, work: StepSizes, gathers: int = 2) -> Iterator[Traffic]:
    """Each micro-batch gathers for forward and backward and scatters gradients. Tensor ranks shard embedding and
    head."""
    group = parallelism.shard * parallelism.tokens
    all_ranks = group * parallelism.tensor
    ratio = work.gradients / (work.layer_weights + work.other_weights)  # trained share
    layers = (work.layer_weights - (work.expert_weights if parallelism.expert > 1 else 0.0)) / parallelism.tensor
    if parallelism.expert > 1:
        experts, replicas = work.expert_weights / parallelism.expert, group // parallelism.expert
        yield Traffic("experts", "all-gather", work.micro_batches * gathers * one_way(replicas, experts))
        yield Traffic("experts' gradients", "reduce-scatter", work.micro_batches * one_way(replicas, experts * ratio))
    ends = gathers * (work.other_weights - work.tail_weights) + work.tail_weights
    gathered = gathers * one_way(group, layers) + one_way(all_ranks, ends)
    yield Traffic("weights", "all-gather", work.micro_batches * gathered)
    scattered = one_way(group, layers * ratio) + one_way(all_ranks, work.other_weights * ratio)
    yield Traffic("gradients", "reduce-scatter", work.micro_batches * scattered)
    if parallelism.replicate > 1:
        shard = layers * ratio / group + work.other_weights * ratio / all_ranks
        yield Traffic(
            "gradients of a shard", "all-reduce", work.micro_batches * all_reduce(parallelism.replicate, shard)
        )


def _zero2(parallelism: Parallelism, work: StepSizes) -> Iterator[Traffic]:
    """DeepSpeed reduces on every rank and keeps a part (deepspeed/runtime/zero/stage_1_and_2.py,
    allreduce_and_scatter), at each micro-batch."""
    group = parallelism.data * parallelism.tokens
    yield Traffic("gradients", "all-reduce", work.micro_batches * all_reduce(group, work.gradients))
    yield Traffic("stepped weights", "all-gather", one_way(group, work.gradients))


def _zero3(parallelism: Parallelism, work: StepSizes) -> Iterator[Traffic]:
    group, weights = parallelism.data * parallelism.tokens, work.layer_weights + work.other_weights
    gathers = 3 if work.recomputes else 2  # recomputation gathers a layer once more
    yield Traffic("weights", "all-gather", work.micro_batches * gathers * one_way(group, weights))
    yield Traffic("gradients", "reduce-scatter", work.micro_batches * one_way(group, work.gradients))


_WEIGHTS = {"ddp": _ddp, "fsdp2": _fsdp2, "zero2": _zero2, "zero3": _zero3}


def _activations(parallelism: Parallelism, work: StepSizes) -> Iterator[Traffic]:
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


def step_sizes(
    config: Any, parameters: dict[str, tuple[int, bool]], micro_batches: int, tokens: int, recomputes: bool
) -> StepSizes:
    """config: of transformers. parameters: (numel, trained) by name, of the unsharded model, in fp32."""
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    in_layers = {name: numel for name, (numel, _) in parameters.items() if ".layers." in name}
    experts = {name: numel for name, numel in in_layers.items() if ".experts." in name}
    others = {name: numel for name, (numel, _) in parameters.items() if name not in in_layers}
    return StepSizes(
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


FP32 = 4
MOMENTS = 2  # https://arxiv.org/abs/1711.05101


class StateBytes(NamedTuple):
    weights: float
    gradients: float
    optimizer_state: float  # including a backend's master weights

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class ParameterCounts:
    layers: int  # in decoder layers, experts included
    others: int  # embedding, final norm, head
    trained: float  # share of all


def state_bytes(backend: str, parallelism: Parallelism, counts: ParameterCounts) -> StateBytes:
    """Returns the state of the average process; a pipeline's first and last stage hold more, the others less.

    backend: ddp, fsdp2, zero2 or zero3, counted as in ZeRO (https://arxiv.org/abs/1910.02054, figure 1).
    """
    # Tensor ranks shard every parameter; divided experts are shards, too.
    unsharded = (counts.layers + counts.others) / parallelism.tensor / parallelism.pipeline
    group = parallelism.shard * parallelism.tokens if backend != "ddp" else 1
    trained = unsharded * counts.trained / group
    weights = unsharded if backend in ("ddp", "zero2") else unsharded / group
    masters = trained if backend.startswith("zero") else 0.0  # DeepSpeed's flat fp32 groups
    return StateBytes(FP32 * weights, FP32 * trained, FP32 * (MOMENTS * trained + masters))
