"""LM head and cross entropy together, a chunk of positions at a time: logits (S, V) exist neither in the forward nor in
the backward.

Letters: S targets, C of them in a chunk, V vocabulary, D hidden size.

Three ways to the gradient, chosen by the information available in the forward:

    the token weights are known (SFT)         the gradient of the weighted sum, while a chunk's logits are there:
                                              three matrix products, as in the plain way
    they come with the backward, frozen head  each token's own hidden gradient is kept, and multiplied row by row: exact
    they come with the backward, trained head a chunk's logits are computed again in the backward: four products
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.models.head.token_loss import (
    ChunkLosses,
    HeadLosses,
    LogitMap,
    TargetLoss,
    TokenLoss,
    at_least_fp32,
)
from finetune.models.head.vocabulary import VocabularyPart

# Size of one chunk's logits in fp32. CPU: benchmarks/head.py. Accelerators: by arithmetic, not measured: 1,024 rows at
# 128k words, at which the matrix products outweigh reading the weight and adding up its gradient. Half of it is
# 0.6 GiB less at the peak (logits in 16 bit, and two copies in fp32), of which small ones have few.
CHUNK_BYTES = {"cpu": 32 * 2**20, "small": 256 * 2**20, "accelerator": 512 * 2**20}
SMALL_GIB = 28  # accelerators with less are small: cards have 24 GB or less, or 32 GB or more
FEWEST_ROWS = 128  # below, the matrix products wait for the weight


@dataclass(frozen=True)
class HeadDevice:
    """The device that a head runs on, which a plan need not have."""

    type: str  # `cpu` or `cuda`
    small: bool = False
    liger: bool = False  # `auto` takes Liger's kernel if it is installed
    ranks: int = 1  # that share the vocabulary

    def rows(self, vocabulary: int) -> int:
        """Returns C, the rows of logits to have at once."""
        size = CHUNK_BYTES["cpu" if self.type == "cpu" else "small" if self.small else "accelerator"]
        return max(FEWEST_ROWS, size * self.ranks // (4 * vocabulary))


def is_small(gib: float | None) -> bool:
    """Returns whether an accelerator is small. gib: its memory; None: not known."""
    return gib is not None and gib < SMALL_GIB


@dataclass(frozen=True)
class HeadTask:
    """The losses that a head computes from the hidden states of S targets."""

    target_ids: Tensor  # (S,)
    token_loss: TargetLoss
    logit_map: LogitMap
    rows: int  # C
    weights: Tensor | None = None  # (S,) of the tokens in the sum; None: 1 each
    differentiable: bool = False  # each token's loss has a graph, for objectives that are not linear in them
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # (S, ...) each, that the loss reads
    part: VocabularyPart | None = None  # of the head, whose output has this rank's columns alone; None: it has all
    # The largest of the tokens' gradients multiplies the result, not each token, as in a sum of losses: an objective
    # that is one has its gradients to the last bit.
    scales_last: bool = False

    def chunks(self) -> Iterator[slice]:
        """Yields slices of like size; at least one, so that a forward without targets has a graph as well."""
        tokens = len(self.target_ids)
        count = max(1, -(-tokens // self.rows))
        for i in range(count):
            yield slice(i * tokens // count, (i + 1) * tokens // count)

    def losses(self, rows: slice, raw: Tensor) -> ChunkLosses:
        """Returns the losses of a chunk, from the head's output (C, V)."""
        logits = self.logit_map(at_least_fp32(raw))
        if self.part is not None:
            each, *details = _OfPart.apply(logits, self, rows)
            return ChunkLosses(each, tuple(details))
        return self.token_loss.losses(logits, self.target_ids[rows], self._columns(rows))

    def losses_and_gradient(self, rows: slice, raw: Tensor, out: Tensor) -> tuple[ChunkLosses, Tensor]:
        """Returns the losses of a chunk, and the gradient (C, V) of their sum by the head's output, in `out`.

        raw: (C, V), fp32 or fp64: the head's output; overwritten.
        """
        logits = self.logit_map.apply_(raw)
        losses, gradient = self.by_logits(rows, logits, out)
        return losses, self.logit_map.chain_(gradient, logits)

    def by_logits(self, rows: slice, logits: Tensor, out: Tensor) -> tuple[ChunkLosses, Tensor]:
        """Returns the losses of a chunk, and the gradient (C, V) of their sum by the logits, in `out`."""
        ids, columns = self.target_ids[rows], self._columns(rows)
        if self.part is not None:
            return self.token_loss.split_losses_and_gradient(logits, ids, columns, out, self.part)
        return self.token_loss.losses_and_gradient(logits, ids, columns, out)

    def _columns(self, rows: slice) -> dict[str, Tensor]:
        return {name: values[rows] for name, values in self.columns.items()}


