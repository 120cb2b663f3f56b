"""CUDA graphs of constant shapes: a micro-batch's embedding and decoder layers, captured once, then started by one call
in the forward and one in the backward. The host starts thousands of kernels one by one, and the GPU waits for it.

    first micro-batch of a shape   warm-up on a stream of its own, capture of the forward and of the backward, replay
    later ones                     ids, positions and ends of documents into the graph's buffers, replay

A row is padded to one length, and the ends of its documents to a number of them: those after the last are empty, at the
row's end. The longest document is a bound. Head and loss, whose targets are another number in each micro-batch, run as
without graphs. Kernels, and the order in which they run, are those without graphs on the same padded row. The backward
adds to gradients at their addresses, so these are zeroed after a step, never dropped.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs. Tests run the captured functions again in place of a
replay, on CPUs; no GPU has run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.data.batch import PADDING_DOCUMENT
from finetune.engine.launch import Launch
from finetune.errors import RunFailure
from finetune.models.attention import VARLEN, AttentionChoice
from finetune.models.attention.kernels import Boundaries
from finetune.models.base_config import depends_on_length, first_line, rope_types
from finetune.models.casts import cast_anew
from finetune.models.dropout import drops
from finetune.models.moe import find_routers, stacked_experts
from finetune.models.wrapped import WrappedModel, output_head
from finetune.recipe.schema import Recipe
from finetune.utils import unwrap_peft

FEWEST_DOCUMENTS, MOST_DOCUMENTS = 8, 128  # of a graph; the kernel starts blocks for empty documents as well
FULLEST = 0.9  # rows with less would cost more by their padding than a host that waits
WARM_UPS = 2  # before a capture: kernels are loaded and libraries set up, which a capture forbids
_INPUTS = {"input_ids", "position_ids", "attention_mask", "documents", "use_cache"}  # of a forward that is captured

Run = Callable[[dict[str, Any]], Tensor]  # inputs of the base model -> hidden states (1, T, D)


def graph_problem(
    recipe: Recipe,
    launch: Launch,
    device_type: str,
    model: WrappedModel,
    attention: AttentionChoice,
    fullness: float | None = None,
) -> str | None:
    """Returns why a run captures nothing, the first reason; None if it captures.

    model: before an engine wraps it; fullness: tokens of the data over those of padded rows; None: not known.
    """
    return next(_problems(recipe, launch, device_type, model, attention, fullness), None)


def _problems(
    recipe: Recipe,
    launch: Launch,
    device_type: str,
    model: WrappedModel,
    attention: AttentionChoice,
    fullness: float | None,
) -> Iterator[str]:
    train, config = recipe.train, model.causal_lm.config.get_text_config()
    if train.graphs == "off":
        yield "train.graphs"
    if device_type != "cuda":
        yield "no GPU"
    if launch.kind != "replicated" or launch.parallelism.data != launch.processes:
        yield "weights or rows are divided among devices"
    if launch.processes > 1 and recipe.mode == "full":
        yield "DDP reduces the gradients of full training while the backward runs"
    if train.compile:
        yield "train.compile"
    if recipe.mtp_weight is not None:
        yield "model.mtp: train, whose layer reads the output of the others"
    if train.activation_checkpointing:
        yield "activations are recomputed"
    if train.activation_offload:
        yield "activations are moved to the host"
    if recipe.optimizer.in_backward:
        yield "optimizer.in_backward"
    if train.precision == "fp8":
        yield "train.precision: fp8"
    if drops(recipe.lora, model.causal_lm.config):
        yield "dropout has a seed for each layer and micro-batch"
    if stacked_experts(model.causal_lm) or find_routers(model.causal_lm) is not None:
        yield "experts take as many tokens as routers choose for them"
    if recipe.model.train is not None:
        yield "images"
    if recipe.model.trust_remote_code:
        yield "the model's own code"
    if recipe.rollouts is not None:
        yield "samples have any length"
    if attention.shares_prompts:
        yield "answers share their prompts"
    if model.choice.implementation == "plain":
        yield "cross entropy plain: its logits, of as many targets as there are, are made in the model's own forward"
    if not any(parameter.requires_grad for parameter in unwrap_peft(model.causal_lm).base_model.parameters()):
        yield "no layer trains"
    if attention.implementation != VARLEN:
        yield f"attention by {attention.implementation} has no constant shapes"
    if attention.mixers:
        yield f"{', '.join(attention.mixers)} once for each document"
    if any(map(depends_on_length, rope_types(getattr(config, "rope_parameters", None)))):
        yield "rotations depend on the lengths of documents"
    if not recipe.data.packing:
        yield "data.packing is off: rows have any length"
    if fullness is not None and fullness < FULLEST:
        yield f"rows are {fullness:.0%} full, and would be padded"


class Recorder(Protocol):
    """Captures what a function starts on a device."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Runs a function as often as it needs before it is captured, where it will be captured."""
        ...

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Returns what starts the function's kernels again, on the same addresses, and the function's result, whose
        tensors have values after that."""
        ...


class CudaRecorder:
    """One memory pool for all graphs of a run: a forward and its backward end before others begin, so that graphs of
    other shapes use the same memory."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # By thread: another one copies the next batches meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                result = run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own
            first = error.__context__ or error  # the end of such a capture fails as well
            raise RunFailure(
                f"train.graphs: the layers could not be captured: {first_line(first)}. Fix: set train.graphs: off, and "
                "run the same command again"
            ) from error
        return graph.replay, result


