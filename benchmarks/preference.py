"""DPO: pairs per second and peak memory of ours with shared prompts, ours without, and TRL, in turns on the same pairs.

    python benchmarks/preference.py --rows gsm8k_train.jsonl --json benchmarks/results/preference.json

With TRL in the same environment (`pip install 'trl==1.16.*'`); without it, ours alone. Pairs are made of GSM8K's rows:
the answer, and the same with one of its numbers changed, from which on it is another text. Full training, fp32, the
log-probabilities of the reference computed before the first step (not measured); `trl_default` keeps a second model for
them and recomputes activations, as it comes. Batches of TRL have as many pairs as a step of ours has on average.

What sharing should gain is the ratio of the FLOPs that ours counts for both layouts (models/flops.py). In turns by
benchmarks/rounds.py, by processor time as well, which other work on the machine moves less. Exit status 1
where a first loss is not ln 2.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent))

import contenders
import workload
import yaml
from rounds import Cell, Rounds, ratio, spread
from workload import SHAPES, Work

LABELS = {
    "shared": "ours, prompts shared",
    "whole": "ours, prompts computed twice",
    "trl": "TRL, precomputed reference",
    "trl_default": "TRL as it comes",
}
ROUNDS = Rounds(Path(__file__).resolve(), LABELS, "pairs", over="shared", over_key="shared_over_it", digits=2)


def main() -> None:
    parser = ROUNDS.parser(__doc__, steps=6, row_tokens=4096, threads=2)
    parser.add_argument("--rows", type=Path, help="jsonl with `question` and `answer`; none: sums made here")
    parser.add_argument("--shape", choices=list(SHAPES), default="25m")
    arguments = parser.parse_args()
    fill = partial(prepare, path=arguments.rows)
    cells = ROUNDS.run(arguments, SHAPES[arguments.shape], fill, work_as, lines, sharing)
    wrong = [cell["contender"] for cell in cells if abs(cell["losses"][0] - math.log(2)) > 1e-5]
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
    from finetune.features import load_recipe
    from finetune.models.base_model import Base

    rows = pairs_of(path, work.steps * work.row_tokens // 200 + 100)
    conversations = [{"messages": [*row["prompt"], *row["chosen"]]} for row in rows]
    workload.save_tokenizer(conversations, folder / "model", work.shape["vocab_size"])
    workload.write_rows(folder / "rows.jsonl", rows)
    parameters = workload.save_weights(work.shape, folder / "model")
    recipe = workload.recipe(folder, work, "preference") | {"objective": {"name": "dpo"}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    loaded = load_recipe(folder / "recipe.yaml")
    ordered = build_dataset(loaded, loaded.data.train, Base.of(loaded).renderer(loaded.objective)).in_order(loaded)
    steps = [ordered.counts(step) for step in range(work.steps)]
    saved = sum(step["shared_tokens"] for step in steps) / sum(step["tokens"] for step in steps)
    pairs = [step["examples"] for step in steps]
    indices = [one.row - 1 for step in range(work.steps) for one in ordered.row(step)]
    workload.write_rows(folder / "in_order.jsonl", [rows[i] for i in indices])
    tokens = [step["tokens"] for step in steps]
    return {"parameters": parameters, "pairs": pairs, "tokens": tokens, "shared_token_share": saved}


# --- in a process of its own


def work_as(name: str, folder: Path, work: Work) -> Cell:
    """Trains as a contender; returns its result."""
    if name in ("shared", "whole"):
        return contenders.ours(folder, work, f"objective.share_prompts={'true' if name == 'shared' else 'false'}")
    return trl(folder, work, as_it_comes=name == "trl_default")


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


# --- the result


def sharing(result: Cell) -> Cell:
    """What sharing gains beside what it should: by FLOPs, and by tokens alone; the head computes only targets."""
    cells, saved = result["cells"], result["steps"]["shared_token_share"]
    pairs = [{c["contender"]: c for c in cells if c["round"] == number} for number in {c["round"] for c in cells}]
    both = [(one["shared"], one["whole"]) for one in pairs if {"shared", "whole"} <= one.keys()]
    if not both:
        return {"sharing": None}
    flops = [metrics["tflops_per_device"] * metrics["step_s"] for metrics in (cell["metrics"] for cell in both[0])]
    gains = {
        "gain": spread([shared["pairs_per_s"] / whole["pairs_per_s"] for shared, whole in both]),
        "gain_by_cpu_time": spread([shared["pairs_per_cpu_s"] / whole["pairs_per_cpu_s"] for shared, whole in both]),
        "predicted_by_flops": flops[1] / flops[0],  # of the last step
        "predicted_by_tokens": 1 / (1 - saved),
    }
    return {"sharing": gains}


def lines(result: Cell) -> list[str]:
    """A markdown table, and what sharing gains."""
    steps = result["steps"]
    shown = [
        f"Llama of {steps['parameters'] / 1e6:.1f} M parameters, {statistics.mean(steps['pairs']):.1f} pairs and "
        f"{statistics.mean(steps['tokens']):,.0f} tokens a step, {steps['shared_token_share']:.1%} of them shared",
        "",
        *ROUNDS.table(result),
    ]
    if (gain := result["sharing"]) is not None:
        shown += [
            "",
            f"sharing gains {ratio(gain['gain'])}, by processor time {ratio(gain['gain_by_cpu_time'])}; predicted by "
            f"FLOPs {gain['predicted_by_flops']:.2f}, by tokens {gain['predicted_by_tokens']:.2f}",
        ]
    return shown


if __name__ == "__main__":
    main()
