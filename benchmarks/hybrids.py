"""Hybrids: packed documents, their mixers one by one, against one document per forward, in turns on the same documents.

    python benchmarks/hybrids.py [--only lfm2] [--json benchmarks/results/hybrids.json]

Each family is a model of about ten million parameters of the real class, with random weights, in fp32 on the CPU by
transformers' own operations in torch (no kernel packages). A micro-batch is 12 documents of 30 to 300 tokens, as long
as short conversations. Forward and backward through the run's own path (`ForwardPass`, loss in the head). The ratio is
taken within a round: seconds of the 12 forwards over seconds of the one; median over rounds, with the lowest and
highest. By processor time as well, which other work on the machine moves less. Losses of both ways are compared.
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
from finetune.models.attention.mixers import run_per_document
from finetune.models.loss_model import CausalLMWithLoss
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.recipe.schema import Objective

LENGTHS = (180, 42, 95, 300, 61, 33, 130, 75, 210, 30, 54, 118)  # tokens of the documents
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    cells = []
    for name in options.only:
        cells.append(cell := measure(name, options.rounds))
        print(json.dumps(cell), flush=True)
    if options.json:
        about = {"command": " ".join(["python benchmarks/hybrids.py", *sys.argv[1:]]), "torch": torch.__version__}
        about |= {"transformers": transformers.__version__, "threads": torch.get_num_threads()}
        about |= {"machine": platform.processor() or platform.machine(), "lengths": LENGTHS}
        options.json.write_text(json.dumps({**about, "cells": cells}, indent=1) + "\n", encoding="utf-8")


def measure(name: str, rounds: int) -> dict[str, Any]:
    config = AutoConfig.for_model(name, **FAMILIES[name])
    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    choice = choose_attention("auto", model_class, config, "cpu", False)
    assert choice.isolates_documents, choice.reason
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=choice.implementation)
    run_per_document(model, choice.mixers)
    loss_model, forward = CausalLMWithLoss(model.train()), ForwardPass(choice, make_objective(Objective()))
    rng = np.random.default_rng(0)
    examples = [
        Example("a", i, 0, (Sequence(rng.integers(3, 4096, n).astype(np.int32), np.arange(n) >= n // 2),))
        for i, n in enumerate(LENGTHS)
    ]
    ways = {"packed": [collate(examples)], "one_by_one": [collate([example]) for example in examples]}

    def run(batches: list[Any]) -> tuple[float, float, float]:
        """Returns seconds by the clock and of the processor, and the loss."""
        clock, processor, total = time.perf_counter(), time.process_time(), 0.0
        for batch in batches:
            outputs = forward(loss_model, batch)
            outputs.total.backward()
            total += outputs.total.item()
        model.zero_grad(set_to_none=True)
        return time.perf_counter() - clock, time.process_time() - processor, total

    losses = {way: run(batches)[2] for way, batches in ways.items()}  # warm
    taken = [{way: run(batches) for way, batches in ways.items()} for _ in range(rounds)]
    by_clock, by_processor = (sorted(one["one_by_one"][i] / one["packed"][i] for one in taken) for i in range(2))
    return {
        "family": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "mixers": list(choice.mixers),
        "packed_s": round(statistics.median(one["packed"][0] for one in taken), 4),
        "one_by_one_s": round(statistics.median(one["one_by_one"][0] for one in taken), 4),
        "times_as_fast": [round(x, 2) for x in (statistics.median(by_clock), by_clock[0], by_clock[-1])],
        "by_processor_time": [
            round(x, 2) for x in (statistics.median(by_processor), by_processor[0], by_processor[-1])
        ],
        "loss_difference": abs(losses["packed"] / losses["one_by_one"] - 1),
    }


if __name__ == "__main__":
    main()
