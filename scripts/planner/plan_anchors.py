"""Predicted memory beside numbers that others have published, with their settings as far as they are known.

    python scripts/planner/plan_anchors.py

torchtune: README of v0.6.1, Llama 3.1 8B on one RTX 4090, batch 2 x 2,048 tokens, compiled; peak memory as reported
there. Weights and adapters in bfloat16, rank 8, activations recomputed; `full`: PagedAdamW8bit, in the backward
(configs of its recipes). Its products are those of its own kernels: its loss has all logits in bfloat16, here they are
in chunks. Another program was measured, so this checks sizes, not this project's own peak.

TRL: issue 4968 and pull request 5472 say of a model of 0.5 B with the defaults of SFTConfig 21.3 GB on an L4 and 24.2
on an A100. Taken for it: Qwen2.5 0.5B, eight rows of 1,024 tokens in full, weights in fp32 under bfloat16 autocast,
activations recomputed, all logits at once. What of the published bytes an allocator holds without a tensor is not known
here; that the two devices differ shows that it is more than tensors.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}
QWEN_05B: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
}
_LORA: dict[str, Any] = {"lora": {"rank": 8, "alpha": 16, "targets": "all-linear"}}
_TRL: dict[str, Any] = {
    "mode": "full",
    "batch": {"rows": 8, "rows_per_device": 8},
    "train": {"max_steps": 6, "precision": "bf16", "activation_checkpointing": True},
}
ANCHORS: list[tuple[str, float, dict[str, Any], dict[str, Any], int]] = [  # name, GiB, model, changes, tokens a row
    ("torchtune 8B qlora", 7.4, LLAMA_8B, {"mode": "qlora", **_LORA, "quantization": {"type": "nf4"}}, 2048),
    ("torchtune 8B lora", 16.2, LLAMA_8B, {"mode": "lora", **_LORA}, 2048),
    (
        "torchtune 8B full",
        18.9,
        LLAMA_8B,
        {"mode": "full", "optimizer": {"name": "paged_adamw_8bit", "lr": 2e-5, "in_backward": True}},
        2048,
    ),
    ("TRL 0.5B full, L4", 21.3e9 / GIB, QWEN_05B, _TRL, 1024),
    ("TRL 0.5B full, A100", 24.2e9 / GIB, QWEN_05B, _TRL, 1024),
]


def predicted(folder: Path, changes: dict[str, Any], tokens: int) -> int:
    """Returns the bytes of tensors at the peak. tokens: of a row; TRL's has all logits at once."""
    import yaml

    from finetune.engine.launch import Launch
    from finetune.models.config import training_config
    from finetune.plan.memory import HeaviestBatch, Place, estimate_memory
    from finetune.recipe import load_recipe

    values = {
        "run": {"name": "anchor", "dir": str(folder)},
        "model": {"name": str(folder), "cross_entropy": "plain" if changes is _TRL else "auto"},
        "data": {"train": [{"path": "rows.jsonl", "format": "messages"}], "max_length": tokens},
        "batch": {"rows": 2, "rows_per_device": 2},
        "optimizer": {"lr": 3e-4, "max_grad_norm": None},
        "train": {"max_steps": 6, "precision": "bf16_true", "activation_checkpointing": True},
        **changes,
    }
    values["optimizer"] = {"max_grad_norm": None, **values["optimizer"]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    recipe = load_recipe(folder / "recipe.yaml", [])
    rows = values["batch"]["rows_per_device"]
    place, batch = Place(Launch("replicated", 1), 1, "cuda", (8, 9), 24), HeaviestBatch.of_rows(rows, tokens)
    return estimate_memory(recipe, training_config(recipe), place, batch).tensors


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, published, model, changes, tokens in ANCHORS:
            (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
            gib = predicted(folder, changes, tokens) / GIB
            print(f"{name:20} published {published:5.1f} GiB  predicted {gib:5.1f} GiB  {gib / published - 1:+.0%}")


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))
    main()