class Graphs:
    """Runs the base model of a wrapped model: by replay if a graph has the inputs' shapes, else as it is."""

    def __init__(
        self, model: WrappedModel, tokens: int, max_length: int, recorder: Recorder, say: Callable[[str], None]
    ):
        """tokens: T of the padded rows of a micro-batch; max_length: tokens that a document may have."""
        self._tokens, self._longest, self._recorder = tokens, max(max_length, PADDING_DOCUMENT), recorder
        of_head = set(map(id, output_head(model.causal_lm).parameters()))
        self._trained = [p for p in unwrap_peft(model.causal_lm).base_model.parameters() if p.requires_grad]
        # Autograd adds up a tied weight's gradients of both before it adds them to those of earlier micro-batches.
        self._tied = [id(p) in of_head for p in self._trained]
        self._anchor = torch.zeros((), device=self._trained[0].device, requires_grad=True)
        self._captured: dict[int, Captured] = {}  # by the number of documents that fit
        self._forwards = self._replays = 0
        self._say, self._said = say, set[str]()

    def __call__(self, run: Run, inputs: dict[str, Any]) -> Tensor:
        """Returns hidden states (1, T, D)."""
        self._forwards += 1
        if (why := self._misfit(inputs)) is not None:
            if why not in self._said:
                self._said.add(why)
                self._say(f"note: train.graphs: a micro-batch without: {why}")
            return run(inputs)
        self._replays += 1
        documents = len(inputs["documents"].ends) - 1
        room = max(FEWEST_DOCUMENTS, 1 << (documents - 1).bit_length())
        if room not in self._captured:
            self._captured[room] = Captured(run, inputs, self._longest, room, self._recorder)
            self._captured[room].record(self._trained, self._tied)
        captured = self._captured[room]
        captured.take(inputs)
        return _Replay.apply(captured, self._anchor, *captured.tied)  # pyright: ignore[reportReturnType]

    def _misfit(self, inputs: dict[str, Any]) -> str | None:
        """Returns why inputs cannot be a graph's."""
        given = {name for name, value in inputs.items() if value is not None}
        documents = inputs.get("documents")
        if given != _INPUTS or not isinstance(documents, Boundaries) or documents.keys is not None:
            return f"its inputs are others ({', '.join(sorted(given ^ _INPUTS)) or 'documents'})"
        if not inputs["input_ids"].shape == inputs["position_ids"].shape == (1, self._tokens):
            return f"its row is not {self._tokens:,} tokens long"
        if documents.longest > self._longest:
            return f"a document has more than {self._longest:,} tokens"
        if len(documents.ends) - 1 > MOST_DOCUMENTS:
            return f"it has more than {MOST_DOCUMENTS} documents"
        return None

    def share(self) -> float:
        """Returns the share of replays among the forwards since the last call."""
        share = self._replays / max(1, self._forwards)
        self._forwards = self._replays = 0
        return share


