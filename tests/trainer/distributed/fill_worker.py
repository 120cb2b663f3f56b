"""Inside a launch of two: models that rank 0 alone has values of, sharded and filled, against the unsharded model.

    torchrun --standalone --nproc_per_node 2 tests/trainer/distributed/fill_worker.py OUT [TYPE ...]

OUT/<rank>.json   by `model_type`: {"difference": relative, of the logits; "saved": whether a state dict has the same
                  names}; "other model": the message where ranks do not have the same one
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.engine.parallelism import Parallelism
from finetune.engine.sharding import Meshes, Sharding, device_meshes, fill_shards, shard_model, take_weights
from finetune.errors import UserError
from finetune.models.base_config import without_weights
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.tiny_config import tiny_config

# Buffers that a module's `config` alone does not make; buffers that are saved; both; and tables of a config's own.
TYPES = ("gemma3_text", "gpt_neo", "deepseek_v3", "nemotron_h", "minimax_m2")


def main(out: Path, types: tuple[str, ...]) -> None:
    dist.init_process_group("gloo")
    transformers.logging.set_verbosity_error()
    meshes = device_meshes(Parallelism(shard=2), "cpu")
    results: dict[str, Any] = {name: compared(name, meshes) for name in types}
    results["other model"] = refused()
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()  # a rank that leaves while the other still communicates ends it
    dist.destroy_process_group()


def compared(name: str, meshes: Meshes) -> dict[str, Any]:
    config = tiny_config(AutoConfig.for_model(name))
    torch.manual_seed(0)
    unsharded = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.manual_seed(0)
    is_main = dist.get_rank() == 0
    ours = AutoModelForCausalLM.from_config(config, dtype=torch.float32) if is_main else meta(config)
    saved = list(unsharded.state_dict())
    layers = [m for m in ours.modules() if type(m).__name__ in (ours._no_split_modules or ())]
    weights = take_weights(ours, is_main)
    loss_model = CausalLMWithLoss(ours)
    shard_model(loss_model, layers, Sharding(meshes, MixedPrecisionPolicy(), OffloadPolicy(), True))
    fill_shards(ours, weights, {}, torch.device("cpu"), torch.device("cpu"))
    ids = torch.arange(24).remainder(97)[None] + 3
    with torch.no_grad():
        logits, wanted = (model.eval()(input_ids=ids, use_cache=False).logits for model in (loss_model, unsharded))
    difference = ((logits - wanted).abs().max() / wanted.abs().max()).item()
    return {"difference": difference, "saved": list(ours.state_dict()) == saved}


def meta(config: Any) -> Any:
    model = without_weights(config, dtype=torch.float32)
    model.tie_weights()
    return model


def refused() -> str | None:
    """Rank 1 has a wider model."""
    config = tiny_config(AutoConfig.for_model("llama"))
    if dist.get_rank():
        config.intermediate_size += 8
    try:
        take_weights(AutoModelForCausalLM.from_config(config), dist.get_rank() == 0)
    except UserError as error:
        return str(error)
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or TYPES)
