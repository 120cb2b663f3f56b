"""Exports an adapter in a process of its own, compares the export with it, and prints (peak after - resident before) of
both, the largest tensor in fp32 and the model's bytes.

python export_memory_worker.py FOLDER layers hidden files gate     (gate: 1: the comparison, too)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiny
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

from finetune.export.hf_folder import export_folder
from finetune.export.tensor_files import TensorFiles, write_shards
from finetune.export.trained import find_trained
from finetune.export.verify import verify_export
from finetune.models.base_config import without_weights


def main(folder: Path, layers: int, hidden: int, files: int, gate: int) -> None:
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 8 * hidden}
    config = AutoConfig.for_model(**{**tiny.MODELS["llama"], **shape, "dtype": "bfloat16"})
    model = without_weights(config)
    (folder / "base").mkdir(parents=True)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    size = sum(tensor.nbytes for tensor in state.values())
    write_shards(
        *(folder / "base", state, lambda name: torch.full(state[name].shape, 0.01, dtype=torch.bfloat16)),
        shard_bytes=size // files + 1,
    )
    config.save_pretrained(folder / "base")
    tiny.tokenizer().save_pretrained(folder / "base")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapter = {
        name.replace(".default", ""): torch.ones_like(parameter, device="cpu", dtype=torch.float32)
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    result = folder / "run" / "model"
    adapted.peft_config["default"].save_pretrained(result)
    write_shards(result, adapter, adapter.__getitem__)
    (result / "model.safetensors").rename(result / "adapter_model.safetensors")
    tiny.tokenizer().save_pretrained(result)
    write_recipe(folder)
    del adapted, adapter, model

    before = begin()
    export_folder(find_trained(folder / "run"), folder / "out", shard_bytes=size // files + 1)
    peak = status("VmHWM") - before
    before = begin()
    if gate:
        assert verify_export(folder / "out", find_trained(folder / "run"), rows=2).tokens
    of_gate = status("VmHWM") - before
    written = TensorFiles(sorted((folder / "out").glob("*.safetensors")))
    assert len(list((folder / "out").glob("*.safetensors"))) >= files
    largest = max(written.meta(name).numel() for name in written.names()) * 4
    print(json.dumps({"peak": peak, "gate": of_gate, "largest": largest, "bytes": size}))


def write_recipe(folder: Path) -> None:
    """What the gate takes rows from."""
    rows = tiny.write_rows(folder / "rows.jsonl", tiny.conversations(4))
    recipe = {
        "run": {"name": "run", "dir": str(folder)},
        "model": {"name": str(folder / "base")},
        "mode": "lora",
        "lora": {"rank": 4},
        "data": {"train": [{"path": str(rows), "format": "messages"}], "max_length": 64},
        "batch": {"rows": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 1, "precision": "bf16"},
    }
    (folder / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def begin() -> int:
    """Returns what is resident; the peak begins anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
