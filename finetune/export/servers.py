"""How servers are started with an export: commands that are printed, none of which is run here."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from finetune.utils import divisors

# Of an adapter's settings, what vLLM refuses or does not read (vllm/lora/peft_helper.py), with what it is.
_UNREAD = {
    "use_dora": "DoRA",
    "modules_to_save": "modules trained in full",
    "target_parameters": "adapters on experts' tensors",
    "trainable_token_indices": "trained rows of added tokens",
    "rank_pattern": "ranks that differ by module",
    "alpha_pattern": "scales that differ by module",
}
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def unread_by_vllm(settings: dict[str, Any]) -> str | None:
    """Returns why vLLM does not serve an adapter next to its base; None where it does. settings: its config."""
    found = [what for key, what in _UNREAD.items() if settings.get(key)]
    if settings.get("bias", "none") != "none":
        found.append("trained biases")
    if settings["r"] > _RANKS[-1]:
        found.append(f"a rank above {_RANKS[-1]}")
    return found[0] if found else None


def tensor_parallel_size(heads: int, kv_heads: int, gpus: int) -> int:
    """Returns over how many of the GPUs vLLM can split attention: heads are divided, heads of keys and values are
    divided or repeated (vllm/model_executor/models/llama.py).

    >>> [tensor_parallel_size(32, 8, gpus) for gpus in (1, 3, 8, 16)], tensor_parallel_size(12, 8, 6)
    ([1, 2, 8, 16], 4)
    """
    fits = [n for n in divisors(heads) if n <= gpus and (kv_heads % n == 0 or n % kv_heads == 0)]
    return fits[-1]


def serve_commands(export: Path, config: dict[str, Any], gpus: int, adapter: Path | None) -> list[tuple[str, str]]:
    """Returns servers with their commands, for a folder of merged weights. config: of its text part; adapter: the
    folder of what was merged, where there is one."""
    heads = config["num_attention_heads"]
    size = tensor_parallel_size(heads, config.get("num_key_value_heads") or heads, gpus)
    folder, split = shlex.quote(str(export)), f" --tensor-parallel-size {size}" if size > 1 else ""
    commands = [("vLLM", f"vllm serve {folder}{split}")]
    if adapter is not None:
        settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        if (why := unread_by_vllm(settings)) is None:
            rank = next(rank for rank in _RANKS if rank >= settings["r"])
            base, name = shlex.quote(settings["base_model_name_or_path"]), adapter.resolve().parent.name
            modules = shlex.quote(f"{name}={adapter}")
            how = f"--enable-lora --max-lora-rank {rank} --lora-modules {modules}"
            commands.append(("vLLM, the adapter next to its base", f"vllm serve {base} {how}{split}"))
        else:
            commands.append(("vLLM, the adapter next to its base", f"not: it does not read {why}"))
    tp = f" --tp {size}" if size > 1 else ""
    return [
        *commands,
        ("SGLang", f"python -m sglang.launch_server --model-path {folder}{tp}"),
        ("MLX", f"mlx_lm.convert --hf-path {folder}"),
        ("llama.cpp", f"python convert_hf_to_gguf.py {folder}  # or: finetune export --to gguf"),
    ]
