"""DPO: pairs per second and peak memory of ours with shared prompts, ours without, and TRL, in turns on the same pairs.

    python benchmarks/preference.py --rows gsm8k_train.jsonl --json benchmarks/results/preference.json

With TRL in the same environment (`pip install 'trl==1.16.*'`); without it, ours alone. Pairs are made of GSM8K's rows:
the answer, and the same with one of its numbers changed, from which on it is another text. Full training, fp32, the
log-probabilities of the reference computed before the first step (not measured); `trl_default` keeps a second model for
them and recomputes activations, as it comes. Batches of TRL have as many pairs as a step of ours has on average.

What sharing should gain is the ratio of the FLOPs that ours counts for both layouts (planning/flops.py). Each
measurement is a process of its own; ratios are taken within a round, median over rounds, with the lowest and highest.
By processor time as well, which other work on the machine moves less. Exit status 1 where a first loss is not ln 2.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import re
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent))

import contenders
import workload
import yaml
from workload import SHAPES, Work

Cell = dict[str, Any]
WARM_UP = 2  # steps that are not measured
GB = 1e9
LABELS = {
    "shared": "ours, prompts shared",
    "whole": "ours, prompts computed twice",
    "trl": "TRL, precomputed reference",
    "trl_default": "TRL as it comes",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="jsonl with `question` and `answer`; none: sums made here")
    parser.add_argument("--shape", choices=list(SHAPES), default="25m")
    parser.add_argument("--only", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="that are measured")
    parser.add_argument("--row-tokens", type=int, default=4096, help="of a packed row; a step is one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)  # contender, folder
    arguments = parser.parse_args()
    if arguments.work:
        work_as(arguments.work[0], Path(arguments.work[1]))
        return
    with tempfile.TemporaryDirectory(prefix="finetune-bench-") as name:
        result = measure(arguments, Path(name))
    for line in lines(result):
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    wrong = [cell["contender"] for cell in result["cells"] if abs(cell["losses"][0] - math.log(2)) > 1e-5]
    raise SystemExit(f"the first loss of {wrong} is not ln 2" if wrong else 0)


# --- the pairs


def pairs_of(path: Path | None, count: int) -> list[dict[str, Any]]:
    """Rows of format `preference`."""
    conversations = workload.conversations_of(path)[:count] if path else workload.synthetic_conversations(count)
    rng, rows = random.Random(workload.SEED), []
    for question, answer in (row["messages"] for row in conversations):
        rejected = {**answer, "content": with_a_wrong_number(answer["content"], rng)}
        rows.append({"prompt": [question], "chosen": [answer], "rejected": [rejected]})
    return rows


def with_a_wrong_number(text: str, rng: random.Random) -> str:
    """
    >>> with_a_wrong_number("2 + 2 = 4", random.Random(1))
    '5 + 2 = 4'
    """
    number = rng.choice(list(re.finditer(r"\d+", text)))
    return f"{text[: number.start()]}{int(number[0]) + rng.randint(1, 9)}{text[number.end() :]}"


def prepare(folder: Path, work: Work, path: Path | None) -> Cell:
    """Model, tokenizer, rows, recipe; returns what the steps of ours hold."""
    from finetune.data.dataset import build_dataset
    from finetune.models.config import load_tokenizer
    from finetune.recipe import load_recipe

    os.environ["FINETUNE_CACHE"] = str(folder / "cache")  # as in the contenders' processes
    rows = pairs_of(path, work.steps * work.row_tokens // 200 + 100)
    conversations = [{"messages": [*row["prompt"], *row["chosen"]]} for row in rows]
    workload.save_tokenizer(conversations, folder / "model", work.shape["vocab_size"])
    workload.write_rows(folder / "rows.jsonl", rows)
    parameters = workload.save_weights(work.shape, folder / "model")
    recipe = workload.recipe(folder, work, "preference") | {"objective": {"name": "dpo"}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    loaded = load_recipe(folder / "recipe.yaml")
    ordered = build_dataset(loaded, loaded.data.train, load_tokenizer(loaded.model)).in_order(loaded)
    steps = [ordered.counts(step) for step in range(work.steps)]
    saved = sum(step["shared_tokens"] for step in steps) / sum(step["tokens"] for step in steps)
    pairs = [step["examples"] for step in steps]
    indices = [one.row - 1 for step in range(work.steps) for one in ordered.examples(step)]
    workload.write_rows(folder / "in_order.jsonl", [rows[i] for i in indices])
    tokens = [step["tokens"] for step in steps]
    return {"parameters": parameters, "pairs": pairs, "tokens": tokens, "shared_token_share": saved}


# --- in a process of its own


def work_as(name: str, folder: Path) -> None:
    """Trains as a contender and writes its result."""
    work = Work.read(folder)
    if name in ("shared", "whole"):
        result = contenders.ours(folder, work, f"objective.share_prompts={'true' if name == 'shared' else 'false'}")
    else:
        result = trl(folder, work, as_it_comes=name == "trl_default")
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def trl(folder: Path, work: Work, as_it_comes: bool) -> Cell:
    from datasets import Dataset
    from stopwatch import Stopwatch
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    watch = Stopwatch(work.steps)
    own = {} if as_it_comes else {"precompute_ref_log_probs": True, "gradient_checkpointing": False}
    pairs = json.loads((folder / "steps.json").read_text(encoding="utf-8"))["pairs"]
    batch = {"per_device_train_batch_size": round(statistics.mean(pairs))}
    trainer = DPOTrainer(
        model=str(folder / "model"),
        args=DPOConfig(
            **contenders.common_arguments(folder, work) | batch,
            max_length=None,
            logging_steps=work.steps,
            disable_dropout=True,
            model_init_kwargs={"dtype": "float32"},
            **own,
        ),
        train_dataset=Dataset.from_json(str(folder / "in_order.jsonl")),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {**watch.result(), "losses": losses, "pairs": [trainer.args.per_device_train_batch_size] * work.steps}


# --- measuring


def measure(arguments: argparse.Namespace, folder: Path) -> Cell:
    work = Work(
        SHAPES[arguments.shape],
        row_tokens=arguments.row_tokens,
        steps=WARM_UP + arguments.steps,
        threads=arguments.threads,
    )
    os.environ["HF_HUB_OFFLINE"] = "1"
    steps = prepare(folder, work, arguments.rows)
    (folder / "steps.json").write_text(json.dumps(steps), encoding="utf-8")
    names = [name for name in arguments.only if "trl" not in name or contenders.missing("trl", "cpu") is None]
    cells: list[Cell] = []
    for number in range(arguments.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            work.write(folder)
            script = [str(Path(__file__).resolve()), "--work", name, str(folder)]
            contenders.python(script, folder, work, name)
            cell = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            cells.append({"pairs": steps["pairs"], **cell, "round": number, "contender": name})
            cells[-1] |= figures(cells[-1])
            print(f"round {number + 1}, {LABELS[name]}: {cells[-1]['pairs_per_s']:.2f} pairs/s", file=sys.stderr)
    return {
        "command": "python benchmarks/preference.py " + " ".join(sys.argv[1:]),
        "device": f"CPU, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": contenders.versions(),
        "work": asdict(replace(work, overrides=())),
        "steps": steps,
        "contenders": {name: summary(name, cells) for name in names},
        "sharing": sharing(cells, steps["shared_token_share"]),
        "cells": cells,
    }


def figures(cell: Cell) -> Cell:
    """Over the measured steps; `step_s[i]` is the period of step i + 2, counted from 1."""
    measured = range(WARM_UP - 1, len(cell["step_s"]))
    pairs = sum(cell["pairs"][i + 1] for i in measured)
    return {
        "pairs_per_s": pairs / sum(cell["step_s"][i] for i in measured),
        "pairs_per_cpu_s": pairs / sum(cell["step_cpu_s"][i] for i in measured),
        "peak_gb": cell["peak_rss"] / GB,
        "above_loaded_gb": (cell["peak_rss"] - cell["loaded_rss"]) / GB,
    }


FIGURES = ("pairs_per_s", "pairs_per_cpu_s", "peak_gb", "above_loaded_gb")


def summary(name: str, cells: list[Cell]) -> Cell:
    mine, ours = ({c["round"]: c for c in cells if c["contender"] == who} for who in (name, "shared"))
    rounds = sorted(mine.keys() & ours.keys())
    return {
        **{key: statistics.median(cell[key] for cell in mine.values()) for key in FIGURES},
        "shared_over_it": {key: spread([ours[i][key] / mine[i][key] for i in rounds]) for key in FIGURES if rounds},
    }


def sharing(cells: list[Cell], saved: float) -> Cell | None:
    """What sharing gains beside what it should: by FLOPs, and by tokens alone; the head computes only targets."""
    pairs = [{c["contender"]: c for c in cells if c["round"] == number} for number in {c["round"] for c in cells}]
    both = [(one["shared"], one["whole"]) for one in pairs if {"shared", "whole"} <= one.keys()]
    if not both:
        return None
    flops = [metrics["tflops_per_device"] * metrics["step_s"] for metrics in (cell["metrics"] for cell in both[0])]
    return {
        "gain": spread([shared["pairs_per_s"] / whole["pairs_per_s"] for shared, whole in both]),
        "gain_by_cpu_time": spread([shared["pairs_per_cpu_s"] / whole["pairs_per_cpu_s"] for shared, whole in both]),
        "predicted_by_flops": flops[1] / flops[0],  # of the last step
        "predicted_by_tokens": 1 / (1 - saved),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def lines(result: Cell) -> list[str]:
    """A markdown table, and what sharing gains."""
    steps = result["steps"]
    shown = [
        f"Llama of {steps['parameters'] / 1e6:.1f} M parameters, {statistics.mean(steps['pairs']):.1f} pairs and "
        f"{statistics.mean(steps['tokens']):,.0f} tokens a step, {steps['shared_token_share']:.1%} of them shared",
        "",
        "| | pairs/s | by processor time | peak GB | above loaded | shared/it: speed | processor time | peak | above |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in result["contenders"].items():
        numbers = [f"{one[key]:.2f}" for key in FIGURES]
        ratios = [ratio(one["shared_over_it"].get(key)) for key in FIGURES]
        shown.append(f"| {' | '.join([LABELS[name], *numbers, *ratios])} |")
    if (gain := result["sharing"]) is not None:
        shown += [
            "",
            f"sharing gains {ratio(gain['gain'])}, by processor time {ratio(gain['gain_by_cpu_time'])}; predicted by "
            f"FLOPs {gain['predicted_by_flops']:.2f}, by tokens {gain['predicted_by_tokens']:.2f}",
        ]
    return shown


def ratio(one: dict[str, float] | None) -> str:
    return "-" if one is None else f"{one['median']:.2f} ({one['lowest']:.2f} to {one['highest']:.2f})"


if __name__ == "__main__":
    main()
