"""Tests on a tiny copy of a model whether its layers compute the same on tensor parallel ranks, and whether they do if
each rank has some of the tokens between the matrices. transformers' plan says what matrices do, not what a layer's own
forward does around them, such as mixing tokens (a convolution), adding something that has all of them, or taking the
mean of features of which a rank has some (the sparse activations of Gemma 3n).

Two threads stand in for the ranks of a group. Logits and every gradient are compared with the whole copy's.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from finetune.data.media.family_table import FAMILIES
from finetune.engine import split_tokens, tensor_experts, tensor_group, tensor_parallel
from finetune.engine.tensor_group import ShardedParameters, TensorGroup
from finetune.errors import UserError
from finetune.models.config import EXPERTS_STYLE, active_dropouts, tensor_plan
from finetune.models.remote_code import from_config
from finetune.models.text_part import name_body, text_config
from finetune.models.tiny_config import VOCABULARY, WINDOW, tiny_config
from finetune.models.trials import FAILURES, cached, not_tried, randomize, tiny_problem

log = logging.getLogger(__name__)
_TOLERANCE = 1e-5  # of the largest element
_RANKS, _TOKENS = 2, 2 * WINDOW + 1  # which they cannot divide evenly
_TIMEOUT_S = 60.0  # for the other thread


def token_split_problem(config: PretrainedConfig) -> str | None:
    """Returns why each rank has all tokens between the matrices of a model; None if it has some."""
    text = _text(config)
    if EXPERTS_STYLE in tensor_plan(config).values():
        return "its experts take all tokens of a row"
    family = FAMILIES.get(config.model_type)
    if family is not None and any("deepstack" in path for path in family.projector):
        return "its tower adds features of pictures to all tokens of a row between its layers"
    for name, _ in active_dropouts(text):
        return f"the model's `{name}` would draw for other tokens than one process does"
    return tiny_problem(text, tiny_config, f"tokens {_version()}", _differ_or_refused)


def _differ_or_refused(tiny: Any) -> str | None:
    try:
        return differ(tiny, splits_tokens=True)
    except UserError as error:
        return f"a tiny copy could not be divided ({error})"


def tensor_split_problem(config: PretrainedConfig) -> str | None:
    """Returns what tensor parallel ranks would compute otherwise than one process; None if nothing, or if a copy cannot
    tell: it cannot be made, or is refused, as the run then is by its own sizes."""
    if not tensor_plan(config) or token_split_problem(config) is None:
        return None
    try:
        tiny = tiny_config(_text(config))
        kept = {"may_keep": lambda outcome: outcome["why"] is None}
        return cached(tiny, f"divided {_version()}", lambda: {"why": differ(tiny, splits_tokens=False)}, **kept)["why"]
    except UserError:
        return None
    except FAILURES as error:
        log.warning("tensor parallel: %s", not_tried(error))
        return None


def _text(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of a model's text, for which transformers' auto class then has a class."""
    return text_config(config, has_head=True) if config.model_type in FAMILIES else config.get_text_config()


def _version() -> str:
    files = (__file__, split_tokens.__file__, tensor_group.__file__, tensor_parallel.__file__)
    code = b"".join(Path(str(file)).read_bytes() for file in (*files, tensor_experts.__file__))
    return hashlib.sha256(code).hexdigest()


def differ(tiny: Any, splits_tokens: bool) -> str | None:
    """Returns what of a tiny copy differs on two ranks; None if nothing. Raises UserError if it cannot be divided."""
    torch.manual_seed(0)
    plain: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}  # not a run's
    whole: Any = from_config(AutoModelForCausalLM, copy.deepcopy(tiny), **plain)
    randomize(whole)
    name_body(whole)
    ranks, models = ThreadRanks(_RANKS), [copy.deepcopy(whole) for _ in range(_RANKS)]
    sharded = [
        tensor_parallel.parallelize(model, ThreadGroup(None, index, _RANKS, ranks), splits_tokens=splits_tokens)
        for index, model in enumerate(models)
    ]
    own, *ours = [_logits(whole), *ranks.run(_logits, models)]
    if not all(_same(logits, own) for logits in ours):
        return "a tiny copy gives other logits"
    return gradient_difference(whole, models, sharded)


def gradient_difference(
    whole: nn.Module, models: Sequence[nn.Module], sharded: Sequence[ShardedParameters]
) -> str | None:
    """Returns what differs between the gradients of a copy and of its ranks, each with its shards; None if nothing."""
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, wanted in expected.items():
        found = [torch.zeros_like(p) if (p := m.get_parameter(name)).grad is None else p.grad for m in models]
        if name in sharded[0].partial:
            found = [torch.stack(found).sum(0)] * len(models)
        parts = [one.shards[name].take(wanted) if name in one.shards else wanted for one in sharded]
        if not all(_same(*both, largest) for both in zip(found, parts, strict=True)):
            return f"a tiny copy gives another gradient of `{name}`"
    return None


def _same(one: Tensor, other: Tensor, largest: float | None = None) -> bool:
    atol = _TOLERANCE * (float(other.abs().max()) if largest is None else largest)
    return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE, atol=atol)


def _logits(model: Any) -> Tensor:
    """Returns the logits of a row, and leaves gradients."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (1, _TOKENS), generator=generator)
    logits = model(input_ids=ids, position_ids=torch.arange(_TOKENS)[None], use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach()


@dataclass
class ThreadRanks:
    """Threads of this process that stand in for the ranks of a group."""

    size: int
    sent: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.size, timeout=_TIMEOUT_S)

    def run(self, call: Any, arguments: list[Any]) -> list[Any]:
        """Returns the results of a call in each thread, with its own argument. Raises the first error of any."""

        def in_thread(argument: Any) -> Any:
            try:
                return call(argument)
            except BaseException:
                self._barrier.abort()  # the other threads wait for this one
                raise

        with ThreadPoolExecutor(self.size) as pool:
            done = [pool.submit(in_thread, argument) for argument in arguments]
        errors = [error for one in done if (error := one.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [one.result() for one in done]

    def exchange(self, index: int, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all threads, which call this at the same time."""
        self.sent[index] = tensor
        self._barrier.wait()
        everyone = [self.sent[i].clone() for i in range(self.size)]
        self._barrier.wait()
        return everyone


@dataclass(frozen=True)
class ThreadGroup(TensorGroup):
    """A tensor parallel group of threads."""

    ranks: ThreadRanks

    def all_reduce(self, tensor: Tensor, by: Any) -> None:
        everyone = torch.stack(self.ranks.exchange(self.index, tensor))
        tensor.copy_(everyone.sum(0) if by == torch.distributed.ReduceOp.SUM else everyone.amax(0))

    def all_gather(self, parts: Tensor, part: Tensor) -> None:
        parts.copy_(torch.cat(self.ranks.exchange(self.index, part)))

    def reduce_scatter(self, own: Tensor, parts: Tensor) -> None:
        own.copy_(torch.stack(self.ranks.exchange(self.index, parts)).sum(0).chunk(self.size)[self.index])
