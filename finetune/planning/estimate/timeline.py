"""Memory over one micro-batch: a forward and a backward of the run's own code, on fake tensors.

    before | layer 0 | layer 1 | ... | head || head | ... | layer 1 | layer 0 | before
               forward                                backward

Every storage is weighed from its allocation to its release, so what a forward keeps, what a layer computes again, and
the largest moment of each part are counted, and what several operations keep is counted once. The model has one layer
more than it has kinds of layers; `phases.py` lays the parts end to end for all of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from transformers import PretrainedConfig
from transformers.integrations import moe

from finetune.data.batch import collate
from finetune.data.samples import Example
from finetune.data.samples import Sequence as TokenSequence
from finetune.engine import tensor_parallel
from finetune.errors import UserError
from finetune.models.activations import ActivationOffload
from finetune.models.attention import AttentionChoice, Kernels, attention_for, kernels, per_document
from finetune.models.config import dtypes
from finetune.models.head.chunked import rows_at_once
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.moe import adapters_of, compute_experts_in, dispatch_tokens, experts_of
from finetune.models.quantized import linear_weights
from finetune.models.score_model import ScoreModel
from finetune.models.vision import ImagePart, decoder_layers
from finetune.models.weights import fuse_adapters, keep_input_types
from finetune.objectives import make_objective, score_labels
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import Objective, Term
from finetune.objectives.table import OF_TOKENS, OF_TOKENS_ALONE
from finetune.planning.estimate.images import KnownIntegers, with_pictures
from finetune.planning.estimate.operators import NO_WORK, OperatorCounter, Work
from finetune.planning.estimate.shapes import shortened, skeleton, with_layers
from finetune.planning.fake_devices import Meter
from finetune.recipe import Recipe
from finetune.utils import unwrap_peft


@dataclass(frozen=True)
class Part:
    """Bytes above those at its begin."""

    peak: int
    kept: int  # at its end; less than nothing where it frees
    work: Work = NO_WORK


@dataclass(frozen=True)
class Timeline:
    """Parts of a micro-batch; layers by kind, as `shapes.shortened` tells them apart."""

    before: Part
    layers: tuple[Part, ...]
    head: Part
    head_backward: Part
    layers_backward: tuple[Part, ...]
    before_backward: Part


@dataclass(frozen=True)
class HeaviestBatch:
    """The largest micro-batch of a run."""

    documents: tuple[int, ...]  # tokens of each
    targets: int  # supervised tokens
    images: tuple[tuple[int, ...], ...] = ()  # of each document, tokens of its images; (): none has any

    @classmethod
    def of_rows(cls, rows: int, length: int, share: float = 1.0) -> HeaviestBatch:
        """`rows` rows of one document of `length` tokens, a `share` of them supervised."""
        return cls((length,) * rows, max(1, int(rows * (length - 1) * share)))


@dataclass(frozen=True)
class How:
    """What of an engine a forward and a backward show."""

    device: str = "cuda"
    capability: tuple[int, int] = (9, 0)
    casts_weights: bool = False  # gathered in the compute type (FSDP2)
    keeps_inputs_alone: bool = False  # linear layers without casts of their weights (ZeRO-3)
    gradients_there: bool = False  # those of an earlier micro-batch, that are added to
    drops_gradients: bool = False  # each is stepped by and freed as soon as it is there
    tensor: int = 1  # ranks that share matrices
    expert: int = 1  # ranks that share experts


def timeline_of(recipe: Recipe, config: PretrainedConfig, batch: HeaviestBatch, how: How) -> Timeline:
    """Returns the parts of a micro-batch on one rank. Raises UserError where the model cannot be made."""
    return _timeline(_TimelineKey(recipe, config, batch, how))


class _TimelineKey:
    """What a timeline depends on, for a cache."""

    def __init__(self, recipe: Recipe, config: PretrainedConfig, batch: HeaviestBatch, how: How):
        self.recipe, self.config, self.batch, self.how = recipe, config, batch, how
        parts = {"model", "mode", "lora", "quantization", "tokens", "objective"}
        train = {"precision", "activation_checkpointing", "activation_offload"}
        text = recipe.model_dump_json(include={*parts}) + recipe.train.model_dump_json(include=train)
        self.parts = (text, config.to_json_string(), batch, how)

    def __hash__(self) -> int:
        return hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TimelineKey) and self.parts == other.parts


class NotEstimated(UserError):
    """What cannot be calculated from shapes, though it can be trained."""


@functools.lru_cache(maxsize=64)
def _timeline(key: _TimelineKey) -> Timeline:
    recipe, how = key.recipe, key.how
    short, count = short_model(key.config), len(set(shortened(key.config)[1]))
    attention = attention_at(recipe, key.config, how)
    model, forward = _model(recipe, short, attention, how)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    marks = Marks(fakes)
    token = getattr(key.config, "image_token_id", 0)
    batch = with_pictures(collate(examples_of(recipe, key.batch, token)), short, key.batch.images, fakes)
    known = recipe.model.train is not None  # the forward reads masks of images, also where a row has none
    fake = marks.meter, _linear(how), _grouped_products(dtypes(recipe).compute)
    with contextlib.ExitStack() as stack:
        for each in (*fake, _no_communication()):
            stack.enter_context(each)
        fill(model, dtypes(recipe).compute if how.casts_weights else None)
        if how.gradients_there:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for parameter in model.parameters() if how.drops_gradients else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop)
        marks.watch(_layers(model))
        marks.begin("before" if known else "ids")  # which are few bytes; pixels are many
        on_device = batch.map_tensors(partial(_moved, known))
        marks.begin("before")
        stack.enter_context(KnownIntegers() if known else contextlib.nullcontext())
        try:
            outputs = forward(model, on_device)
        except DynamicOutputShapeException as error:
            name = type(key.config).__name__
            raise NotEstimated(
                f"{name}: its layers choose how much they compute by what they read ({error}), so memory cannot be "
                "calculated from shapes: `check` and `train` with `batch.rows_per_device: auto` try it on the machine"
            ) from None
        loss = forward.objective.trial_loss(outputs, on_device)
        marks.backward = True
        marks.begin("head backward")
        loss.backward()
        marks.end()
    return _parts(marks, count, len(_layers(model)))


def _parts(marks: Marks, kinds: int, layers: int) -> Timeline:
    forward = [marks.part(f"layer {i}") for i in range(layers)]
    backward = [marks.part(f"layer {i} backward") for i in range(layers)]
    # The first layer's backward ends with that of the embedding where its input needs no gradient: a later one's is
    # taken for its kind where there is one.
    if layers > kinds:
        forward, backward = [forward[-1], *forward[1:kinds]], [backward[-1], *backward[1:kinds]]
    return Timeline(
        marks.part("before"),
        tuple(forward),
        marks.part("head"),
        marks.part("head backward"),
        tuple(backward),
        marks.part("before backward"),
    )


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _moved(known: bool, tensor: Tensor) -> Tensor:
    """Returns a tensor on the device. known: integers keep their values."""
    return tensor if known and not tensor.is_floating_point() else torch.empty(tensor.shape, dtype=tensor.dtype)


class Marks:
    """Cuts what a meter weighs into parts, at the edges of layers."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        self.operators, self.backward = OperatorCounter(), False
        self.meter = Meter("cpu", count=self.operators.count, fakes=fakes)
        self._parts: dict[str, Part] = {}
        self._current, self._start = "", 0

    def begin(self, name: str) -> None:
        self.end()
        self._current, self._start = name, self.meter.now
        self.operators.part = name
        self.meter.begin(f"{name} {len(self._parts)}")

    def end(self) -> None:
        if self._current:
            part = Part(self.meter.counts.peak_bytes - self._start, self.meter.now - self._start)
            before = self._parts.get(self._current, Part(0, 0))
            self._parts[self._current] = Part(max(before.peak, before.kept + part.peak), before.kept + part.kept)

    def part(self, name: str) -> Part:
        return replace(self._parts.get(name, Part(0, 0)), work=self.operators.work(name))

    def watch(self, layers: list[Any]) -> None:
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._enters, index), with_kwargs=True)
            layer.register_forward_hook(partial(self._leaves, index, len(layers)))

    def _enters(self, index: int, _layer: Any, inputs: Any, named: Any) -> None:
        if self.backward:  # computes again
            return
        hidden = inputs[0] if inputs else named["hidden_states"]
        if hidden.requires_grad:
            before = "before backward" if index == 0 else f"layer {index - 1} backward"
            hidden.register_hook(lambda _gradient: self.begin(before))
        self.begin(f"layer {index}")

    def _leaves(self, index: int, layers: int, _layer: Any, _inputs: Any, output: Any) -> None:
        if self.backward:
            return
        if index == layers - 1:
            self.begin("head")
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _gradient: self.begin(f"layer {index} backward"))


