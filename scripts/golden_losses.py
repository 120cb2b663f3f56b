"""The losses of a fixed set of small recipes on one process, to the last bit: what a refactoring must not move.

    python scripts/golden_losses.py --json before.json               # of the package on PYTHONPATH, or of this checkout
    python scripts/golden_losses.py --against before.json            # train and compare; exit status 1 if one moved
    python scripts/golden_losses.py --against before.json after.json # compare two files
    python scripts/golden_losses.py --only lora mixtral              # recipes with one of these words in their names

Only the command line and recipe keys are used, so that the same file runs on trees years apart. Floats are stored in
hexadecimal. They hold for one machine: another CPU or torch rounds differently, which the table says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import killable
import tiny

ROOT = Path(__file__).resolve().parent.parent
STEPS = 8
# What the recipe fixes of a line of metrics.jsonl; the other keys are times and memory.
KEYS = ("loss", "grad_norm", "lr", "epoch", "tokens", "supervised_tokens", "padding_tokens", "eval_loss", "exact_match")
PREFIXES = ("loss/", "tokens/", "router_", "experts/")
WIDE = 65_536  # entries of a vocabulary with which the head's logits need several chunks


@dataclass(frozen=True)
class Case:
    name: str
    overrides: tuple[str, ...] = ()
    model: str = "llama"


LORA = ("mode=lora", "lora={rank: 4, alpha: 8}", "optimizer.lr=5e-3")
QLORA = (*LORA, "mode=qlora", "quantization={type: nf4}")
UNPACKED = "data.packing=false"
# A letter is an answer that models so small sometimes find.
EVALUATION = "evaluate={every_steps: 4, exact_match: 12, generate: 2, max_new_tokens: 8, answer: '([a-z])'}"
MIXTURE = "data.mixture={by: tokens, temperature: 2}"
BALANCE = "objective.router_aux_loss_coef=0.02"
HEAD = "lora.targets=[lm_head, q_proj]"
IMAGES = ("data.train={pictures}", "data.eval={pictures}", "data.image={}", "data.max_length=96")
TOWER = "model.train=[language, projector, vision]"
CASES = (
    Case("full", (EVALUATION,)),
    Case("full unpacked", (UNPACKED, EVALUATION)),
    Case("full one micro-batch", ("batch.rows_per_device=4",)),
    Case("full token budget", (UNPACKED, "data.max_length=32", "batch={rows: 9, tokens_per_device: 40}")),
    Case("full tied", (), "llama_tied"),
    Case("full from scratch", ("model.config={model}", "model.name=null", "model.tokenizer={folder}/llama")),
    Case("full bf16", ("train.precision=bf16",)),
    Case("full bf16_true", ("train.precision=bf16_true",)),
    Case("full checkpointing", ("train.activation_checkpointing=true", "train.activation_offload=true")),
    Case("full checkpointing selective", ("train.activation_checkpointing=selective",)),
    Case(
        "full in backward", ("optimizer={lr: 1e-3, in_backward: true, max_grad_norm: null}", "batch.rows_per_device=4")
    ),
    Case("full muon wsd", ("optimizer.name=muon", "schedule={name: wsd, decay_ratio: 0.5}")),
    Case("full 8-bit adamw", ("optimizer.name=adamw_8bit",)),
    Case("full sgd no clip", ("optimizer={name: sgd, lr: 0.1, max_grad_norm: null}", "schedule.name=linear")),
    Case("full z-loss smoothing", ("objective={z_loss: 1e-3, label_smoothing: 0.1}",)),
    Case("full plain head", ("model.cross_entropy=plain", "objective.z_loss=1e-3")),
    Case("full several chunks", ("data.max_length=256", "batch.rows_per_device=4", "objective.z_loss=1e-3"), "wide"),
    Case("full last answer", ("objective.train_on=last_assistant",)),
    Case("full all tokens split", ("objective.train_on=all", "data.overlong=split", "data.max_length=24")),
    Case("full truncate", ("data.overlong=truncate", "data.max_length=24")),
    Case("full stream", ("data.streaming=true", "data.window=32")),
    Case("full stream of two", ("data.streaming=true", "data.window=32", "data.train={two}")),
    Case("full mixture", ("data.train={two}", MIXTURE, EVALUATION)),
    Case("full weights by rows", ("data.train={two}", "data.mixture={by: rows}", UNPACKED)),
    Case("full sources no mixture", ("data.train={two}", "data.balance=1")),
    Case("full many formats", ("data.train={formats}", EVALUATION)),
    Case("full mistral window", (), "mistral"),
    Case("full qwen3", (), "qwen3"),
    Case("full mixtral balance", (BALANCE, EVALUATION), "mixtral"),
    Case("full qwen3_moe checkpointing", (BALANCE, "train.activation_checkpointing=true"), "qwen3_moe"),
    Case("full qwen3_moe sources", (BALANCE, "data.train={two}", UNPACKED), "qwen3_moe"),
    Case("lora", (*LORA, EVALUATION)),
    Case("lora unpacked", (*LORA, UNPACKED)),
    Case("lora tied", LORA, "llama_tied"),
    Case("lora dropout rslora", (*LORA, "lora.dropout=0.1", "lora.rslora=true")),
    Case("lora dora", (*LORA, "lora.dora=true")),
    Case("lora bf16 checkpointing", (*LORA, "train.precision=bf16", "train.activation_checkpointing=true")),
    Case("lora on the head", (*LORA, HEAD)),
    Case("lora on a tied head", (*LORA, HEAD), "llama_tied"),
    Case("lora and whole head", (*LORA, "lora.modules_to_save=[lm_head]")),
    Case("lora several chunks", (*LORA, "data.max_length=256", "batch.rows_per_device=4"), "wide"),
    Case("lora mixtral balance", (*LORA, BALANCE, "lora.targets=[q_proj, k_proj, v_proj, o_proj]"), "mixtral"),
    Case("lora mixtral experts", LORA, "mixtral"),
    Case("qlora", (*QLORA, EVALUATION)),
    Case("qlora unpacked", (*QLORA, UNPACKED)),
    Case("qlora dropout selective", (*QLORA, "lora.dropout=0.1", "train.activation_checkpointing=selective")),
    Case("full images", IMAGES, "smolvlm_sees"),
    Case("full images tower", (*IMAGES, TOWER), "qwen2_5_vl_sees"),
    Case("full images projector", (*IMAGES, "model.train=[projector]"), "gemma3_sees"),
    Case("lora images", (*LORA, *IMAGES, EVALUATION), "qwen3_vl_sees"),
    Case("lora images tower", (*LORA, *IMAGES, TOWER), "mistral3_sees"),
)


def prepare(folder: Path) -> None:
    """Writes models, rows in several formats, and the recipe that the cases override."""
    import yaml

    for model in tiny.MODELS:
        tiny.save_model(folder, model)
    tiny.save_model(folder / "wide-vocabulary", "llama", vocab_size=WIDE)
    (folder / "wide-vocabulary" / "llama").rename(folder / "wide")
    for model in tiny.SEEING:
        tiny.save_seeing(folder, model)
    tiny.write_pictures(folder, "pictures", 48)
    rows, others = tiny.conversations(120), tiny.conversations(60, seed=2)
    pairs = [[message["content"] for message in row["messages"]] for row in others]
    files = {
        "rows": rows,
        "others": others,
        "held_out": tiny.conversations(12, seed=1),
        "alpaca": [{"instruction": question, "output": answer} for question, answer in pairs],
        "pairs": [{"prompt": question, "completion": " " + answer} for question, answer in pairs],
        "text": [{"text": f"{question} {answer}"} for question, answer in pairs],
    }
    for name, content in files.items():
        tiny.write_rows(folder / f"{name}.jsonl", content)
    recipe = {
        "run": {"name": "base", "dir": str(folder / "runs")},
        "model": {"name": str(folder / "llama")},
        "mode": "full",
        "data": {
            "train": [{"path": str(folder / "rows.jsonl"), "format": "messages"}],
            "eval": [{"path": str(folder / "held_out.jsonl"), "format": "messages"}],
            "max_length": 64,
        },
        "batch": {"rows": 4, "rows_per_device": 2},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
        "schedule": {"warmup_steps": 2},
        "train": {"max_steps": STEPS, "precision": "fp32"},
        "evaluate": {"at_start": False},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def overrides(folder: Path, case: Case) -> list[str]:
    """Overrides of the base recipe, with the paths of `folder`."""
    two = [
        {"path": f"{folder}/{name}.jsonl", "format": "messages", "weight": w}
        for name, w in (("rows", 1), ("others", 2))
    ]
    formats = {"alpaca": "alpaca", "pairs": "prompt_completion", "text": "text"}
    values = {
        "{folder}": str(folder),
        "{model}": json.dumps(tiny.MODELS["llama"]),
        "{two}": json.dumps(two),
        "{pictures}": json.dumps([{"path": f"{folder}/pictures.jsonl", "format": "messages"}]),
        "{formats}": json.dumps([{"path": f"{folder}/{name}.jsonl", "format": kind} for name, kind in formats.items()]),
    }
    chosen = [f"model.name={folder / case.model}", *case.overrides, f"run.name={run_name(case)}"]
    for placeholder, value in values.items():
        chosen = [override.replace(placeholder, value) for override in chosen]
    return chosen


def run_name(case: Case) -> str:
    return case.name.replace(" ", "_")


def train(folder: Path, case: Case, log: Path) -> None:
    """Runs the command `finetune train` in this process, its output in `log`. Raises RuntimeError if it failed."""
    from finetune.desk.cli import main as command

    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["finetune", "train", str(folder / "recipe.yaml"), *overrides(folder, case)]
    try:
        command()
    except SystemExit as left:
        if left.code:
            raise RuntimeError(f"exit status {left.code}") from left


def metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl: what is not measured, floats in hexadecimal."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        {key: _exact(value) for key, value in line.items() if key in ("step", *KEYS) or key.startswith(PREFIXES)}
        for line in lines
    ]


def _exact(value: Any) -> Any:
    return value.hex() if isinstance(value, float) else value


def weights_digest(folder: Path) -> str:
    """Digest of the saved weights: names, types, shapes and bytes, in the order of their names."""
    from safetensors import deserialize

    tensors = [t for file in folder.glob("*.safetensors") for t in deserialize(file.read_bytes())]
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors):
        digest.update(f"{name} {tensor['dtype']} {tensor['shape']}".encode())
        digest.update(tensor["data"])
    return digest.hexdigest()[:16]


def inputs_digest(folder: Path) -> str:
    """Digest of models and rows: two baselines of different inputs say nothing about the code."""
    rows = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.jsonl"))]
    models = [weights_digest(model) for model in sorted(file.parent for file in folder.glob("*/config.json"))]
    return hashlib.sha256(" ".join(rows + models).encode()).hexdigest()[:16]


def record(folder: Path, cases: list[Case]) -> dict[str, Any]:
    """Trains the cases; returns what `--json` writes. A case that fails is recorded with its error."""
    import peft
    import torch

    import finetune

    killable.in_fork(prepare, folder)
    runs = {}
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case.name}", file=sys.stderr, flush=True)
        run, log = folder / "runs" / run_name(case), folder / f"{run_name(case)}.log"
        try:
            killable.in_fork(train, folder, case, log)
            runs[case.name] = {"metrics": metrics(run), "weights": weights_digest(run / "model")}
        except RuntimeError:
            said = log.read_text(encoding="utf-8", errors="replace")
            print(said[-3000:], file=sys.stderr)
            runs[case.name] = {"error": said.strip().splitlines()[-1], "metrics": [], "weights": ""}
    package = Path(str(finetune.__file__)).parent.parent
    git = subprocess.run(["git", "-C", package, "describe", "--always", "--dirty"], capture_output=True, text=True)
    versions = f"torch {torch.__version__}, peft {peft.__version__}"
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {versions}"
    return {
        "command": "python scripts/golden_losses.py",
        "commit": git.stdout.strip(),
        "machine": machine,
        "inputs": inputs_digest(folder),
        "runs": runs,
    }


def as_text(recorded: dict[str, Any]) -> str:
    """JSON with one line for each recipe."""
    runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in recorded["runs"].items())
    rest = {key: value for key, value in recorded.items() if key != "runs"}
    return f'{json.dumps(rest, indent=1)[:-2]},\n "runs": {{\n{runs}\n }}\n}}\n'


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, str]:
    """How two runs of a case differ ("" if they do not), and the largest relative difference of a loss."""
    if error := theirs.get("error") or ours.get("error"):
        return f"failed: {error}", ""
    problems = []
    if len(ours["metrics"]) != len(theirs["metrics"]):
        problems.append(f"{len(theirs['metrics'])} lines instead of {len(ours['metrics'])}")
    pairs = list(zip(ours["metrics"], theirs["metrics"], strict=False))
    moved = {key: a["step"] for a, b in reversed(pairs) for key in {**a, **b} if a.get(key) != b.get(key)}
    problems += [f"{key} from step {step} on" for key, step in sorted(moved.items())]
    if ours["weights"] != theirs["weights"]:
        problems.append("final weights")
    losses = [(float.fromhex(a["loss"]), float.fromhex(b["loss"])) for a, b in pairs if "loss" in a and "loss" in b]
    largest = max((abs(b - a) / abs(a) for a, b in losses), default=0.0)
    return ", ".join(problems), f"{largest:.1e}" if problems else "0"


def compare(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Prints a table of the cases that both have; returns whether all are the same to the last bit."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    table = Table(
        "recipe", "lines", "last loss", "loss, relative", "", title=f"{before['commit']} -> {after['commit']}"
    )
    same = True
    for name in (name for name in before["runs"] if name in after["runs"]):
        ours, theirs = before["runs"][name], after["runs"][name]
        problem, relative = difference(ours, theirs)
        same = same and not problem
        last = next((float.fromhex(line["loss"]) for line in reversed(theirs["metrics"]) if "loss" in line), None)
        mark = f"[red]{problem}[/red]" if problem else "[green]same bits[/green]"
        table.add_row(name, str(len(theirs["metrics"])), f"{last:.6f}" if last else "", relative, mark)
    console.print(table)
    for what in ("machine", "inputs"):
        if before[what] != after[what]:
            console.print(
                f"[yellow]{what}: {before[what]} before, {after[what]} after: not the same experiment[/yellow]"
            )
    return same and bool(table.row_count)


def selected(only: list[str]) -> list[Case]:
    return [case for case in CASES if not only or any(word in case.name.split() for word in only)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("after", nargs="?", type=Path, help="with --against: compare this file instead of training")
    parser.add_argument("--against", type=Path, help="a file that --json wrote, to compare with")
    parser.add_argument("--json", type=Path, help="write the losses there")
    parser.add_argument("--only", nargs="+", default=[], help="recipes with one of these words in their names")
    parser.add_argument("--folder", type=Path, help="work there and keep everything")
    arguments = parser.parse_args()
    before = json.loads(arguments.against.read_text(encoding="utf-8")) if arguments.against else None
    if arguments.after:
        after = json.loads(arguments.after.read_text(encoding="utf-8"))
    else:
        os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", WANDB_MODE="offline")
        os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a fork would lack pyarrow's thread
        with tempfile.TemporaryDirectory(prefix="finetune-golden-") as temporary:
            folder = (arguments.folder or Path(temporary)).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            os.environ["FINETUNE_CACHE"] = str(folder / "cache")
            after = record(folder, selected(arguments.only))
    if arguments.json:
        arguments.json.write_text(as_text(after), encoding="utf-8")
    if before:
        return 0 if compare(before, after) else 1
    return 0 if not any("error" in run for run in after["runs"].values()) else 1


if __name__ == "__main__":
    # The package of this checkout, unless PYTHONPATH names another.
    sys.path.append(str(ROOT))
    raise SystemExit(main())
