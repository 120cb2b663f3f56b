"""Interface of a backend, for everything above this package.

Code above it reads like single-device code: it calls `backward` with its part of the global loss and gets the global
gradient norm from `step`. Differences in how backends average, scale or clip are undone here and in the files of the
backends, nowhere else.
"""

from __future__ import annotations

import abc
import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import psutil
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import DynamicCache, PretrainedConfig

from finetune.data.batch import TokenShare
from finetune.engine.context_parallel import token_ranks
from finetune.engine.launch import Launch
from finetune.engine.optimizer_step import (
    IDLE,
    OF_MEDIA,
    LossScale,
    NonFinite,
    StepInBackward,
    scale_gradients,
    squared_norm,
)
from finetune.engine.overflow import HalfProduct, Sum, half_products, overflow_as_sum
from finetune.engine.ranks import Ranks
from finetune.engine.state_shards import ShardPart, Types, make_room
from finetune.engine.timing import Stopwatch
from finetune.models.packed_linear import state_tensors
from finetune.models.weights import Placement
from finetune.models.wrapped import Outputs, WrappedModel
from finetune.objectives.objective import TokenRanks
from finetune.recipe.schema import Recipe
from finetune.utils import divisors

T = TypeVar("T")  # a micro-batch; this package does not look into it
Forward = Callable[[Any, T], Any]  # calls a model with a micro-batch's inputs, and returns what the model returns
Loss = Callable[[Outputs, T], Tensor]  # () a micro-batch's part of the step's loss
NamedTensors = list[tuple[str, Tensor]]
BuildOptimizers = Callable[[NamedTensors], list[Optimizer]]