class _OfPart(torch.autograd.Function):
    """The losses of a chunk from this rank's logits. Each loss is of its own row, whose gradient it keeps."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, task: HeadTask, rows: slice) -> tuple[Tensor, ...]:
        (each, details), gradient = task.by_logits(rows, logits, torch.empty_like(logits))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(*details)
        return each, *details

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_each: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_each[:, None], None, None


class Head(Protocol):
    """A way from hidden states to logits, with its parameters."""

    parameters: tuple[Tensor, ...]

    def losses(self, hidden: Tensor, task: HeadTask) -> ChunkLosses:
        """Returns the losses of all S targets, without a graph. hidden: (S, D)."""
        ...

    def gradients(
        self, hidden: Tensor, task: HeadTask, token_gradients: Tensor | None, needs: Sequence[bool]
    ) -> tuple[ChunkLosses, list[Tensor | None]]:
        """Returns the losses of all S targets, and the gradients of hidden and parameters if needed, those of
        parameters in fp32.

        token_gradients: (S,) of the losses; None: 1 each.
        """
        ...


def matrix_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, task: HeadTask) -> HeadLosses:
    """Returns the losses of a head that is one matrix. hidden: (S, D), weight: (V, D), bias: (V,)."""
    return _losses(hidden, MatrixHead(weight, bias), task)


def module_losses(
    hidden: Tensor, call: Callable[[Tensor], Tensor], trained: Sequence[Tensor], task: HeadTask
) -> HeadLosses:
    """Returns the losses of any head: adapters, DoRA, quantized weights. call: (C, D) -> (C, V); trained: its
    parameters."""
    return _losses(hidden, ModuleHead(call, tuple(trained)), task)


def _losses(hidden: Tensor, head: Head, task: HeadTask) -> HeadLosses:
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (hidden, *head.parameters)):
        each, details = head.losses(hidden, task)
        return HeadLosses(_weighted_sum(each, task.weights), each, details)
    if task.differentiable:
        each, *details = _EachLoss.apply(hidden, head, task, *head.parameters)
        return HeadLosses(_weighted_sum(each, task.weights), each, tuple(details))
    total, each, *details = _SumOfLosses.apply(hidden, head, task, *head.parameters)
    return HeadLosses(total, each, tuple(details))


def _weighted_sum(each: Tensor, weights: Tensor | None) -> Tensor:  # ()
    return each.sum() if weights is None else (each * weights).sum()


class _SumOfLosses(torch.autograd.Function):
    """The gradient is computed in the forward, for the sum with the task's weights, and scaled in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, task: HeadTask, *parameters: Tensor) -> tuple[Tensor, ...]:
        needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]]
        (each, details), ctx.gradients = head.gradients(hidden, task, task.weights, needs)
        ctx.types = [x.dtype for x in (hidden, *parameters)]
        ctx.mark_non_differentiable(each, *details)
        ctx.set_materialize_grads(False)
        return _weighted_sum(each, task.weights), each, *details

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients are handed over, not kept: the weight's is as large as the weight."""
        if ctx.gradients is None:
            raise RuntimeError("the LM head's gradients are gone after one backward: run the forward again")
        gradients, ctx.gradients = ctx.gradients, None
        grad_hidden, *grad_parameters = [
            None if g is None else g.mul_(gradient).to(dtype) for g, dtype in zip(gradients, ctx.types, strict=True)
        ]
        return grad_hidden, None, None, *grad_parameters


