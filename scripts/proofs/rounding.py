"""What rounding weights to each export format costs, in KL per token, on small models that are trained here.

    python scripts/proofs/rounding.py [--steps 200]

Models of two families, about a million parameters each, learn this repository's documentation from scratch, byte by
byte; on its last tenth each is compared with itself rounded as `export` rounds: the basis of the thresholds in
finetune/release/export/figures.py, beside published figures of larger models (docs/reference/export.md).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.release.export.eight_bits import quantize

ROOT = Path(__file__).resolve().parents[2]
WIDTH, ROWS = 128, 16
SHAPE: dict[str, Any] = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": WIDTH}
FAMILIES = {"llama": {"model_type": "llama"}, "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True}}


def q8_0(weight: Tensor) -> Tensor:
    import gguf  # pyright: ignore[reportMissingImports]

    kind = gguf.GGMLQuantizationType.Q8_0
    return torch.from_numpy(np.array(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)))


def eight_bits(weight: Tensor, kind: str) -> Tensor:
    """Returns a weight (out, in), fp32, that was rounded to eight bits and decoded."""
    parts = quantize(weight.clone(), kind)
    packed = parts.get("weight_packed")
    values = parts["weight"].float() if packed is None else packed.view(torch.uint8).float() - 128
    return values * parts["weight_scale"].float()


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda weight: weight.bfloat16().float(),
    "float16": lambda weight: weight.half().float(),
    "q8_0": q8_0,
    "int8": lambda weight: eight_bits(weight, "int8"),
    "fp8": lambda weight: eight_bits(weight, "fp8"),
}


def trained(family: dict[str, Any], text: Tensor, steps: int) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE, **family)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        starts = torch.randint(0, len(text) - WIDTH, (ROWS,))
        ids = torch.stack([text[start : start + WIDTH] for start in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, steps - 1):
            print(f"  step {step}: {loss.item():.3f} nats per byte", flush=True)
    return model.eval()


@torch.no_grad()
def cost(model: Any, ids: Tensor, name: str) -> tuple[float, float, float]:
    """Returns KL(model, rounded), mean and maximum, and the share of equal likeliest bytes."""
    other, head = copy.deepcopy(model), model.get_output_embeddings().weight.shape
    layers_only = name in ("int8", "fp8")
    for module in other.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.ndim == 2 and not (layers_only and weight.shape == head):
            weight.copy_(FORMATS[name](weight.data))
    ours, theirs = (torch.log_softmax(one(input_ids=ids).logits.double(), -1) for one in (model, other))
    kl = (ours.exp() * (ours - theirs)).sum(-1)
    return float(kl.mean()), float(kl.max()), float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    pages = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").rglob("*.md")))
    text = torch.from_numpy(np.frombuffer(pages, np.uint8).astype(np.int64))
    end = len(text) * 9 // 10
    held_out = text[end : end + 32 * WIDTH].reshape(32, WIDTH)
    for family, settings in FAMILIES.items():
        print(family)
        model = trained(settings, text[:end], steps)
        for name in FORMATS:
            mean, largest, same = cost(model, held_out, name)
            print(f"  | {name} | {mean:.1e} | {largest:.1e} | {same:.2%} |", flush=True)


if __name__ == "__main__":
    main()