class Engine(abc.ABC):
    """One backend, one model. Attributes describe this process and its group."""

    gathers_in_forward = False  # a forward waits for the other ranks at each part of the model
    copies_state = True  # a save may copy this rank's state to CPU memory, and write it while steps run
    averaged_ranks = 1  # the reduction of gradients is their mean over as many ranks; 1: it is their sum
    # First backwards of a process that differ from later ones, in memory or in the order of sums over ranks. The loop
    # runs these before its first step and drops them, or a resumed run would not be bitwise the same.
    warm_ups = 0
    keeps_gradients = False  # CUDA graphs add to them at their addresses: zeroed in place, not dropped. Before `wrap`

    def __init__(self, accelerator: Accelerator, launch: Launch, recipe: Recipe, config: PretrainedConfig):
        self.accelerator = accelerator
        self.launch = launch
        self.rank = accelerator.process_index
        self.world_size = accelerator.num_processes
        self.parallelism = launch.parallelism
        self.data_rank = self.parallelism.data_rank(self.rank)  # data parallel rank, whose rows this rank works on
        self.is_data_parallel_leader = self.parallelism.is_data_parallel_leader(self.rank)
        place = self.parallelism.coordinates(self.rank)
        self.context_shard = TokenShare(
            self.parallelism.context, self.parallelism.sequence, place["context"], place["sequence"]
        )
        self.is_main = accelerator.is_main_process
        self.device = accelerator.device
        self.local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # on this machine
        self.max_grad_norm = recipe.optimizer.max_grad_norm
        self.loss_scale = LossScale.of(recipe.train.precision)
        self.steps_in_backward = recipe.optimizer.in_backward
        self.stopwatch = Stopwatch(self.device, self.world_size == 1 or self.knows_waits(recipe.train.compile))
        self.ranks = Ranks(accelerator, self.parallelism, self.stopwatch)
        self.trial_is_collective = self.world_size > 1  # `trial` waits for other ranks: all must call it, alike
        self.optimizers: list[Optimizer] = []
        self.model: Any = None  # callable of a forward: `WrappedModel` in the backend's wrapper
        self.unwrapped: Any = None  # the transformers or peft model inside

    # --- set-up

    @property
    def token_ranks(self) -> TokenRanks:
        """Returns the ranks that share this rank's rows. Collective on first use."""
        return token_ranks(self.parallelism, self.rank)

    @abc.abstractmethod
    def placement(self, recipe: Recipe) -> Placement:
        """Returns how this rank loads its weights."""

    @contextlib.contextmanager
    def loading(self, recipe: Recipe) -> Iterator[None]:
        """Context manager around loading the weights."""
        yield

    @contextlib.contextmanager
    def loading_whole(self) -> Iterator[None]:
        """Context manager around loading a second model, which this rank keeps in full, next to the wrapped one."""
        yield

    @abc.abstractmethod
    def wrap(self, model: WrappedModel, build: BuildOptimizers, micro_batches: int) -> None:
        """Shard or replicate the model, then build the optimizers over the parameters that this rank steps."""

    def build_optimizers(self, trained: list[tuple[str, Tensor, Tensor]], build: BuildOptimizers) -> None:
        """Build the optimizers of a backend that steps plain tensors. trained: name, parameter, this rank's shard."""
        if self.steps_in_backward:
            self.stepper = StepInBackward(trained, build, self.device)
            self.optimizers = self.stepper.optimizers
        else:
            self.optimizers = build([(name, shard) for name, _, shard in trained])

    def find_overflows(self, model: WrappedModel) -> None:
        """Let fp16 skip the steps that one process skips, if ranks have summands of a micro-batch's gradient.
        Collective."""
        shares = self.parallelism.tokens > 1 or self.parallelism.tensor > 1
        products = list(half_products(model)) if self.loss_scale.enabled and shares else []
        if products:
            self.watch_products(products)

    def watch_products(self, products: list[HalfProduct]) -> None:
        """Run `overflow_as_sum` for those of this rank."""
        for product in products:
            parameter, sums = product.parameter(), self.sums_of(product.name)
            if parameter is not None and sums:
                overflow_as_sum(parameter, sums)

    def sums_of(self, name: str) -> list[Sum]:
        """Returns the sums over the ranks that have summands of one micro-batch's gradient of a parameter."""
        return [self.token_ranks.sum] if self.parallelism.tokens > 1 else []

    # --- the loop

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Context manager around a forward and its backward. last: the step follows."""
        self.last = last
        yield

    def accumulate(self, batches: Sequence[T], forward: Forward[T], loss: Loss[T]) -> None:
        """Run forward and backward of every micro-batch of a step."""
        for batch in batches:
            with self.micro_batch(last=batch is batches[-1]):
                value = loss(forward(self.model, batch), batch)
                with self.stopwatch.phase("backward"):
                    self.backward(value)
            # Nodes of a graph are of a stream: a capture of the next forward must not meet those of this one.
            del value

    def forwards(self, batches: Iterable[T], forward: Forward[T]) -> Iterator[tuple[T, Outputs]]:
        """Yields the outputs of each micro-batch, on the ranks that count them. Collective."""
        for batch in batches:
            yield batch, forward(self.model, batch)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager for forwards without dropout and gradients."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    def new_cache(self) -> Any:
        """Returns an empty cache of keys and values, for `past_key_values` of the forwards of a generation."""
        return DynamicCache(config=self.unwrapped.config)

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Context manager for the many short forwards of a generation, inside `evaluating`. Collective."""
        yield

    def all_have_room(self, needed: int) -> bool:
        """Returns whether every rank has `needed` bytes left on its device (CPUs: its share). Collective."""
        if self.device.type == "cuda":
            kept_by_allocator = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            left = torch.cuda.mem_get_info(self.device)[0] + kept_by_allocator
        else:
            left = psutil.virtual_memory().available // self.local_processes
        return not self.ranks.sum(float(needed > left))[0]

    def summary(self, micro_batches: int) -> dict[str, Any]:
        """Returns how this backend divides the model, for a plan. micro_batches: number per step on each process."""
        return {}

    @property
    def loss_factor(self) -> float:
        """Returns the factor of this rank's part of the loss in a backward.

        It undoes the mean of the reduction. fp16 has the scale alone, and the mean is undone with it, after the
        reduction: gradients before it are those of one process, and overflow in the same steps.
        """
        return self.loss_scale.value if self.loss_scale.enabled else float(self.averaged_ranks)

    @property
    def gradient_scale(self) -> float:
        """Returns the factor between reduced gradients and the true ones; 1 unless fp16."""
        return self.loss_scale.value / self.averaged_ranks if self.loss_scale.enabled else 1.0

    @abc.abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Run the backward of this rank's part of the step's loss; gradients over all ranks add up to the global one.

        If `steps_in_backward`, the optimizer has stepped when it returns.
        """

    def micro_batch_sizes(self, rows: int) -> list[int]:
        """Returns the sizes that a trial may choose from, ascending. rows: of a step, on each data-parallel rank."""
        return divisors(rows)

    def trial(self, batches: Sequence[T], forward: Forward[T], loss: Loss[T]) -> None:
        """Use the memory of a step's forwards and backwards. `drop_gradients` undoes it. batches: equal ones, of which
        one suffices if they run one after another."""
        with self.micro_batch(last=False):
            self.backward(loss(forward(self.model, batches[0]), batches[0]))

    @abc.abstractmethod
    def drop_gradients(self) -> None:
        """Drop the gradients of a warm-up or a trial, so that they do not reach the next step."""

    @abc.abstractmethod
    def step(self) -> float | None:
        """Clip and update. Returns the global gradient norm before clipping; None if fp16 skips it to lower its scale.

        Raises NonFinite before anything is stepped; if `steps_in_backward`, afterwards, with `stepped` set.
        """

    def clip_and_step(
        self, gradients: list[Tensor], over_ranks: Callable[[Tensor], float], counted: list[Tensor] | None = None
    ) -> float | None:
        """Run `step` for a backend whose gradients are plain tensors on this rank, then drop these.

        gradients: this rank's part. counted: gradients of the norm, if not all; each element once over
        all ranks after `over_ranks`, which adds up the squared norms. The norm is that of the true gradient
        (`gradient_scale` divided out), clipping is torch.nn.utils.clip_grad_norm_'s.
        """
        if self.steps_in_backward:  # too late to prevent a step
            norm = math.sqrt(over_ranks(self.stepper.take_squared_norm()))
            if not math.isfinite(norm):
                raise NonFinite("the gradient is not finite", stepped=True)
            return norm
        scale = self.gradient_scale
        local = squared_norm(gradients if counted is None else counted, self.device)
        norm = math.sqrt(over_ranks(local)) / scale if scale else math.nan
        if not self.loss_scale.enabled and not math.isfinite(norm):
            raise NonFinite("the gradient is not finite")
        if steps := self.loss_scale.update(norm):
            clip = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
            if clip / scale != 1.0 and gradients:
                scale_gradients(gradients, clip / scale)
            for optimizer in self.optimizers:
                optimizer.step()
        self.drop_gradients()
        return norm if steps else None

    def prepare_groups(self, lr_factor: float, kinds: Collection[str]) -> None:
        """Set each group's rate. A step without images leaves out tower and projector, as torch does. kinds: of the
        step's files."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * lr_factor
                of_media = group.get(OF_MEDIA, ())  # kinds of files
                group[IDLE] = bool(of_media) and not any(kind in kinds for kind in of_media)

    # --- meters

    def knows_waits(self, compiles: bool) -> bool:
        """Returns whether `stopwatch` sees all waits of this rank for others: only then is their time a metric."""
        return False

    def gradients(self) -> list[Tensor]:
        """Returns this rank's gradients between the last backward of a step and the step."""
        return [p.grad for p in self.unwrapped.parameters() if p.grad is not None]

    # --- the result

    def full_tensors(
        self, trainable_only: bool, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Yields each parameter and saved buffer of the unwrapped model, unsharded: (name, CPU tensor on rank 0, None
        elsewhere).

        Collective: every rank must consume all of it. One tensor at a time is full anywhere, as long as the caller
        frees the last one before it takes the next. dtype: type that floating-point tensors are cast to on their
        device; None keeps their own.
        """
        for name, tensor in saved_tensors(self.unwrapped, trainable_only).items():
            yield name, self.full_on_main(name, tensor, dtype)

    @abc.abstractmethod
    def full_on_main(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """Returns a tensor of `full_tensors`. Collective."""

    def saved_shapes(self, trainable_only: bool) -> dict[str, Tensor]:
        """Returns the tensors of full_tensors, in its order, without values (device `meta`). No communication."""
        return {
            # ds_shape: shape of a parameter sharded by ZeRO-3; a DTensor's shape is that of the full one
            name: torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")
            for name, tensor in saved_tensors(self.unwrapped, trainable_only).items()
        }

    # --- checkpoints

    @abc.abstractmethod
    def parts(self, reading: bool) -> list[ShardPart]:
        """Returns the parts this rank writes to a checkpoint, each element on one rank only, or reads from one."""

    def make_room(self, owner: Optimizer, stepped: Tensor, types: Types) -> None:
        """Allocate the state of a stepped tensor before it is read from a checkpoint."""
        make_room(owner, stepped, types)

    def restored(self) -> None:  # noqa: B027 (most backends have nothing to do)
        """Update tensors derived from the parts after these were filled from a checkpoint. Collective."""

    def close(self) -> None:
        """Release this run but stay in the process group: a process may run several recipes in turn."""
        self.optimizers, self.model, self.unwrapped = [], None, None
        self.accelerator.free_memory()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def wait_after_gradients(loss: Tensor, stopwatch: Stopwatch) -> None:
    """Begin a wait when the backward of `loss` has finished computing; the caller ends it.

    Other waits are callbacks of the same kind (DDP's finalize_backward, FSDP2's _root_post_backward_final_callback);
    they run in the order in which they were queued.
    """
    engine = torch.autograd.Variable._execution_engine
    loss.register_hook(lambda _gradient: engine.queue_callback(stopwatch.begin_wait))


def named_trainables(model: Any) -> NamedTensors:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def saved_tensors(model: Any, trainable_only: bool) -> dict[str, Tensor]:
    """Returns the tensors of the result, not copies, as this rank holds them; tied ones by their first name."""
    state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(list(state.items()))}
    return {
        name: tensor
        for name, tensor in state.items()
        if first[id(tensor)] == name and (not trainable_only or tensor.requires_grad)
    }


def detached(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns a tensor without its graph, in `dtype` if that is not None and the tensor is floating-point."""
    tensor = tensor.detach()
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


# --- bytes of a run's state in this rank's device memory


class StorageCounter:
    """Adds up the storages of tensors on one kind of device, each storage once."""

    def __init__(self, device: torch.device):
        self._device = device.type
        self._counted: set[int] = set()

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Returns the bytes of storages that were not counted before."""
        total = 0
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type != self._device:
                continue
            storage = local.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._counted:
                self._counted.add(storage.data_ptr())
                total += storage.nbytes()
        return total


def measure_state_bytes(engine: Engine) -> tuple[int, int]:
    """Returns (weights and buffers, optimizer state) after a step. Master weights count as the optimizer's."""
    counter, model = StorageCounter(engine.device), engine.unwrapped
    weights: list[Tensor] = [getattr(p, "ds_tensor", p) for p in model.parameters()]  # under ZeRO-3 its shard
    weights += model.buffers()
    weights += [tensor for module in model.modules() for _, tensor in state_tensors(module)]  # unpack 4-bit weights
    states: list[Any] = []
    for optimizer in engine.optimizers:
        states += [p for group in optimizer.param_groups for p in group["params"]]
        states += [value for stepped, state in optimizer.state.items() for value in (stepped, *state.values())]
    return counter.add(weights), counter.add(value for value in states if isinstance(value, Tensor))