# --- the model


def attention_at(recipe: Recipe, config: PretrainedConfig, how: How) -> AttentionChoice:
    """Returns the attention of a run on such a device, which this machine need not have, for fake tensors."""
    there = (
        Kernels(how.capability, flash_kernels=True, triton=True, no_flash_3=None) if how.device == "cuda" else Kernels()
    )
    eager = recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": False})})
    choice = attention_for(eager, config, how.device, there)
    if choice.implementation == kernels.VARLEN:
        return replace(choice, prepare=partial(kernels.prepare_varlen, device="cpu"))
    if choice.implementation == kernels.FLEX:  # it keeps the same tensors as a kernel for each document
        return replace(choice, implementation=per_document.DOCUMENTS, prepare=per_document.prepare)
    return choice


def _model(recipe: Recipe, config: PretrainedConfig, attention: AttentionChoice, how: How) -> tuple[Any, ForwardPass]:
    """Returns the wrapped model on `meta`, and what calls it; as `training/run.py` makes them."""
    model = skeleton(recipe, config, attention)
    if how.tensor > 1:
        tensor_parallel.parallelize(model, tensor_parallel.TensorGroup(None, 0, how.tensor))
    if recipe.quantization is not None:
        if recipe.lora is not None and recipe.lora.dora:
            raise NotEstimated("`lora.dora` on packed weights unpacks them for their norm, which only real weights can")
        _unpack_in_forwards(model)
    types = dtypes(recipe)
    casts = types.compute != types.trained
    if casts:
        compute_experts_in(model, types.compute)
        keep_input_types(model)
    if how.expert > 1:
        _divide_experts(model, how.expert)
    fuse_adapters(model, recipe.train.activation_checkpointing)
    surroundings: dict[str, Any] = {"device_type": "cpu", "autocast": types.compute if casts else None}
    if recipe.train.activation_offload and how.device != "cpu":
        surroundings["offload"] = ActivationOffload(torch.device("cpu"))
    settings = recipe.objective.model_copy(update={"router_aux_loss_coef": None})  # a number for each token and expert
    labels = score_labels(settings)
    if labels:
        return ScoreModel(model, **surroundings), ForwardPass(attention, make_objective(settings))
    if recipe.model.train is not None:
        surroundings["images"] = ImagePart(model, always=False)
    objective = make_objective(settings) if settings.name in OF_TOKENS_ALONE else _any_tokens()
    wrapped = CausalLMWithLoss(model, recipe.model.cross_entropy, only_sums=objective.only_sums, **surroundings)
    if wrapped.choice.implementation != "plain":
        wrapped._rows = rows_at_once(config.get_text_config().vocab_size, how.device)
    return wrapped, ForwardPass(attention, objective)


