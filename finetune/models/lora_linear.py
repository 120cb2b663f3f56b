"""Linear layers with LoRA, in fewer passes over their inputs and outputs than peft's. Importing this imports peft.

    y = x W' + s (x A') B'        x (T, I), W (O, I), A (r, I), B (O, r), s the scaling

peft makes the adapter's (T, O), multiplies it by s and adds it; each of the three is a pass over the output, and
autograd has as many in the backward, and adds up gradients of x from W and from A. Here W's product adds to what B's
has written: B's is bound by memory and only writes, W's by its FLOPs and reads on the side. s is the product's own
factor. Layers of one input (q, k and v; gate and up) have one product with their A, one for the gradients of all A, and
one gradient of x into which all add. The same values to rounding, with fewer roundings: what is rounded twice is the
adapter's small share. A W that is packed (QLoRA) is unpacked for the product, and again in the backward; peft would
also copy each output.

Under fp16 s multiplies an (T, r), never a gradient of (T, O) or a product that s makes smaller: these would overflow at
another loss scale than where layers are fused, and others steps be skipped.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora import bnb
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.models import packed_linear
from finetune.models.adapters import has_hooks, is_plain
from finetune.models.casts import shared_cast
from finetune.models.packed_linear import Fp8Linear
from finetune.models.patches import mix_in
from finetune.models.stored_layers import StoredLinear

OF_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse_adapters(model: nn.Module) -> None:
    """Make peft's linear layers compute as `FusedLinear` does, in place."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module) in _KINDS:
            mix_in(module, FusedLinear, "fused adapter")
            module.siblings = Siblings([module])
    for parent in modules:
        for names in OF_ONE_INPUT:
            layers: list[Any] = [getattr(parent, name, None) for name in names]
            if not all(isinstance(layer, FusedLinear) for layer in layers):
                continue
            if _calls_alike(type(parent), names):
                shared = Siblings(layers)
                for layer in layers:
                    layer.siblings = shared


@functools.cache
def _calls_alike(kind: type[nn.Module], names: tuple[str, ...]) -> bool:
    """Returns whether a forward calls each of these layers once, with the same variable and at the same depth: not in a
    branch of its own, as in models whose layers take over another's keys."""
    calls = [
        (layer, variable, len(line) - len(line.lstrip()))
        for line in inspect.getsource(kind.forward).splitlines()
        for layer, variable in re.findall(rf"self\.({'|'.join(names)})\((\w+)\)", line)
    ]
    is_alike = len({call[1:] for call in calls}) == 1
    return is_alike and sorted(layer for layer, _, _ in calls) == sorted(names)


class AdaptedParts(NamedTuple):
    """What a layer computes with, looked up once: torch finds a module's parts by Python."""

    base: Any
    down: nn.Linear  # A
    up: nn.Linear  # B
    scaling: float


class Siblings:
    """Layers of one input. The first that is called with it computes the outputs of all, the others take theirs."""

    def __init__(self, layers: list[FusedLinear]):
        self.layers = layers
        self.x: Tensor | None = None
        self.outputs: dict[FusedLinear, Tensor] = {}  # not taken yet

    def compute(self, layer: FusedLinear, part: AdaptedParts, x: Tensor) -> Tensor:
        """Returns the output of a layer that fuses, and keeps those of its siblings. part: of the layer."""
        self.x = None
        parts = [part if other is layer else other.part() for other in self.layers]
        together = [one for one in parts if one is not None]
        layers, together = (self.layers, together) if len(together) == len(parts) else ([layer], [part])
        self.outputs = dict(zip(layers, products(x, together), strict=True))
        self.x = x
        return self.take(layer)

    def take(self, layer: FusedLinear) -> Tensor:
        output = self.outputs.pop(layer)
        if not self.outputs:
            self.x = None  # or an activation would live until the next forward
        return output


_KINDS = (Linear, getattr(bnb, "Linear4bit", None))  # peft has the latter if bitsandbytes is installed


