"""What training on samples costs: an on-policy step beside a weighted SFT step on the same rows, and sampling beside
transformers' `generate` on the same prompts.

    python benchmarks/rollouts.py --json benchmarks/results/rollouts.json

In one process, in turns, by processor time; median over rounds of the ratio within a round. The weighted step has the
negative log-likelihood as its token loss and the same token weights; the on-policy one also reads its recorded samples
and makes examples of them. Both samplers write `--new-tokens` tokens for each prompt, without an end, at temperature 1:
`generate` by its own multinomial draws, ours by keyed noise, with log-probabilities and margins. Every side runs once
before it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import numpy as np
import torch
import workload
import yaml
from rounds import ratio, spread
from workload import SHAPES

PROMPTS, SAMPLES = 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="25m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="finetune-bench-") as name:
        os.environ.update(HF_HUB_OFFLINE="1", FINETUNE_CACHE=str(Path(name) / "cache"))
        trainer = trainer_of(Path(name), arguments)
        seconds = {
            "step": in_turns(steps_of(trainer), arguments.rounds),
            "sampling": in_turns(samplers_of(trainer, arguments), arguments.rounds),
        }
    result = {
        "command": f"python benchmarks/{Path(__file__).name} {shlex.join(sys.argv[1:])}".strip(),
        "device": f"CPU, one thread of {os.cpu_count()} cores",
        "shape": arguments.shape,
        "samples": PROMPTS * SAMPLES,
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "cpu_s": seconds,
        "step_over_weighted_sft": ratios(seconds["step"], "on_policy", "weighted_sft"),
        "speed_of_generate": ratios(seconds["sampling"], "generate", "ours"),
    }
    print(f"on-policy step: {ratio(result['step_over_weighted_sft'])} times a weighted SFT step")
    print(f"sampling: {ratio(result['speed_of_generate'])} times the speed of generate")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def in_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns the processor seconds of each round, the first of which warms up and is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in contenders if number % 2 else reversed(contenders):
            began = time.process_time()
            contenders[name]()
            if number:
                seconds[name].append(time.process_time() - began)
    return seconds


def ratios(seconds: dict[str, list[float]], over: str, under: str) -> dict[str, float]:
    return spread([a / b for a, b in zip(seconds[over], seconds[under], strict=True)])


def trainer_of(folder: Path, arguments: argparse.Namespace) -> Any:
    """Returns a trainer that replays a step of made-up samples."""
    from trainers import prepared_run, ready_trainer, started_engine

    from finetune.features import all_features

    conversations, shape = workload.synthetic_conversations(200), SHAPES[arguments.shape]
    workload.save_tokenizer(conversations, folder / "model", shape["vocab_size"])
    workload.write_rows(folder / "rows.jsonl", conversations)
    workload.save_weights(shape, folder / "model")
    write_samples(folder / "recorded", shape["vocab_size"], arguments)
    sizes = {"prompts": PROMPTS, "samples": SAMPLES, "max_new_tokens": arguments.new_tokens}
    recipe = {
        "run": {"name": "rollouts", "dir": str(folder / "runs")},
        "model": {"name": str(folder / "model"), "dtype": "float32"},
        "mode": "full",
        "objective": {"name": "grpo", "loss": "grpo"},
        "rollouts": {**sizes, "cohort": PROMPTS * SAMPLES, "replay": str(folder / "recorded")},
        "data": {
            "train": [{"path": str(folder / "rows.jsonl"), "format": "messages"}],
            "max_length": 1024,
            "packing": False,
        },
        "batch": {"rows": PROMPTS * SAMPLES, "tokens_per_device": 4096},
        "optimizer": {"lr": 1e-5},
        "schedule": {"name": "constant"},
        "train": {"max_steps": 1, "precision": "fp32", "activation_checkpointing": False},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    prepared = prepared_run(str(folder / "recipe.yaml"), (), features=all_features())
    return ready_trainer(prepared, started_engine(prepared))


def write_samples(folder: Path, vocabulary: int, arguments: argparse.Namespace) -> None:
    from finetune.rl.rewards.completion import Reward
    from finetune.rl.rollouts.records import Sample, write_record

    random, samples = np.random.Generator(np.random.PCG64(1)), []
    for prompt in range(PROMPTS):
        prompt_ids = random.integers(3, vocabulary, arguments.prompt_tokens).tolist()
        for number in range(SAMPLES):
            ids = random.integers(3, vocabulary, arguments.new_tokens).tolist()
            values = (np.full(len(ids), -10.0), np.ones(len(ids)), Reward(float(random.normal()), {}, ()))
            samples.append(Sample("rows.jsonl", prompt + 1, 0, number, prompt_ids, ids, "", True, *values))
    folder.mkdir()
    write_record(folder, 1, samples, "made up")


def steps_of(trainer: Any) -> dict[str, Callable[[], object]]:
    """Returns the two steps; neither is the first of its trainer, whose weights both change."""
    from finetune.objectives.objective import Objective, Term

    rows, on_policy = trainer.loader.rows, trainer.forward
    weights = on_policy.objective.token_weights
    sft = Objective(lambda outputs, batch: {"nll": Term(outputs.total, "sequences", 1.0)}, token_weights=weights)
    weighted = replace(on_policy, objective=sft)

    def step(forward: Any) -> None:
        trainer.forward, trainer.state.step = forward, 0
        trainer.train_step(trainer.loader.step(0))

    def from_a_record() -> None:
        rows.__dict__.update(_batch=-1, _samples={})  # as in the first step on it
        rows.prepare(0)
        step(on_policy)

    rows.prepare(0)
    return {"on_policy": from_a_record, "weighted_sft": lambda: step(weighted)}


def samplers_of(trainer: Any, arguments: argparse.Namespace) -> dict[str, Callable[[], object]]:
    from finetune.rl.rollouts.drawing import Drawer
    from finetune.training.decoding import left_padded

    random, settings, model = np.random.Generator(np.random.PCG64(2)), trainer.recipe.rollouts, trainer.engine.unwrapped
    lengths = random.integers(arguments.prompt_tokens // 2, arguments.prompt_tokens + 1, PROMPTS)
    prompts = [random.integers(3, model.config.vocab_size, int(length)).tolist() for length in lengths]
    drawer = Drawer(trainer.engine, settings, 1, set(), 0)  # no token ends a sample
    repeated = [prompt for prompt in prompts for _ in range(SAMPLES)]
    ids, mask = left_padded(repeated, 0, trainer.engine.device)
    sampling = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": settings.max_new_tokens,
    }

    def generate() -> None:
        with trainer.engine.evaluating():
            model.generate(input_ids=ids, attention_mask=mask, eos_token_id=None, pad_token_id=0, **sampling)

    return {"ours": lambda: drawer.draw(0, prompts, SAMPLES), "generate": generate}


if __name__ == "__main__":
    main()
