"""One rank of a gloo group whose layer of experts is divided, against the layer whole: see test_experts.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from finetune.engine.expert_parallel import parallelize_experts
from finetune.engine.parallelism import Parallelism
from finetune.engine.timing import Stopwatch
from finetune.models.moe import group_adapters

EXPERTS, TOP_K, HIDDEN = 8, 2, 16
KINDS: dict[str, Any] = {
    "mixtral": (MixtralExperts, MixtralConfig(hidden_size=HIDDEN, intermediate_size=12, num_local_experts=EXPERTS)),
    "qwen3_moe": (
        Qwen3MoeExperts,
        Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=12, num_experts=EXPERTS),
    ),
    "gpt_oss": (GptOssExperts, GptOssConfig(hidden_size=HIDDEN, intermediate_size=12, num_local_experts=EXPERTS)),
}


def differences(
    rank: int, size: int, store: Path, kind: str, implementation: str, choices: str, adapted: str
) -> dict[str, float]:
    """Largest relative difference of outputs and of gradients; in fp64 where the implementation has it.

    adapted: computed by "peft" or "grouped" in the divided layer, by peft in the whole one; "": without adapters.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        torch.set_default_dtype(torch.float64 if implementation == "eager" else torch.float32)
        torch.manual_seed(0)
        whole = nn.ModuleList([_layer(kind, implementation, bool(adapted))])
        divided = copy.deepcopy(whole)
        if adapted == "grouped":
            group_adapters(divided)
        sizes, stopwatch = Parallelism(shard=size, expert=size), Stopwatch(torch.device("cpu"), True)
        parallelize_experts(divided, sizes, "cpu", stopwatch, set(divided.modules()))
        torch.manual_seed(1 + rank)
        inputs = _inputs(3 + 5 * rank, choices)
        output = torch.randn(3 + 5 * rank, HIDDEN)
        expected, found = _run(whole[0], inputs, output), _run(divided[0], inputs, output)
        trained = [(name, weight) for name, weight in whole[0].named_parameters() if weight.requires_grad]
        for name, weight in trained:  # of the tokens of all ranks, and of the experts that are here
            dist.all_reduce(weight.grad)
            ours: Any = divided[0].get_parameter(name).grad
            if "lora_" in name:  # of all experts, with a gradient for those that are here
                dist.all_reduce(ours)
                expected[name], found[name] = weight.grad, ours
            else:
                expected[name] = weight.grad.chunk(size)[rank]
                found[name] = ours.to_local() * size  # see AllToAll.weight
        return {name: _relative(found[name], expected[name]) for name in expected}
    finally:
        dist.destroy_process_group()


def _layer(kind: str, implementation: str, adapted: bool) -> nn.Module:
    experts, config = KINDS[kind]
    config._experts_implementation = implementation
    made = experts(config)
    if adapted:
        from peft import LoraConfig
        from peft.tuners.lora.layer import ParamWrapper

        for name in ("gate_up_proj", "down_proj"):
            made = ParamWrapper(made, "default", name, LoraConfig(), r=3, lora_alpha=6)
    for name, weight in made.named_parameters():
        nn.init.normal_(weight, std=0.3)  # at 1, gpt-oss's gate turns fp32 rounding into 1.3e-6 of the fp64 gradient
        weight.requires_grad_(not adapted or "lora_" in name)
    return made


def _inputs(tokens: int, choices: str) -> tuple[Tensor, Tensor, Tensor]:
    if choices == "uneven":
        index = torch.rand(tokens, EXPERTS).argsort(1)[:, :TOP_K]
    else:  # all on the experts of one rank
        index = torch.arange(TOP_K).expand(tokens, TOP_K).contiguous()
    weights = torch.rand(tokens, TOP_K).softmax(1)
    return torch.randn(tokens, HIDDEN), index, weights


def _run(experts: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], gradient: Tensor) -> dict[str, Tensor]:
    hidden, weights = (tensor.clone().requires_grad_() for tensor in (inputs[0], inputs[2]))
    output = experts(hidden, inputs[1], weights)
    output.backward(gradient)
    assert hidden.grad is not None
    assert weights.grad is not None
    return {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}


def _relative(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    largest = expected.abs().max().clamp_min(1e-30)
    return ((found - expected).abs().max() / largest).item() if found.numel() else 0.0
