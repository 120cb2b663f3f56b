"""`plan --probe`: what this machine reaches, from operators alone and from a short model of the recipe's layers.

    products, attention     at the recipe's sizes
    memory                  operators without products, from kilobytes in a cache to megabytes out of it
    operators               a forward and backward of a short model on a few tokens, where little else takes time
    factor                  the same on a row of tokens, against what all of the above says
    optimizer               AdamW and the gradient's norm
    data                    what a thread takes to put examples together to a row; not for images
    exchange                collectives between processes of this machine, on CPUs (`exchange.py`)

On one thread of a CPU the clock is the process' own, which other programs do not move.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

from finetune.data.batch import collate
from finetune.data.samples import Example
from finetune.data.samples import Sequence as TokenSequence
from finetune.engine.optimizer_step import squared_norm
from finetune.errors import UserError
from finetune.models.attention import DOCUMENTS
from finetune.models.config import dtypes
from finetune.planning.estimate.lengths import RowFacts
from finetune.planning.estimate.micro_batch import HeaviestBatch, How, real_micro_batch, short_model
from finetune.planning.estimate.operators import together
from finetune.planning.estimate.shapes import shapes_of, shortened
from finetune.planning.estimate.speed import MeasuredLinks, Shape, Speeds, flops_of
from finetune.planning.estimate.tables import Link
from finetune.planning.estimate.timeline import timeline_of
from finetune.recipe import Recipe

_SIZES = tuple(2**n for n in (13, 16, 19, 22, 25, 27))  # bytes of operators
_FEW, _MOST = 8, 1024  # tokens of the short model's rows
_LARGEST = 2**31  # bytes of the short model's weights


def probe(recipe: Recipe, config: PretrainedConfig, shape: Shape, rows: RowFacts, processes: int) -> Speeds:
    """Measures this machine at the recipe's sizes, in half a minute. processes: that would share its processors."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device is not None
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(max(1, min(threads, (psutil.cpu_count(logical=False) or 1) // processes)))
    try:
        speeds = _of_operators(recipe, shape, rows, Clock(device))
        speeds = _of_model(recipe, config, speeds, int(rows.tokens_per_row), Clock(device))
    finally:
        torch.set_num_threads(threads)
    if device.type == "cpu" and processes > 1:
        speeds = replace(speeds, exchange=_exchange())
    return speeds


class Clock:
    """Times what runs on a device."""

    def __init__(self, device: torch.device):
        self.device = device
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._now: Callable[[], float] = time.process_time if alone else time.perf_counter

    def now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return self._now()

    def median(self, run: Callable[[], Any], seconds: float = 0.3) -> float:
        """Returns the time of one call, of those that fit into some seconds; at least three."""
        run()
        times: list[float] = []
        end = self._now() + seconds
        while len(times) < 3 or (self._now() < end and len(times) < 200):
            began = self.now()
            run()
            times.append(self.now() - began)
        return statistics.median(times)


def _of_operators(recipe: Recipe, shape: Shape, rows: RowFacts, clock: Clock) -> Speeds:
    device, compute = clock.device, dtypes(recipe).compute
    tokens = int(min(max(rows.tokens_per_row, 64), 4096))
    x = torch.randn(tokens, shape.hidden, device=device, dtype=compute)
    weight = torch.randn(int(shape.inner), shape.hidden, device=device, dtype=compute)
    products = 2.0 * x.numel() * weight.shape[0] / clock.median(lambda: x @ weight.T)
    length = int(min(max(max(row) for row in rows.sample), 4096))
    heads = torch.randn(1, max(1, shape.queries // 64), length, 64, device=device, dtype=compute)
    pairs = length * (length + 1) / 2 * 4 * 64 * heads.shape[1]
    attention = pairs / clock.median(lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True))
    tiny = torch.ones(8, device=device)
    started = clock.median(lambda: tiny * tiny)
    memory: list[tuple[float, float]] = []
    for size in _SIZES:
        a, b = (torch.ones(size // 12, device=device) for _ in range(2))
        memory.append((float(size), size / max(1e-7, clock.median(lambda a=a, b=b: a * b) - started)))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's processors"
    source = f"probe, on {name}"
    speeds = Speeds(products, attention, tuple(memory), source, started, device.type != "cpu", _stepped(shape, clock))
    return speeds if recipe.model.train is not None else replace(speeds, prepare_token_s=_prepared(rows))


def _prepared(rows: RowFacts) -> float:
    """Returns the seconds that a token of a row takes, of a thread on the host."""
    row = max(rows.sample, key=len)
    documents = [TokenSequence(np.zeros(length, np.int32), np.arange(length) > 0) for length in row]
    examples = [Example("", 1, 0, (document,), {}) for document in documents]
    return Clock(torch.device("cpu")).median(lambda: collate(examples)) / sum(row)


def _stepped(shape: Shape, clock: Clock) -> float:
    """Returns the elements that clipping and AdamW step in a second, without what each tensor takes."""
    wide = max(1024, min(shape.hidden, 4096))
    weights = [torch.nn.Parameter(torch.ones(wide, 1024, device=clock.device)) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=True)

    def step() -> None:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        squared_norm(gradients, clock.device)
        torch._foreach_mul_(gradients, 1.0)
        optimizer.step()

    return sum(weight.numel() for weight in weights) / clock.median(step)


# --- a short model


def _of_model(recipe: Recipe, config: PretrainedConfig, speeds: Speeds, tokens: int, clock: Clock) -> Speeds:
    """Returns speeds that give what forward and backward of a short model of these layers take: on a few tokens by the
    host's time for an operator, on a row by the rates of all else."""
    short = short_model(config)
    weights = 4 * sum(weight.packed or weight.numel for weight in shapes_of(recipe, short).weights)
    if clock.device.type != "cpu" or weights > _LARGEST:
        return replace(speeds, source=f"{speeds.source}, of single operators")
    few, many = (_measured(recipe, short, count, speeds, clock) for count in (_FEW, min(tokens, _MOST)))
    each = max(speeds.operator_s, (few.took * many.rest - many.took * few.rest) / few.minus(many))
    factor = max(0.1, (many.took - many.operators * each) / many.rest)
    return replace(
        speeds,
        operator_s=each,
        products=speeds.products / factor,
        attention=speeds.attention / factor,
        memory=tuple((size, reached / factor) for size, reached in speeds.memory),
    )


@dataclass(frozen=True)
class _Run:
    operators: float  # a view is half of one
    rest: float  # s, by formula
    took: float  # s

    def minus(self, longer: _Run) -> float:
        """Returns the determinant of both runs' equations, took = operators * each + factor * rest."""
        return self.operators * longer.rest - longer.operators * self.rest


def _measured(recipe: Recipe, short: PretrainedConfig, tokens: int, speeds: Speeds, clock: Clock) -> _Run:
    batch = HeaviestBatch((tokens,), tokens - 1)
    parts = timeline_of(recipe, short, batch, How(device="cpu", gradients_there=True))
    kinds = shortened(short)[1]
    layers = [part[kind] for kind in kinds for part in (parts.layers, parts.layers_backward)]
    ends = [parts.before, parts.head, parts.head_backward, parts.before_backward]
    work = together([part.work for part in (*layers, *ends)])
    recomputes = recipe.train.activation_checkpointing is True
    flops = flops_of(recipe, short, DOCUMENTS, recomputes)
    products = (flops.token_forward + flops.token_backward + flops.token_recomputed) * tokens + flops.head * (
        tokens - 1
    )
    every = flops.of((tokens,), (tokens,), tokens - 1)[1 if flops.hardware_known else 0]
    rest = products / speeds.products + max(0.0, every - products) / speeds.attention + speeds.moving(work)
    took = clock.median(real_micro_batch(recipe, short, batch), 2.0)
    return _Run(work.operators + work.views / 2, rest, took)


# --- processes of this machine


def _exchange() -> MeasuredLinks:
    """Runs `exchange.py` in two processes. Raises UserError."""
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        port = there.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "finetune.planning.estimate.exchange"]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **group, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise UserError("plan --probe: two processes of this machine could not talk to each other; see above")
    links = {
        name: Link(gb_s=found["bytes_s"] / 1e9, latency_us=found["latency_s"] * 1e6, share=1.0, source="probe")
        for name, found in json.loads(said[0]).items()
    }
    return MeasuredLinks(**links)
