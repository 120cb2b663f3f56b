"""Inside a group of four, 2 shards x 2 tensor ranks: models cut and sharded, against the same models whole.

    torchrun --nproc_per_node 4 tests/trainer/distributed/tensor_worker.py out

out/<rank>.json   by model: {"loss": relative difference, "gradient": largest relative difference of any parameter's,
                  "copies": whether whole parameters of a layer have bitwise the same gradients on both tensor ranks,
                  "held": this rank's share of all elements,
                  "sent": [collective, elements that all ranks have] of the tensor group in a forward and backward of
                  the losses of all targets,
                  "tokens": of the row, that the norms of the layers and the last norm had}
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.engine import tensor_group
from finetune.engine.parallelism import Parallelism
from finetune.engine.sharding import (
    Meshes,
    Sharding,
    device_meshes,
    fill_shards,
    part_of_shard,
    shard_model,
    take_weights,
)
from finetune.engine.tensor_group import ShardedParameters, TensorGroup
from finetune.engine.tensor_packed import shard_scales
from finetune.engine.tensor_parallel import parallelize
from finetune.models.head import TokenLoss
from finetune.models.loss_model import CausalLMWithLoss, TargetTokens
from finetune.models.packed_linear import make_plain, pack_linear_layers
from finetune.models.weights import add_adapters
from finetune.recipe.schema import Lora, Quantization

PHI3 = {**tiny.MODELS["llama"], "model_type": "phi3"}
# With biases, and a vocabulary that is not divisible.
QWEN2 = {**tiny.MODELS["llama"], "model_type": "qwen2", "vocab_size": 383}
# (model, adapters, whether each rank has some of the tokens between matrices)
CASES: dict[str, tuple[dict[str, Any], Lora | None, bool]] = {
    "llama": (tiny.MODELS["llama"], None, True),
    "llama whole": (tiny.MODELS["llama"], None, False),
    "llama_tied lora": (tiny.MODELS["llama_tied"], Lora(rank=4), True),
    "llama_tied lora whole": (tiny.MODELS["llama_tied"], Lora(rank=4), False),
    "qwen3": (tiny.MODELS["qwen3"], None, True),
    "qwen2": (QWEN2, None, True),
    "phi3": (PHI3, None, True),
    "phi3 lora": (PHI3, Lora(rank=4, targets=["qkv_proj", "down_proj"]), True),
    # With biases and a head; layers that gather their output; dropout, with which the base has another input.
    "qwen2 dora": (
        QWEN2,
        Lora(rank=4, dora=True, targets=["q_proj", "o_proj", "up_proj", "down_proj", "lm_head"]),
        True,
    ),
    "phi3 dora": (
        PHI3,
        Lora(rank=4, dora=True, dropout=0.1, targets=["qkv_proj", "gate_up_proj", "down_proj"]),
        True,
    ),
    "qwen3 dora": (tiny.MODELS["qwen3"], Lora(rank=4, dora=True, dropout=0.1), True),
}
CASES |= {
    "mixtral": (tiny.MODELS["mixtral"], None, False),
    "qwen3_moe lora": (tiny.MODELS["qwen3_moe"], Lora(rank=4), False),
}
CASES |= {
    "llama_wide qlora": (tiny.WIDE, Lora(rank=4), True),
    "llama_wide qlora dora whole": (tiny.WIDE, Lora(rank=4, dora=True), False),
    "qwen2 qlora fp8": (QWEN2, Lora(rank=4), True),
}
PACKED = {name: Quantization(type="fp8" if "fp8" in name else "nf4") for name in CASES if "qlora" in name}
TOKENS = 47  # which the two ranks of a group cannot divide evenly


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    meshes = device_meshes(Parallelism(shard=2, tensor=2), "cpu")
    found = {name: compared(*case, meshes, PACKED.get(name)) for name, case in CASES.items()}
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def compared(
    shape: dict[str, Any], lora: Lora | None, splits: bool, meshes: Meshes, packed: Quantization | None
) -> dict[str, Any]:
    assert meshes.tensor is not None
    ours = made(shape, lora, packed)
    theirs, ids = copy.deepcopy(ours), torch.arange(TOKENS).remainder(41)[None]
    layers = [m for m in theirs.modules() if type(m).__name__ in theirs._no_split_modules]
    make_plain(theirs)
    weights = take_weights(theirs, dist.get_rank() == 0)
    group = meshes.tensor.get_group()
    sharded = parallelize(theirs, TensorGroup(group, meshes.tensor.get_local_rank(), 2), splits_tokens=splits)
    wrapped = CausalLMWithLoss(theirs)
    shard_model(wrapped, layers, Sharding(meshes, MixedPrecisionPolicy(), OffloadPolicy(), True))
    fill_shards(theirs, weights, sharded.shards, torch.device("cpu"), torch.device("cpu"))
    shard_scales(theirs, sharded.shards)
    losses = []
    for model in (ours, wrapped):
        torch.manual_seed(1)  # of dropout
        losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
    gradients = {name: p.grad.flatten() for name, p in ours.named_parameters() if p.requires_grad}
    worst, copies, held = 0.0, True, 0
    for name, parameter in theirs.named_parameters():
        if not parameter.requires_grad:
            continue
        local = own_gradient(parameter, name, sharded, group)
        part = part_of_shard(name, parameter, local, sharded.shards.get(name))
        elements = part.range.start + part.range.stride * torch.arange(part.range.count)[:, None]
        wanted = gradients[name][(elements + torch.arange(part.range.run)).flatten()]
        worst = max(worst, ((local.flatten() - wanted).abs().max() / gradients[name].abs().max()).item())
        held += local.numel()
        if name not in sharded.shards:
            both = [torch.empty_like(local) for _ in range(2)]
            dist.all_gather(both, local, group=group)
            copies &= torch.equal(*both)
    return {
        "loss": abs(losses[1].item() / losses[0].item() - 1),
        "gradient": worst,
        "copies": copies,
        "held": held / sum(g.numel() for g in gradients.values()),
        **traffic(wrapped, ids),
    }


def traffic(model: CausalLMWithLoss, ids: Tensor) -> dict[str, Any]:
    """What the tensor group sends, and the tokens that norms have, in a forward and backward as a run has them."""
    counted, tokens = Counted(), list[int]()
    norms = [m for name, m in model.named_modules() if name.endswith(("_layernorm", "model.norm"))]
    hooks = [m.register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0].shape[1])) for m in norms]
    tensor_group.dist = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        targets = TargetTokens(torch.arange(TOKENS - 1), ids[0, 1:], TokenLoss())
        model(input_ids=ids, targets=targets, use_cache=False).total.backward()
    finally:
        tensor_group.dist = dist
    for hook in hooks:
        hook.remove()
    return {"sent": counted.calls, "tokens": tokens}


class Counted:
    """torch.distributed, and the collectives that were called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*tensors: Tensor, **options: Any) -> None:
            self.calls.append((name, max(tensor.numel() for tensor in tensors)))
            getattr(dist, name)(*tensors, **options)

        return call


def own_gradient(parameter: Tensor, name: str, sharded: ShardedParameters, group: Any) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    local = parameter.grad.to_local().contiguous()
    if name in sharded.partial:
        dist.all_reduce(local, group=group)
    return local


def made(shape: dict[str, Any], lora: Lora | None, packed: Quantization | None) -> Any:
    """The same on every rank; B of an adapter begins as 0, and then A has no gradient.

    With a B of std 0.1, six parts in 1e8 of rounding become up to 2e-5 of a gradient: that would test the CPU.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), attn_implementation="eager")
    if packed is not None:
        cpu = torch.device("cpu")
        pack_linear_layers(model, packed, torch.float32, cpu, cpu)
    if lora is not None:
        model = add_adapters(model, lora, torch.float32)
    for name, parameter in model.named_parameters():
        if lora is None and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