class Captured:
    """The graphs of one shape, and their buffers."""

    def __init__(self, run: Run, inputs: dict[str, Any], longest: int, room: int, recorder: Recorder):
        self._run, self._recorder = run, recorder
        self._rows = {name: torch.empty_like(inputs[name]) for name in ("input_ids", "position_ids")}
        self._ends = inputs["documents"].ends.new_empty(room + 1)
        self._inputs = {**inputs, **self._rows, "documents": Boundaries(self._ends, longest)}
        self._device_type = self._ends.device.type
        self._with_graph: Tensor | None = None  # hidden states of the forward whose backward is to come
        self.take(inputs)

    def take(self, inputs: dict[str, Any]) -> None:
        """Copy a micro-batch into the buffers."""
        for name, row in self._rows.items():
            row.copy_(inputs[name])
        ends = inputs["documents"].ends
        self._ends[: len(ends)].copy_(ends)
        self._ends[len(ends) :].fill_(self._rows["input_ids"].shape[1])  # empty documents

    def record(self, trained: list[Tensor], tied: list[bool]) -> None:
        """Capture forward and backward. trained: parameters; tied: which of them the head has as well."""
        used: list[bool] = []

        def once() -> None:
            hidden = self._forward()
            gradients = self._gradients(trained, torch.zeros_like(hidden))
            used[:] = [gradient is not None for gradient in gradients]

        self._recorder.warm_up(once)
        self._own = [p for p, is_used, is_tied in zip(trained, used, tied, strict=True) if is_used and not is_tied]
        self.tied = [p for p, is_used, is_tied in zip(trained, used, tied, strict=True) if is_used and is_tied]
        for parameter in (*self._own, *self.tied):  # one that no forward uses has none: its optimizer passes over it
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._sums: list[Any] = [parameter.grad for parameter in self._own]
        self._replay_forward, self.hidden = self._recorder.record(self._forward)
        self._of_hidden = torch.empty_like(self.hidden)
        self._replay_backward, self._of_tied = self._recorder.record(self._backward)

    def forward(self) -> Tensor:
        self._replay_forward()
        return self.hidden.detach()

    def backward(self, of_hidden: Tensor) -> list[Tensor]:
        """Adds to the gradients of parameters; returns those of tied ones."""
        if any(p.grad is not gradient for p, gradient in zip(self._own, self._sums, strict=True)):
            raise RuntimeError("a gradient is not where the graph adds to it")
        self._of_hidden.copy_(of_hidden)
        self._replay_backward()
        return self._of_tied

    # --- what is captured

    def _forward(self) -> Tensor:
        with cast_anew():  # what other forwards have cast is not in the graph's memory
            self._with_graph = self._run(self._inputs)
        return self._with_graph.detach()

    def _backward(self) -> list[Tensor]:
        gradients = self._gradients([*self._own, *self.tied], self._of_hidden)
        torch._foreach_add_(self._sums, gradients[: len(self._own)])
        return gradients[len(self._own) :]

    def _gradients(self, parameters: list[Tensor], of_hidden: Tensor) -> list[Any]:
        hidden, self._with_graph = self._with_graph, None  # or activations would stay
        assert hidden is not None  # a forward came before
        with torch.autocast(self._device_type, enabled=False):  # as every backward
            return list(torch.autograd.grad(hidden, parameters, of_hidden, allow_unused=True))


class _Replay(torch.autograd.Function):
    """anchor: needs a gradient, so that autograd asks for a backward; it gets none."""

    @staticmethod
    def forward(ctx: Any, captured: Captured, anchor: Tensor, *tied: Tensor) -> Tensor:
        ctx.captured = captured
        return captured.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_hidden: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.captured.backward(of_hidden)