class _EachLoss(torch.autograd.Function):
    """Every token's loss with its own gradient: of a frozen head kept from the forward, else computed again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, task: HeadTask, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.head, ctx.task = head, task
        if any(ctx.needs_input_grad[3:]):
            ctx.context = _Context(hidden.device.type)
            ctx.save_for_backward(hidden)
            each, details = head.losses(hidden, task)
        else:
            ctx.context = None
            needs = [True, *[False] * len(parameters)]
            (each, details), (grad_hidden, *_) = head.gradients(hidden, task, None, needs)
            ctx.save_for_backward(grad_hidden)
        ctx.mark_non_differentiable(*details)
        return each, *details

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token_gradients: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        if ctx.context is None:  # (S, D) rows of the hidden gradient, each for a loss whose gradient is 1
            return (saved * token_gradients[:, None]).to(saved.dtype), None, None, *[None] * len(ctx.head.parameters)
        needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]]
        scale = _largest(token_gradients) if ctx.task.scales_last and len(token_gradients) else None
        with ctx.context.again():
            of_tokens = token_gradients if scale is None else token_gradients / scale
            _, gradients = ctx.head.gradients(saved, ctx.task, of_tokens, needs)
        grad_hidden, *grad_parameters = [
            None if g is None else (g if scale is None else g.mul_(scale)).to(x.dtype)
            for g, x in zip(gradients, (saved, *ctx.head.parameters), strict=True)
        ]
        return grad_hidden, None, None, *grad_parameters


def _largest(gradients: Tensor) -> Tensor:  # (S,) -> ()
    """Returns the largest size, or 1 if all are 0; does not wait for the device."""
    largest = gradients.abs().amax()
    return torch.where(largest > 0, largest, 1.0)


class _Context:
    """Autocast and random numbers of a forward, so that a recomputation gives the same."""

    def __init__(self, device_type: str):
        self.device_type = device_type
        self.autocast = torch.is_autocast_enabled(device_type)
        self.dtype = torch.get_autocast_dtype(device_type)
        self.cpu_state = torch.get_rng_state()
        self.device_state = torch.cuda.get_rng_state() if device_type == "cuda" else None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        devices = [torch.cuda.current_device()] if self.device_state is not None else []
        autocast = torch.autocast(self.device_type, dtype=self.dtype, enabled=self.autocast)
        with torch.random.fork_rng(devices), autocast:
            torch.set_rng_state(self.cpu_state)
            if self.device_state is not None:
                torch.cuda.set_rng_state(self.device_state)
            yield


class MatrixHead:
    def __init__(self, weight: Tensor, bias: Tensor | None):
        """weight: (V, D), bias: (V,)."""
        self.weight, self.bias = weight, bias
        self.parameters = (weight,) if bias is None else (weight, bias)

    def losses(self, hidden: Tensor, task: HeadTask) -> ChunkLosses:
        compute = _compute_type(self.weight)
        matrix, offset = self._in(compute)  # once, not for every chunk
        with torch.no_grad():
            chunks = [
                task.losses(rows, torch.nn.functional.linear(hidden[rows].to(compute), matrix, offset))
                for rows in task.chunks()
            ]
        return _joined(chunks)

    def gradients(
        self, hidden: Tensor, task: HeadTask, token_gradients: Tensor | None, needs: Sequence[bool]
    ) -> tuple[ChunkLosses, list[Tensor | None]]:
        compute = _compute_type(self.weight)
        with torch.autocast(hidden.device.type, enabled=False):  # the types are explicit here, out= knows no autocast
            return self._chunks(hidden, task, token_gradients, needs, compute)

    def _in(self, compute: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return self.weight.to(compute), None if self.bias is None else self.bias.to(compute)

    def _chunks(
        self,
        hidden: Tensor,
        task: HeadTask,
        token_gradients: Tensor | None,
        needs: Sequence[bool],
        compute: torch.dtype,
    ) -> tuple[ChunkLosses, list[Tensor | None]]:
        sum_dtype = torch.promote_types(compute, torch.float32)
        matrix, offset = self._in(compute)
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        grad_weight = torch.empty_like(self.weight, dtype=sum_dtype) if needs[1] else None
        grad_bias = torch.zeros_like(self.bias, dtype=sum_dtype) if self.bias is not None and needs[2] else None
        chunks = []
        # Allocated once: fresh memory for every chunk costs the CPU as much as the softmax.
        product = hidden.new_empty((min(task.rows, len(hidden)), len(self.weight)), dtype=compute)
        scratch = self._scratch(product, sum_dtype)
        final = token_gradients is None and grad_bias is None  # all else that reads a chunk's gradient are products
        for rows in task.chunks():
            x = hidden[rows].to(compute)
            raw = product[: len(x)]
            torch.mm(x, matrix.t(), out=raw)
            if offset is not None:
                raw.add_(offset)
            parts = [tensor[: len(x)] for tensor in scratch]
            losses, back = self._losses_and_gradient(task, rows, raw, parts, final)
            if token_gradients is not None:
                back.mul_(token_gradients[rows, None])
            if grad_bias is not None:
                grad_bias.add_(back.sum(0, dtype=sum_dtype))
            back = back if back.dtype == compute else raw.copy_(back)
            if grad_hidden is not None:
                grad_hidden[rows] = back @ matrix
            if grad_weight is not None:
                add_product(grad_weight, back.t(), x, first=not chunks)
            chunks.append(losses)
        return _joined(chunks), [grad_hidden, grad_weight, *([] if self.bias is None else [grad_bias])]

    def _scratch(self, product: Tensor, sum_dtype: torch.dtype) -> list[Tensor]:
        """Returns memory for a chunk's gradient and its logits, (C, V) each. product: (C, V), of the head's output."""
        gradient = torch.empty_like(product, dtype=sum_dtype)
        return [gradient, product if sum_dtype == product.dtype else torch.empty_like(gradient)]

    def _losses_and_gradient(
        self, task: HeadTask, rows: slice, raw: Tensor, scratch: list[Tensor], final: bool
    ) -> tuple[ChunkLosses, Tensor]:
        """Returns the losses of a chunk, and the gradient (C, V) of their sum by the head's output `raw`, which is
        overwritten. final: the gradient may be in the type of `raw`, rounded once."""
        gradient, logits = scratch
        if raw.dtype == logits.dtype:
            return task.losses_and_gradient(rows, raw, gradient)
        logits.copy_(raw)
        if final and task.part is None and task.logit_map == LogitMap() and task.token_loss == TokenLoss():
            return TokenLoss().rounded_gradient(logits, task.target_ids[rows], gradient, raw)
        return task.losses_and_gradient(rows, logits, gradient)


class LigerHead(MatrixHead):
    """The gradient of a chunk in place of its logits, in their type, by one kernel that reads them twice:
    https://github.com/linkedin/Liger-Kernel, ops/cross_entropy.py.

    Its `LigerFusedLinearCrossEntropyLoss` waits for the device in each forward, for a count that sums do not need,
    fails without targets, and computes all products again in the backward if each token's loss is wanted.
    """

    def _scratch(self, product: Tensor, sum_dtype: torch.dtype) -> list[Tensor]:
        return []

    def _losses_and_gradient(
        self, task: HeadTask, rows: slice, raw: Tensor, scratch: list[Tensor], final: bool
    ) -> tuple[ChunkLosses, Tensor]:
        loss, scale, cap = task.token_loss, task.logit_map.scale, task.logit_map.cap
        assert isinstance(loss, TokenLoss)  # see `Objective.only_sums`
        losses = torch.empty(len(raw), dtype=torch.float32, device=raw.device)
        if len(raw):
            if scale != 1.0:
                raw.mul_(scale)
            liger_cross_entropy()[(len(raw),)](
                X_ptr=raw,
                X_stride=raw.stride(0),
                Y_ptr=task.target_ids[rows],
                Y_stride=1,
                loss_ptr=losses,
                loss_stride=1,
                n_cols=raw.shape[1],
                ignore_index=-100,
                lse_square_scale=loss.z_loss,
                label_smoothing=loss.label_smoothing,
                reduction="sum",
                softcap=cap,
                HAS_SOFTCAPPING=cap is not None,
                HAS_GRADIENTS=True,
                BLOCK_SIZE=min(_LIGER_BLOCK, 1 << (raw.shape[1] - 1).bit_length()),
                num_warps=16 if torch.version.hip else 32,
                **_LIGER_UNUSED,
            )
            if scale != 1.0:
                raw.mul_(scale)
        return ChunkLosses(losses), raw


LIGER = "liger-kernel>=0.8,<0.9"
# As Liger itself calls it (ops/fused_linear_cross_entropy.py).
_LIGER_BLOCK = 32_768  # columns
_LIGER_UNUSED: dict[str, Any] = {
    **dict.fromkeys(("weight_ptr", "z_loss_ptr", "token_accuracy_ptr", "predicted_tokens_ptr")),
    **dict.fromkeys(("token_accuracy_stride", "predicted_tokens_stride"), 0),
    "n_non_ignore": 1,
    "sum_non_ignore_weight": 1,
    "weight_sum": 0.0,
    "HAS_WEIGHT": False,
    **dict.fromkeys(("RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS"), False),
}


def liger_cross_entropy() -> Any:
    from liger_kernel.ops.cross_entropy import (  # pyright: ignore[reportMissingImports]
        liger_cross_entropy_kernel,
    )

    return liger_cross_entropy_kernel


class ModuleHead:
    def __init__(self, call: Callable[[Tensor], Tensor], trained: tuple[Tensor, ...]):
        self.call, self.parameters = call, trained

    def losses(self, hidden: Tensor, task: HeadTask) -> ChunkLosses:
        with torch.no_grad():
            return _joined([task.losses(rows, self.call(hidden[rows])) for rows in task.chunks()])

    def gradients(
        self, hidden: Tensor, task: HeadTask, token_gradients: Tensor | None, needs: Sequence[bool]
    ) -> tuple[ChunkLosses, list[Tensor | None]]:
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        needed_parameters = [p for p, needed in zip(self.parameters, needs[1:], strict=True) if needed]
        sums = [torch.zeros_like(at_least_fp32(p)) for p in needed_parameters]
        chunks = []
        for rows in task.chunks():
            with torch.enable_grad():
                x = hidden[rows].detach().requires_grad_(needs[0])
                losses, details = task.losses(rows, self.call(x))
                total = losses.sum() if token_gradients is None else (losses * token_gradients[rows]).sum()
                inputs = [x, *needed_parameters] if needs[0] else needed_parameters
                gradients = list(torch.autograd.grad(total, inputs, allow_unused=True))
            if grad_hidden is not None:
                grad_hidden[rows] = gradients.pop(0)
            for so_far, part in zip(sums, gradients, strict=True):
                if part is not None:
                    so_far.add_(part)
            chunks.append(ChunkLosses(losses.detach(), details))
        in_order = iter(sums)
        return _joined(chunks), [grad_hidden, *(next(in_order) if needed else None for needed in needs[1:])]


def _joined(chunks: Sequence[ChunkLosses]) -> ChunkLosses:
    each, details = zip(*chunks, strict=True)
    return ChunkLosses(torch.cat(each), tuple(torch.cat(parts) for parts in zip(*details, strict=True)))


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total += left @ right, added up in the type of `total`, whose values are not read if it is the first."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if first else 1)
    elif total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total, beta=0 if first else 1)
    elif first:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)


def _compute_type(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


# --- other implementations, for a head that is one matrix and objectives linear in the tokens' losses


def liger_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, task: HeadTask) -> HeadLosses:
    """Arguments as of `matrix_losses`; for sums of tokens' losses."""
    return _losses(hidden, LigerHead(weight, bias), task)


def liger_problem(device: str) -> str | None:
    """Returns why Liger's kernels cannot be used, or None."""
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "its kernels need a CUDA device"
    if any(importlib.util.find_spec(package) is None for package in ("triton", "liger_kernel")):
        return f"liger-kernel is not installed: pip install '{LIGER}'"
    if not (version := importlib.metadata.version("liger-kernel")).startswith("0.8."):
        return f"liger-kernel {version} may have other kernels: pip install '{LIGER}'"
    return None