class FusedLinear:
    """Mixed into the class of a peft layer."""

    siblings: Siblings

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        compiles, siblings = torch.compiler.is_compiling(), self.siblings
        if not compiles and x is siblings.x and self in siblings.outputs and not args and not kwargs:
            return siblings.take(self)  # computed with those of the sibling that was called first
        part = None if args or kwargs else self.part()
        if part is None:
            if not args and not kwargs and x.dtype == torch.float16 and self._plain_adapter() is not None:
                return self._unfused(x)
            return super().forward(x, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]  (of peft's)
        if not compiles:
            return siblings.compute(self, part, x)
        # Casts are left to the compiler, which has few kernels for all of them; layers of one input, too: those that
        # take another's output would change its state, which recomputation must not.
        device, base = x.device.type, part.base
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        bias = None if base.bias is None else base.bias.to(compute)
        down, up = (half.weight.to(compute) for half in (part.down, part.up))
        rows = x.to(compute).reshape(-1, x.shape[-1])
        y, _ = _adapted(rows, base.weight.to(compute), bias, down, up, part.scaling)
        return y.view(*x.shape[:-1], y.shape[-1])

    def part(self) -> AdaptedParts | None:
        """Returns what this layer computes the formula above with, if it does, with weights that are on this rank. It
        does not with dropout, DoRA, products in 8 bits, and several adapters or none; nor if hooks gather its weight
        (ZeRO-3) or communicate (tensor parallel)."""
        layer: Any = self
        name = self._plain_adapter()
        if name is None:
            return None
        part = AdaptedParts(layer.base_layer, layer.lora_A[name], layer.lora_B[name], layer.scaling[name])
        fuses = (
            isinstance(layer.lora_dropout[name], nn.Identity)
            # A packed weight in a compiled layer would be kept unpacked for the backward.
            and (
                is_plain(part.base)
                or (
                    (type(part.base) in (Fp8Linear, StoredLinear) or packed_linear.is_4bit(part.base))
                    and not has_hooks(part.base)
                    and not torch.compiler.is_compiling()
                )
            )
            and is_plain(part.down)
            and is_plain(part.up)
            and part.up.bias is None
            and not part.base.weight.requires_grad
            and (part.base.bias is None or not part.base.bias.requires_grad)
        )
        return part if fuses else None

    def _plain_adapter(self) -> str | None:
        """Returns the name of the adapter if one is active, without a variant such as DoRA."""
        layer: Any = self
        active = layer.active_adapters
        if len(active) != 1 or layer.disable_adapters or layer.merged:
            return None
        return active[0] if active[0] in layer.lora_A and active[0] not in layer.lora_variant else None

    def _unfused(self, x: Tensor) -> Tensor:
        """Returns peft's formula, by calls of its modules, whose hooks run; the scaling is at the smallest product."""
        layer: Any = self
        name = layer.active_adapters[0]
        inner = layer.lora_A[name](layer.lora_dropout[name](x)) * layer.scaling[name]
        return layer.base_layer(x) + layer.lora_B[name](inner)


def products(x: Tensor, parts: list[AdaptedParts]) -> tuple[Tensor, ...]:
    """Returns each layer's output, (..., O) in the type that products have here: autocast's, or the input's.

    Operators are chosen for the host, which starts them one by one: none that changes nothing, such as a cast to the
    type that is there, and none of those that only call others (`linear`, `matmul`, `split`).
    """
    device = x.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    bases, scaling = [part.base for part in parts], [part.scaling for part in parts]
    frozen = [tensor for base in bases for tensor in (base.weight, base.bias)]
    down, up = [part.down.weight for part in parts], [part.up.weight for part in parts]
    of_adapters = (*down, *up)
    # Without a cast they are used at once: FSDP2 has gathered them for this layer, and frees them.
    shares = any(weight.dtype != compute for weight in of_adapters)
    cast = functools.partial(_cast, compute=compute)
    casts = shared_cast(of_adapters, cast) if shares else cast(of_adapters)
    outputs: Any = _Products.apply(x, compute, scaling, bases, casts, *frozen, *of_adapters)
    # A model may add to an output in place (Llama 4), which autograd allows for views that are created outside.
    rows = x.shape[:-1]
    return tuple(y.view(*rows, y.shape[-1]) for y in outputs)  # -1 would not do for no rows


class _Casts(NamedTuple):
    """Weights of the adapters of n layers in the compute type, and transposed, as each micro-batch takes them."""

    down: Tensor  # (sum of r, I), all A
    up: list[Tensor]  # n times (O, r)
    down_t: Tensor
    up_t: list[Tensor]


@torch.no_grad()
def _cast(of_adapters: tuple[Tensor, ...], compute: torch.dtype) -> _Casts:  # of_adapters: n A, n B
    n = len(of_adapters) // 2
    down = _typed(of_adapters[0] if n == 1 else torch.cat(of_adapters[:n]), compute)
    up = [_typed(weight, compute) for weight in of_adapters[n:]]
    return _Casts(down, up, down.t(), [weight.t() for weight in up])


def _typed(tensor: Tensor, compute: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == compute else tensor.to(compute)


def _split(tensor: Tensor, ranks: list[int], dim: int) -> Sequence[Tensor]:
    """Returns the parts of layers that share an input, along a dimension."""
    return [tensor] if len(ranks) == 1 else tensor.split_with_sizes(ranks, dim)


class _Products(torch.autograd.Function):
    """Outputs (T, O) of n layers. bases: those that are adapted; weights: n times (W, packed or not, and bias or None),
    n A, n B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        compute: torch.dtype,
        scaling: list[float],
        bases: list[Any],
        casts: _Casts,
        *weights: Any,
    ) -> tuple[Tensor, ...]:
        n = len(scaling)
        ctx.compute, ctx.scaling, ctx.bases, ctx.shape, ctx.type = compute, scaling, bases, x.shape, x.dtype
        base = weights[: 2 * n]
        ctx.ranks = [a.shape[0] for a in weights[2 * n : 3 * n]]
        rows = _typed(x, compute).reshape(-1, x.shape[-1])  # (T, I)
        inner = torch.mm(rows, casts.down_t)  # (T, sum of r)
        outputs = []
        for i, part in enumerate(_split(inner, ctx.ranks, 1)):
            weight, bias = base[2 * i : 2 * i + 2]
            y = _scaled_product(part, casts.up_t[i], None if bias is None else _typed(bias, compute), scaling[i])
            outputs.append(y.addmm_(rows, _matrix(bases[i], weight, compute).t()))
        ctx.save_for_backward(rows, inner, casts.down, *casts.up, *base[::2])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, inner, down, *weights = ctx.saved_tensors
        n, compute, ranks = len(ctx.scaling), ctx.compute, ctx.ranks
        up, base = weights[:n], weights[n:]
        of_inner = _of_inner(grads, up, ranks, inner)  # (T, sum of r), without the scaling
        of_up = [
            None if of_y is None else _of_up(of_y, part, up[i], ctx.scaling[i])
            for i, (of_y, part) in enumerate(zip(grads, _split(inner, ranks, 1), strict=True))
        ]
        scaling = ctx.scaling[0]
        if compute == torch.float16 or any(other != scaling for other in ctx.scaling):
            for part, factor in zip(_split(of_inner, ranks, 1), ctx.scaling, strict=True):
                part.mul_(factor)
            scaling = 1.0
        # beta=0: A is not read, it gives the shape. The product is scaled before it is rounded.
        of_down = _split(torch.addmm(down, of_inner.t(), rows, beta=0, alpha=scaling), ranks, 0)
        of_x: Any = None
        if ctx.needs_input_grad[0]:
            of_x = _scaled_product(of_inner, down, None, scaling)
            for i, of_y in enumerate(grads):
                if of_y is not None:
                    of_x.addmm_(of_y, _matrix(ctx.bases[i], base[i], compute))
            of_x = _typed(of_x.view(ctx.shape), ctx.type)
        of_down = [None if of_y is None else one for of_y, one in zip(grads, of_down, strict=True)]
        return of_x, None, None, None, None, *[None] * (2 * n), *of_down, *of_up


def _scaled_product(inner: Tensor, up_t: Tensor, bias: Tensor | None, scaling: float) -> Tensor:
    """Returns bias + s inner B', of (T, r) and (r, O), for W's product to add to. s is before the rounding."""
    if bias is not None:
        return torch.addmm(bias, inner, up_t, alpha=scaling)
    if scaling == 1:
        return torch.mm(inner, up_t)
    y = torch.empty(inner.shape[0], up_t.shape[1], dtype=inner.dtype, device=inner.device)
    return y.addmm_(inner, up_t, beta=0, alpha=scaling)  # beta=0: what is there is not read


def _of_inner(grads: Sequence[Any], up: list[Tensor], ranks: list[int], inner: Tensor) -> Tensor:
    """Returns the gradients (T, sum of r) of the layers' inner parts, without the scaling; 0 for an unused output."""
    if len(ranks) == 1:
        return torch.mm(grads[0], up[0])
    of_inner = torch.empty_like(inner)
    for of_y, weight, part in zip(grads, up, _split(of_inner, ranks, 1), strict=True):
        if of_y is None:
            part.zero_()
        else:
            torch.mm(of_y, weight, out=part)
    return of_inner


def _of_up(of_y: Tensor, inner: Tensor, up: Tensor, scaling: float) -> Tensor:
    """Returns the gradient (O, r) of B."""
    if of_y.dtype == torch.float16:
        return torch.mm(of_y.t(), inner * scaling)
    return torch.addmm(up, of_y.t(), inner, beta=0, alpha=scaling)


def _matrix(base: Any, weight: Tensor, compute: torch.dtype) -> Tensor:  # (O, I)
    return _typed(weight if type(base) is nn.Linear else packed_linear.unpacked_weight(base, weight), compute)


# --- in a compiled layer: an operator that torch.compile calls as it is


@torch.library.custom_op("finetune::adapted", mutates_args=())
def _adapted(
    rows: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Returns the output (T, O) and rows A' (T, r). All tensors have the compute type."""
    inner = F.linear(rows, down)
    return _scaled_product(inner, up.t(), bias, scaling).addmm_(rows, weight.t()), inner


@_adapted.register_fake
def _(rows: Tensor, weight: Tensor, _bias: Any, down: Tensor, _up: Any, _scaling: Any) -> tuple[Tensor, Tensor]:
    return rows.new_empty(len(rows), len(weight)), rows.new_empty(len(rows), len(down))


@torch.library.custom_op("finetune::adapted_backward", mutates_args=())
def _adapted_backward(
    of_y: Tensor, rows: Tensor, inner: Tensor, weight: Tensor, down: Tensor, up: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of rows, A and B."""
    of_inner, of_up = of_y @ up, _of_up(of_y, inner, up, scaling)
    if of_y.dtype == torch.float16:
        of_inner, scaling = of_inner.mul_(scaling), 1.0
    of_down = torch.addmm(down, of_inner.t(), rows, beta=0, alpha=scaling)
    return _scaled_product(of_inner, down, None, scaling).addmm_(of_y, weight), of_down, of_up


@_adapted_backward.register_fake
def _(_of_y: Any, rows: Tensor, _inner: Any, _weight: Any, down: Tensor, up: Tensor, _scaling: Any) -> Any:
    return tuple(like.new_empty(like.shape) for like in (rows, down, up))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, weight, _, down, up, ctx.scaling = inputs
    ctx.save_for_backward(rows, output[1], weight, down, up)


def _gradients(ctx: Any, of_y: Tensor, _of_inner: Tensor) -> Any:
    of_rows, of_down, of_up = _adapted_backward(of_y, *ctx.saved_tensors, ctx.scaling)
    return of_rows, None, None, of_down, of_up, None


_adapted.register_autograd(_gradients, setup_context=_keep)