def _divide_experts(model: Any, ranks: int) -> None:
    """Leaves a rank its experts, and lets tokens travel, as `engine/expert_parallel.py`."""
    for path, experts in experts_of(model).items():
        for name, weight in list(experts.named_parameters(recurse=False)):
            own = torch.empty_like(weight[: len(weight) // ranks])
            experts.register_parameter(name, torch.nn.Parameter(own, weight.requires_grad))
        dispatch_tokens(experts, EvenExchange(ranks), adapters_of(model, path), 0)


class EvenExchange:
    """An `Exchange` (models/moe.py) of tokens that choose all experts equally often."""

    def __init__(self, size: int):
        self.size = size

    def weight(self, stacked: Tensor) -> Tensor:
        return stacked

    def counts(self, leaving: Tensor) -> tuple[Tensor, list[int], list[int]]:
        return leaving.clone(), [], []

    def rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return _Travel.apply(rows)  # pyright: ignore[reportReturnType]: torch's stubs have no type for it


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, rows: Tensor) -> Tensor:
        return torch.empty_like(rows.contiguous())

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Any:
        return torch.empty_like(gradients[0].contiguous())


def real_micro_batch(recipe: Recipe, config: PretrainedConfig, batch: HeaviestBatch) -> Callable[[], None]:
    """Returns what runs forward and backward of a model with random weights on this machine's processors. config: of
    all its layers. Gradients are added up."""
    how = How(device="cpu")
    model, forward = _model(recipe, config, attention_at(recipe, config, how), how)
    fill(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, std=0.02)
    collated = collate(examples_of(recipe, batch))

    def run() -> None:
        forward.objective.trial_loss(forward(model, collated), collated).backward()

    return run


def short_model(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of the model that a timeline is of: a layer of each kind, and the first kind again, whose
    neighbours are layers on both sides."""
    short, kinds = shortened(config)
    count = len(set(kinds))
    return with_layers(config, [*map(kinds.index, range(count)), 0]) if count < len(kinds) else short


def _any_tokens() -> Objective:
    """Of objectives that read more than a batch has here: the gradient of every token's loss."""
    return Objective(lambda outputs, _batch: {"loss": Term(outputs.token_losses.sum(), None, 1.0)}, differentiable=True)


def examples_of(recipe: Recipe, batch: HeaviestBatch, image_token: int = 0) -> list[Example]:
    """Returns documents with targets at their ends; for a reward, each is a pair of answers of half its length."""
    left, made = batch.targets, []
    columns = {"label": 0.0} if recipe.objective.name not in OF_TOKENS else {}
    for length, images in zip(batch.documents, batch.images or ((),) * len(batch.documents), strict=True):
        targets = min(length - 1, left)
        left -= targets
        lengths = (length // 2, length - length // 2) if recipe.objective.name == "reward" else (length,)
        sequences = [_document(one, min(one - 1, targets)) for one in lengths]
        begin = 1
        for count in images:  # a token between two
            sequences[0].input_ids[begin : begin + count] = image_token
            begin += count + 1
        made.append(Example("", 1, 0, tuple(sequences), columns))
    return made


def _document(length: int, targets: int) -> TokenSequence:
    return TokenSequence(np.zeros(length, dtype=np.int32), np.arange(length) >= length - targets)


def _layers(model: Any) -> list[Any]:
    return list(decoder_layers(unwrap_peft(model.causal_lm)))


def fill(model: Any, dtype: torch.dtype | None = None) -> None:
    """Give what is on `meta` a place on the CPU, which under a mode of fake tensors has no memory. Tied weights stay
    tied. dtype: of floating-point parameters; None: their own."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                made[id(parameter)] = torch.nn.Parameter(
                    torch.empty(parameter.shape, dtype=kind), parameter.requires_grad
                )
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class _Unpacked(torch.autograd.Function):
    """A product with a weight that is unpacked for it, in the forward and again in the backward (`models/quantized.py`,
    bitsandbytes' MatMul4Bit)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        return torch.nn.functional.linear(x, torch.empty(shape, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return gradient @ torch.empty(ctx.shape, dtype=gradient.dtype), None


def _unpack_in_forwards(model: Any) -> None:
    packed = {id(parameter) for parameter, _ in linear_weights(model)}
    for module in model.modules():
        if id(getattr(module, "weight", None)) in packed and isinstance(module, torch.nn.Linear):
            layer: Any = module
            layer.forward = partial(_product, (layer.out_features, layer.in_features))


def _product(shape: tuple[int, int], x: Tensor) -> Tensor:
    kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    out: Any = _Unpacked.apply(x.to(kind), shape)
    return out.to(x.dtype)


# --- surroundings


class _InputAlone(torch.autograd.Function):
    """As DeepSpeed's linear layer under stage 3: it keeps input and weight, and autocast's copies only as long as a
    product takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        output = x.matmul(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, weight, bias = ctx.saved_tensors
        with torch.autocast("cpu", dtype=gradient.dtype, enabled=gradient.dtype != torch.float32, cache_enabled=False):
            grad_x = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
            flat = gradient.reshape(-1, gradient.shape[-1])
            grad_weight = flat.t().matmul(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        grad_bias = flat.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


@contextlib.contextmanager
def _linear(how: How) -> Iterator[None]:
    original: Callable[..., Tensor] = torch.nn.functional.linear
    if how.keeps_inputs_alone:
        torch.nn.functional.linear = lambda x, weight, bias=None: _InputAlone.apply(x, weight, bias)
    try:
        yield
    finally:
        torch.nn.functional.linear = original


@contextlib.contextmanager
def _grouped_products(compute: torch.dtype) -> Iterator[None]:
    """torch knows the shapes of grouped products in bf16 alone, though its kernels compute others; transformers' own
    operator for these has the same in- and outputs, and always makes the weight's gradient. In transformers 5.17 the
    backward of that reads values."""
    can_use, grouped = moe._can_use_grouped_mm, moe._grouped_mm
    if compute != torch.bfloat16:
        moe._can_use_grouped_mm = lambda *_: False
        if not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
            moe._grouped_mm = lambda rows, weight, offs: _Grouped.apply(rows.to(weight.dtype), weight)
    try:
        yield
    finally:
        moe._can_use_grouped_mm, moe._grouped_mm = can_use, grouped


class _Grouped(torch.autograd.Function):
    """Of each row with the matrix of its group: rows (S, I), weight (G, I, O)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), weight.shape[2])

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


@dataclass
class _Nobody:
    """Collectives with one rank."""

    calls: int = field(default=0)

    def all_reduce(self, _tensor: Tensor, **_: Any) -> None:
        self.calls += 1

    def all_gather(self, _parts: list[Tensor], _tensor: Tensor, **_: Any) -> None:
        self.calls += 1


@contextlib.contextmanager
def _no_communication() -> Iterator[None]:
    original: Any = tensor_parallel.dist
    tensor_parallel.dist = _Nobody()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        tensor_parallel.dist = original
