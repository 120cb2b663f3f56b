"""Hybrids: packed documents against one document per forward, in turns on the same documents.

    python benchmarks/hybrids.py [--only lfm2] [--sizes wide] [--json benchmarks/results/hybrids.json]

Each family is a model of the real class with random weights, in fp32 on the CPU by transformers' own operations in
torch (no kernel packages), in two sizes. `wide`: four to eight million parameters, 12 documents of 30 to 300 tokens, as
long as short conversations: arithmetic takes most of the time, which no way of packing makes less. `narrow`: a quarter
as wide, 24 documents of 9 to 75 tokens: calls of operations take most of it, as they do on a device that computes
faster than it is told to.

Ways: one document per forward; packed, documents of like length one call of a mixer; packed, documents one by one in
the mixers; and the row as if it were one document, which is wrong, and as fast as packing could ever be. Forward and
backward through the run's own path (`ForwardPass`, loss in the head). Ratios are taken within a round: seconds of one
document per forward over seconds of the other way; median over rounds, with the lowest and highest. By processor time
as well, which other work on the machine moves less. Losses of the ways are compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.data.batch import collate
from finetune.data.samples import Example, Sequence
from finetune.models.attention import choose_attention
from finetune.models.attention.mixers import Mixer, Mixers, run_per_document
from finetune.models.loss_model import CausalLMWithLoss
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.recipe.objective_settings import Sft

LENGTHS = {  # tokens of the documents
    "wide": (180, 42, 95, 300, 61, 33, 130, 75, 210, 30, 54, 118),
    "narrow": (18, 42, 9, 60, 61, 33, 13, 75, 21, 30, 54, 11) * 2,
}
_NARROW = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "shared_intermediate_size": 128}
_NARROW |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32)
_NARROW |= dict.fromkeys(
    ("head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 16
)
_SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**_SHAPE, **_DELTA},
    "qwen3_next": {**_SHAPE, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 192},
    "olmo_hybrid": {**_SHAPE, **_DELTA},
    "lfm2": {**_SHAPE, "layer_types": ["conv", "conv", "conv", "full_attention"]},
    "granitemoehybrid": {**_SHAPE, "layer_types": ["mamba", "mamba", "mamba", "attention"], "num_local_experts": 0}
    | {"num_experts_per_tok": 0, "shared_intermediate_size": 768, "mamba_n_heads": 8, "mamba_d_head": 64}
    | {"mamba_d_state": 32, "mamba_chunk_size": 64},
    "bamba": {**_SHAPE, "attn_layer_indices": [3], "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32}
    | {"mamba_chunk_size": 64},
    "nemotron_h": {**_SHAPE, "layers_block_type": ["mamba", "mlp", "mamba", "attention"], "mamba_num_heads": 8}
    | {"mamba_head_dim": 64, "ssm_state_size": 32, "chunk_size": 64, "n_groups": 2},
    "mamba2": {
        "vocab_size": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_heads": 8,
        "head_dim": 64,
    }
    | {"state_size": 32, "n_groups": 2, "chunk_size": 64},
    "minimax": {**_SHAPE, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "block_size": 64},
    "gpt_oss": {**_SHAPE, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64}
    | {"intermediate_size": 192, "layer_types": ["sliding_attention", "full_attention"] * 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--sizes", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    cells = []
    for size in options.sizes:
        for name in options.only:
            cells.append(cell := measure(name, size, options.rounds))
            print(json.dumps(cell), flush=True)
    if options.json:
        about = {"command": " ".join(["python benchmarks/hybrids.py", *sys.argv[1:]]), "torch": torch.__version__}
        about |= {"transformers": transformers.__version__, "threads": torch.get_num_threads()}
        about |= {"machine": platform.processor() or platform.machine(), "lengths": LENGTHS}
        options.json.write_text(json.dumps({**about, "cells": cells}, indent=1) + "\n", encoding="utf-8")


def measure(name: str, size: str, rounds: int) -> dict[str, Any]:
    settings = FAMILIES[name]
    if size == "narrow":
        settings = settings | {key: value for key, value in _NARROW.items() if key in settings}
    config = AutoConfig.for_model(name, **settings)
    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    choice = choose_attention("auto", model_class, config, "cpu", False)
    assert choice.isolates_documents, choice.reason
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=choice.implementation)
    loss_model, forward = CausalLMWithLoss(model.train()), ForwardPass(choice, make_objective(Sft()))
    rng = np.random.default_rng(0)
    examples = [
        Example("a", i, 0, (Sequence(rng.integers(3, 512, n).astype(np.int32), np.arange(n) >= n // 2),))
        for i, n in enumerate(LENGTHS[size])
    ]
    row, each = [collate(examples)], [collate([example]) for example in examples]
    one_by_one = {kind: Mixer(**{**mixer, "batched": False}) for kind, mixer in choice.mixers.items()}
    ways: dict[str, tuple[Mixers, list[Any]]] = {
        "one_per_forward": ({}, each),
        "packed": (choice.mixers, row),
        "packed_one_by_one": (one_by_one, row),
        "bound": ({}, row),
    }
    as_in_transformers = {module: module.forward for module in model.modules() if type(module).__name__ in one_by_one}

    def run(way: str) -> tuple[float, float, float]:
        """Returns seconds by the clock and of the processor, and the loss."""
        for module, original in as_in_transformers.items():
            module.forward = original
        mixers, batches = ways[way]
        run_per_document(model, mixers)
        clock, processor, total = time.perf_counter(), time.process_time(), 0.0
        for batch in batches:
            outputs = forward(loss_model, batch)
            outputs.total.backward()
            total += outputs.total.item()
        model.zero_grad(set_to_none=True)
        return time.perf_counter() - clock, time.process_time() - processor, total

    losses = {way: run(way)[2] for way in ways}  # warm
    taken = [{way: run(way) for way in ways} for _ in range(rounds)]

    def times_as_fast(way: str, i: int) -> list[float]:
        ratios = sorted(one["one_per_forward"][i] / one[way][i] for one in taken)
        return [round(x, 2) for x in (statistics.median(ratios), ratios[0], ratios[-1])]

    return {
        "size": size,
        "family": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "mixers": {kind: mixer["batched"] for kind, mixer in choice.mixers.items()},
        "one_per_forward_processor_s": round(statistics.median(one["one_per_forward"][1] for one in taken), 4),
        "times_as_fast": {way: times_as_fast(way, 0) for way in list(ways)[1:]},
        "by_processor_time": {way: times_as_fast(way, 1) for way in list(ways)[1:]},
        "loss_difference": abs(losses["packed"] / losses["one_per_forward"] - 1),
    }


if __name__ == "__main__":
    main()
