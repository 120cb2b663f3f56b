"""Merges or exports an adapter by the command that a person types, in this process, whose imports are done, and prints
(peak - resident before) of each command, the largest tensor in fp32 and the model's bytes.

python export_memory_worker.py FOLDER layers hidden files "merge {run}" "export {run} --to gguf" ...
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import tiny
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast  # noqa: F401

import finetune.release.export.verify  # noqa: F401 (not to be measured)
from finetune.checkpoints.weight_files import write_shards
from finetune.desk.cli import app
from finetune.models.base_config import without_weights


def main(folder: Path, layers: int, hidden: int, files: int, *commands: str) -> None:
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
    GenerationConfig(eos_token_id=2).save_pretrained(result)
    write_recipe(folder)
    del adapted, adapter, model
    state = {name: tensor.to("meta") for name, tensor in state.items()}

    peaks = {}
    for command in commands:
        words = [one.format(run=folder / "run") for one in command.split()]
        before = begin()
        app([*words, "-o", str(folder / "out")], standalone_mode=False)
        peaks[command] = status("VmHWM") - before
        assert json.loads((folder / "out" / "verify.json").read_text())["tensors"] >= 9 * layers
        shutil.rmtree(folder / "out")
    largest = max(tensor.numel() for tensor in state.values()) * 4
    print(json.dumps({"peaks": peaks, "largest": largest, "bytes": size}))


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
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), *sys.argv[5:])
