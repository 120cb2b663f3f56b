"""Operators, launches, bytes and least time of a micro-batch on an H100 that is not there, with and without kernels.

    python scripts/planner/roofline.py                       # 8B LoRA, 8B QLoRA, 1B full: docs/proofs/gpu.md
    python scripts/planner/roofline.py mixtral qwen3-moe gpt-oss         # docs/reference/experts.md
    python scripts/planner/roofline.py 8b-lora --set train.activation_checkpointing=false

Forward and backward of the project's own model, as `assemble` makes it, on simulated devices (`tests/support/
fake_devices.py`): every operator that a GPU would run, of models of two and of four layers, drawn out to all by a line.
The least time of an operator is the longest of its FLOPs at 0.75 of the card's peak, its bytes at 0.8 of its bandwidth,
and 2.5 us; attention at the published shares of FlashAttention-2 on Hopper (0.40, backward 0.33,
https://arxiv.org/abs/2407.08608, figures 5 and 6). A sum of least times, not a prediction: nothing overlaps, nothing
waits for the host. Kernels of Liger count as installed (`finetune/plan/stand_ins.py` has their tensors).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

PEAK, BANDWIDTH, LAUNCH_S = 989e12, 3.35e12, 2.5e-6  # H100 SXM: bf16 FLOP/s, byte/s (its data sheet)
PRODUCTS, MEMORY, ATTENTION = 0.75, 0.8, (0.40, 0.33)  # shares that are reached; attention: forward, backward
TOKENS, LAYERS = 4096, (2, 4)
OPTIMIZER_BYTES = 28 + 4 + 8  # of a trained weight: AdamW in fp32, the norm, clipping
RECIPES = {
    "8b-lora": ("llama3.1-8b/lora.yaml", ()),
    "8b-qlora": ("llama3.1-8b/qlora.yaml", ()),
    "1b-full": ("llama3.2-1b/full.yaml", ()),
    "mixtral": ("mixtral-8x7b/qlora.yaml", ("mode=lora", "quantization=null", "lora.targets=all-linear")),
    "qwen3-moe": ("qwen3-30b-a3b/lora.yaml", ("lora.targets=all-linear",)),
    "gpt-oss": ("gpt-oss-20b/lora.yaml", ()),
}
# Without arguments.
DENSE = ("8b-lora", "8b-qlora", "1b-full")
BEFORE = {
    "8b-lora": ("model.kernels=plain",),
    "8b-qlora": ("model.kernels=plain", "lora.dropout=0.05"),  # with which peft computes adapters
    "1b-full": ("model.kernels=plain",),
    **dict.fromkeys(("mixtral", "qwen3-moe", "gpt-oss"), ("model.kernels=plain",)),
}
COMMON = ("data.max_length=4096", "batch.rows_per_device=1", "train.activation_checkpointing=true")
MM = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}
GROUPED = {"_grouped_mm"}  # (S, I) with (E, I, O), or (M, S) with (S, N): S rows, each of one expert
# Operators that read or write some elements of a tensor: the rest of what they get.
PICKS = {**dict.fromkeys(("gather", "scatter_", "scatter_add_"), slice(2, None)), "embedding": slice(1, None)}


def measure(name: str, overrides: list[str]) -> dict[str, Any]:
    """Returns numbers of a micro-batch by group of operators. In a process of its own: libtorch is changed."""
    import peft  # noqa: F401  (once there seem to be devices, bitsandbytes looks for functions of CUDA builds)
    import torch
    from device_meter import DeviceMeter
    from fake_devices import enable, fake_cuda, real
    from fake_run import _fill

    from finetune.data.batch import collate
    from finetune.features import load_recipe
    from finetune.models import fused_layers, loss_model, packed_linear
    from finetune.models.assemble import assemble
    from finetune.models.attention import attention_for
    from finetune.models.casts import cast_once
    from finetune.models.patches import replace_forward
    from finetune.objectives import make_objective
    from finetune.objectives.forward import ForwardPass
    from finetune.plan.micro_batch import HeaviestBatch, examples_of, kernels_at
    from finetune.plan.shapes import skeleton, with_layers
    from finetune.plan.tables import shipped_config
    from finetune.utils import unwrap_peft

    recipe = load_recipe(str(ROOT / "recipes" / RECIPES[name][0]), [*COMMON, *RECIPES[name][1], *overrides])
    full: Any = shipped_config(str(recipe.model.name))
    assert full is not None
    enable()
    fused_layers.liger_problem = loss_model.liger_problem = lambda _device: None
    attention = attention_for(recipe, full, "cuda", kernels_at("cuda", (9, 0)))
    packed_linear.unpacked_weight = unpacked
    silu = torch.nn.functional.silu
    one_kernel = one_silu(torch)

    def count(layers: int) -> dict[str, Any]:
        config = with_layers(full, list(range(layers)))  # every kind, if two kinds alternate
        model = real(skeleton)(recipe, config, attention)
        listed = Counter[tuple[str, str]]()
        meter_of: list[DeviceMeter] = []

        def see(func: Any, args: Any, out: Any) -> None:
            group, seconds, size, launches = cost(func, args, out, meter_of[0].phase)
            listed[group, "s"] += seconds  # type: ignore[assignment]
            listed[group, "bytes"] += size  # type: ignore[assignment]
            listed[group, "launches"] += launches

        with fake_cuda(block=1) as meter, cast_once():
            meter_of.append(meter)
            _fill(model, torch.device("cuda"))
            unwrap_peft(model).tie_weights()
            for module in model.modules():
                if packed_linear.is_4bit(module):
                    replace_forward(module, packed_product(module), "unpacked product")
            wrapped = assemble(model, recipe, torch.device("cuda"), has_scores=False, only_sums=True)
            forward = ForwardPass(attention, make_objective(recipe.objective, ("rows",)))
            batch = collate(examples_of(recipe.objective, HeaviestBatch.of_rows(1, TOKENS)))
            batch = batch.map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype, device="cuda"))
            meter._count, torch.nn.functional.silu = see, one_kernel
            for parameter in model.parameters():  # those of an earlier micro-batch, which are added to
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            listed.clear()
            meter.begin("forward")
            loss = forward(wrapped, batch).total
            meter.begin("backward")
            loss.backward()
            torch.nn.functional.silu = silu
            peak = max(meter.peaks["forward"], meter.peaks["backward"])
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        numbers = {"/".join(key): value for key, value in listed.items()}
        head = wrapped.choice.implementation
        said = f"{wrapped.kernels}; {head} cross entropy"
        return {**numbers, "peak": peak, "trained": trained, "kernels": 0, "said": said}

    few, many = (count(layers) for layers in LAYERS)
    said = many.pop("said")
    all_layers = full.num_hidden_layers
    drawn = {
        key: few.get(key, 0) + (many[key] - few.get(key, 0)) * (all_layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0])
        for key in many
    }
    size = OPTIMIZER_BYTES * drawn["trained"] / 2
    drawn |= {"optimizer, half a step's/s": size / (MEMORY * BANDWIDTH), "optimizer, half a step's/bytes": size}
    return {**drawn, "kernels": re.sub(r"\d+ ", "", said)}


def cost(func: Any, args: Any, out: Any, phase: str) -> tuple[str, float, float, int]:
    """Returns (group, least seconds, bytes, launches) of an operator."""
    from finetune.plan.meter import _FREE, _tensors, device_type

    name = func.name().partition("::")[2].partition(".")[0]
    tensors = [tensor for tensor in _tensors((*args, out)) if device_type(tensor) == "cuda"]
    if func.is_view or name in _FREE or not tensors:
        return "views", 0.0, 0.0, 0
    size = float(sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors))
    flops, group = 0.0, group_of(name, args, out)
    if name in PICKS:  # not all of the tensor that they pick from or put into
        size = 2.0 * max(tensor.nbytes for tensor in (*args, out)[PICKS[name]] if hasattr(tensor, "nbytes"))
    if name in MM:
        left, right = _tensors(args)[-2:]
        flops = 2.0 * left.numel() * right.shape[-1] / (PRODUCTS * PEAK)
    elif name in GROUPED:
        flops = 2.0 * args[0].numel() * args[1].shape[-1] / (PRODUCTS * PEAK)
    elif group == "attention":
        share = ATTENTION[phase == "backward" and "backward" in name]
        flops = attention_flops(args) * (2.5 if "backward" in name else 1.0) / (share * PEAK)
    return group, max(flops, size / (MEMORY * BANDWIDTH), LAUNCH_S), size, 1


def attention_flops(args: Any) -> float:
    """Returns FLOPs of varlen attention to one document, from its arguments: queries are the first, or follow the
    gradient that is like them; the window is (tokens before, tokens after), -1 for all."""
    seen = next((value[0] + 1 for value in args if isinstance(value, list | tuple) and len(value) == 2), 0) or TOKENS
    return 4.0 * args[0].numel() / TOKENS * (TOKENS * seen - seen**2 / 2)


def group_of(name: str, args: Any, out: Any) -> str:
    if "attn" in name or "attention" in name:
        return "attention"
    if name in MM | GROUPED:
        shapes = [tensor.shape[-2:] for tensor in args if hasattr(tensor, "shape")]
        if name in GROUPED:  # by sizes of the weights: not by their number, and not by that of the rows
            shapes = [out.shape[-2:] if out.dim() == 3 else args[1].shape[-2:]]
        small = any(8 <= size <= 64 for shape in shapes for size in shape)
        return "products of adapters" if small else "products"
    known = {"norm": "norms", "norm_backward": "norms", "gate": "gates", "gate_backward": "gates"}
    known |= {"silu": "gates", "silu_backward": "gates", "rotate": "rotations", "unpack": "unpacking"}
    known["cross_entropy"] = "cross entropy"
    if name in known:
        return known[name]
    if "dropout" in name:
        return "dropout"
    return "the rest element by element"


def unpacked(layer: Any, weight: Any) -> Any:
    import torch

    return torch.ops.roofline.unpack(weight, layer.out_features, layer.in_features)


def packed_product(layer: Any) -> Callable[..., Any]:
    """Returns a forward of a packed layer by itself, as bitsandbytes computes it in training."""
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(weight)
            return torch.nn.functional.linear(x, unpacked(layer, weight))

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] @ unpacked(layer, ctx.saved_tensors[0]), None

    return lambda x: Product.apply(x.to(torch.bfloat16), layer.weight)


def one_silu(torch: Any) -> Callable[..., Any]:
    """Returns silu with a backward of one kernel, as on a GPU; simulated devices would take it to pieces."""
    operators = {
        "silu": ("(Tensor x) -> Tensor", torch.empty_like),
        "silu_backward": ("(Tensor gradient, Tensor x) -> Tensor", lambda _gradient, x: torch.empty_like(x)),
        "unpack": (
            "(Tensor packed, int outputs, int inputs) -> Tensor",
            lambda packed, outputs, inputs: packed.new_empty(outputs, inputs, dtype=torch.bfloat16),
        ),
    }
    for name, (schema, shapes) in operators.items():
        torch.library.define(f"roofline::{name}", schema)
        torch.library.register_fake(f"roofline::{name}", shapes)

    class Silu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return torch.ops.roofline.silu(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return torch.ops.roofline.silu_backward(gradients[0], ctx.saved_tensors[0])

    return lambda x, inplace=False: Silu.apply(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RECIPES)}; default: {', '.join(DENSE)}")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="overrides", help="of the recipe")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.names[0], arguments.overrides)))
        sys.stdout.flush()
        os._exit(0)
    for name in arguments.names or DENSE:
        found = []
        for overrides in (BEFORE[name], ()):
            program = [sys.executable, __file__, name, "--measure", "--set", *overrides, *arguments.overrides]
            done = subprocess.run(program, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            found.append(json.loads(done.stdout.splitlines()[-1]))
        Console(width=130).print(table(name, *found))


def table(name: str, before: dict[str, Any], after: dict[str, Any]) -> Table:
    shown = Table(
        title=f"{name}, {TOKENS:,} tokens, H100. Before: {', '.join(BEFORE[name])}. After: {after['kernels']}"
    )
    shown.add_column("")
    for which in ("before", "after"):
        for unit in ("ms", "GB", "launches"):
            shown.add_column(f"{unit} {which}", justify="right")
    groups = dict.fromkeys(key.partition("/")[0] for one in (before, after) for key in one if key.endswith("/s"))
    for group in sorted(groups, key=lambda group: -before.get(f"{group}/s", 0.0)):
        if group != "views":
            shown.add_row(group, *(cell for one in (before, after) for cell in _cells(one, [group])))
    shown.add_row("sum", *(cell for one in (before, after) for cell in _cells(one, list(groups))), style="bold")
    for label, scale in (("peak, GiB", 2**30),):
        shown.add_row(label, *(cell for one in (before, after) for cell in (f"{one['peak'] / scale:.1f}", "", "")))
    return shown


def _cells(one: dict[str, Any], groups: list[str]) -> list[str]:
    def total(unit: str) -> float:
        return sum(one.get(f"{group}/{unit}", 0.0) for group in groups)

    return [f"{total('s') * 1e3:.1f}", f"{total('bytes') / 1e9:.1f}", f"{total('launches'):,.0f}"]


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))
    main()
