"""Real rows, a Llama of 28 M parameters from scratch, four accelerate configs: the loss curves in one plot.

    python benchmarks/gsm8k_curves.py --data gsm8k_train.jsonl

GSM8K (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168, MIT licence) is not part of the project: take train.jsonl
from https://github.com/openai/grade-school-math. Writes benchmarks/results/gsm8k_curves.json and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LAUNCHES = (("single", 1), ("ddp", 2), ("fsdp2", 2), ("zero3_offload", 2))
# The yardstick: one process that adds up the same rows in another order. Training from scratch amplifies rounding, and
# no backend can be expected to stay closer to one process than one process to itself.
REORDERED = "single, other order"
SHAPE = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_tokenizer(data: Path, folder: Path) -> None:
    """Byte-level BPE of 8,192 entries, learnt from the rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"], special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    rows = map(json.loads, data.read_text(encoding="utf-8").splitlines())
    backend.train_from_iterator((text for row in rows for text in row.values()), trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>").save_pretrained(folder)


def recipe(data: Path, folder: Path, steps: int) -> dict[str, Any]:
    return {
        "run": {"name": "gsm8k", "dir": str(folder / "runs")},
        "model": {"config": SHAPE, "tokenizer": str(folder / "tokenizer"), "chat_template": "chatml"},
        "mode": "full",
        "data": {
            "train": [
                {
                    "path": str(data),
                    "format": "prompt_completion",
                    "columns": {"prompt": "question", "completion": "answer"},
                }
            ],
            "max_length": 256,
        },
        "batch": {"rows": 4, "rows_per_device": 1},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
        "schedule": {"warmup_steps": 10},
        "train": {"max_steps": steps, "precision": "fp32"},
    }


def run(recipe_file: Path, config: str, processes: int, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    name = overrides[0].partition("=")[2] if overrides else f"{config}-{processes}"
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_processes", str(processes)]
    command += ["--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml")]
    command += ["-m", "finetune", "train", str(recipe_file), f"run.name={name}", *overrides]
    subprocess.run(command, check=True)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def plot(curves: dict[str, list[dict[str, Any]]], differences: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2))
    reference = [line["loss"] for line in curves["single x1"]]
    styles = [("-", 5, 0.35), ("-", 2.5, 0.6), ("--", 1.6, 1.0), (":", 1.6, 1.0), ("-.", 1.0, 0.7)]
    for (name, lines), (style, width, alpha) in zip(curves.items(), styles, strict=True):
        steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
        above.plot(steps, losses, style, linewidth=width, alpha=alpha, label=name)
        if name != "single x1":
            relative = [abs(b - a) / a for a, b in zip(reference, losses, strict=True)]
            below.plot(steps, relative, ".-", label=f"{name}: at most {differences[name]:.1e}")
    above.set_ylabel("loss, nats per supervised token")
    above.set_title("GSM8K, Llama of 28 M parameters from scratch, fp32: one recipe on four accelerate configs")
    below.set_yscale("log")
    below.set_ylabel("relative difference\nfrom one process")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    data = arguments.data.resolve()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="finetune-gsm8k-") as name:
        folder = Path(name)
        os.environ["FINETUNE_CACHE"] = str(folder / "cache")
        make_tokenizer(data, folder / "tokenizer")
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(data, folder, arguments.steps)), encoding="utf-8")
        curves = {f"{c} x{n}": run(folder / "recipe.yaml", c, n, folder) for c, n in LAUNCHES}
        curves[REORDERED] = run(
            folder / "recipe.yaml", "single", 1, folder, "run.name=reordered", "batch.rows_per_device=2"
        )
        plan = json.loads((folder / "runs" / "single-1" / "plan.json").read_text(encoding="utf-8"))
    reference = [line["loss"] for line in curves["single x1"]]
    differences = {
        name: max(abs(b["loss"] - a) / a for a, b in zip(reference, lines, strict=True))
        for name, lines in curves.items()
    }
    result = {
        "command": f"python benchmarks/gsm8k_curves.py --data gsm8k_train.jsonl --steps {arguments.steps}",
        "hardware": "CPU processes (rehearsal)" if plan["device"] == "cpu" else plan["device"],
        "parameters": plan["parameters"],
        "versions": plan["versions"],
        "largest_relative_difference": differences,
        "loss": {name: [line["loss"] for line in lines] for name, lines in curves.items()},
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "gsm8k_curves.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(curves, differences, RESULTS / "gsm8k_curves.png")
    for name, lines in curves.items():
        first, last = lines[0]["loss"], lines[-1]["loss"]
        print(f"{name:18} {first:.4f} -> {last:.4f}   largest relative difference {differences[name]:.1e}")


if __name__ == "__main__":
    main()
