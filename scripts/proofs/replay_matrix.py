"""Recorded rollouts train to the same losses, whatever runs them: every policy loss on every kind of config.

    python scripts/proofs/replay_matrix.py                       # all of it; minutes
    python scripts/proofs/replay_matrix.py --only zero3 x2 --json benchmarks/results/replay_matrix.json

Two runs on one process record: one trains on each sample once, one on older samples (`reuse` 2, `staleness` 1), of
which a copy has log-probabilities as another sampler would have rounded them. Then every loss replays them: on-policy,
with ratios, a clip and the divergence from the initial weights, and with each correction; on 1, 2 and 4 processes, in
one micro-batch of a step on each and in many (on four processes in many alone). Losses of all steps are compared with
those of one process and one micro-batch. Exit status 1 if one differs by more than 5e-6 of the largest loss of its run:
weights of samples add up to nothing, so a single step's may cancel to its rounding.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import parity

STEPS, PROMPTS, SAMPLES, NEW = 4, 4, 4, 6
RELATIVE = 5e-6
BUDGETS = {"one": 2048, "many": 64}  # tokens of a micro-batch
ONCE, OLDER, ROUNDED = "once", "older", "rounded"  # folders of records
ON_POLICY = ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp")
LOSSES = (*ON_POLICY, "cispo", "gspo")
CORRECTIONS = {"tis": "dapo", "icepop": "cispo", "sequence_mask": "grpo"}
PLACES = (
    *((config, n) for config in ("ddp", "fsdp2", "zero2", "zero3", "tp", "cp", "ulysses") for n in (2, 4)),
    *((config, 1) for config in ("single", "ddp", "fsdp2", "zero3")),
    ("hsdp", 4),
)


class Cell(NamedTuple):
    config: str
    processes: int
    case: str
    micro_batches: str  # see `BUDGETS`
    loss: float  # largest difference of a step's loss, over the largest loss of the run
    grad_norm: float  # largest relative difference

    @property
    def passed(self) -> bool:
        return self.loss <= RELATIVE


def cases() -> dict[str, list[str]]:
    """Returns the overrides of each case by its name."""
    older = ["rollouts.reuse=2", "rollouts.staleness=1"]
    made = {
        **{loss: [f"objective.loss={loss}", f"rollouts.replay={{folder}}/{ONCE}"] for loss in ON_POLICY},
        **{
            f"{loss} older kl": [f"objective.loss={loss}", "objective.kl=0.2", f"rollouts.replay={{folder}}/{OLDER}"]
            for loss in LOSSES
        },
        **{
            f"{loss} older {name}": [
                f"objective.loss={loss}",
                f"objective.correction={name}",
                f"rollouts.replay={{folder}}/{ROUNDED}",
            ]
            for name, loss in CORRECTIONS.items()
        },
    }
    # Its usual bounds are so near to 1 that the second step on the same samples would change next to nothing.
    made["gspo older kl"].append("objective.clip=[0.2, 0.3]")
    return {name: [*values, *(older if "older" in name else [])] for name, values in made.items()}


def prepare(folder: Path) -> None:
    """Writes a model, rows and the recipe, and records samples of two runs in this process."""
    import tiny
    import yaml
    from rich.console import Console

    from finetune.features import all_features, load_recipe
    from finetune.training.run import train
    from finetune.training.signals import StopRequest

    tiny.save_model(folder, "llama")
    tiny.write_rows(folder / "rows.jsonl", tiny.conversations(60))
    values = parity.base_recipe(folder)
    del values["data"]["eval"], values["evaluate"]
    values["data"]["packing"] = False
    values |= {
        "objective": {"name": "grpo"},
        "rollouts": {"prompts": PROMPTS, "samples": SAMPLES, "max_new_tokens": NEW, "temperature": 0.8},
        "batch": {"rows": PROMPTS * SAMPLES, "tokens_per_device": BUDGETS["one"]},
        "train": {"max_steps": STEPS, "precision": "fp32"},
        "schedule": {"name": "constant"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    reward = ["rewards=[{name: regex, pattern: '[aeiou]'}]"]  # of the recording alone
    older = ["rollouts.reuse=2", "rollouts.staleness=1", "objective.kl=0.2", "objective.loss=grpo"]
    for name, overrides in ((ONCE, reward), (OLDER, [*reward, *older])):
        recipe = load_recipe(folder / "recipe.yaml", [*overrides, f"run.name={name}"])
        with open(os.devnull, "w") as nowhere:
            train(recipe, "recipe.yaml", StopRequest(), Console(file=nowhere), features=all_features())
        (folder / "runs" / name / "rollouts").rename(folder / name)
    for name, copy, rounds in ((ONCE, ONCE, False), (OLDER, ROUNDED, True), (OLDER, OLDER, False)):
        rewrite(folder / name, folder / copy, rounds)


def rewrite(folder: Path, copy: Path, rounds: bool) -> None:
    """Rewards the less likely samples: differently in each group, or AdamW would make steps of the rounding of weights
    that have no gradient. rounds: log-probabilities are of a sampler in 16 bit, some of them far off."""
    import numpy as np
    import torch

    from finetune.checkpoints.folder import step_of
    from finetune.rl.rollouts.records import read_record, write_record

    random = np.random.Generator(np.random.PCG64(2))
    for file in sorted(folder.glob("step-*.jsonl")):
        step = step_of(file)
        found = read_record(folder, step)
        assert found is not None
        samples = [one.rewarded(replace(one.reward, total=-float(one.log_probs.sum()))) for one in found[0]]
        for i, one in enumerate(samples if rounds else []):
            rounded = torch.from_numpy(one.log_probs).bfloat16().double().numpy()
            apart = rounded + random.choice([0.0, 0.0, 1.0], len(one.ids))
            samples[i] = replace(one, log_probs=np.minimum(apart, 0.0))
        write_record(copy, step, samples, "made up")


def replays(processes: int) -> list[tuple[str, str]]:
    """Returns the cases of a launch, each with its micro-batches: one and many; many alone on four processes, where
    each has few samples anyway."""
    return [(case, size) for case in cases() for size in (["many"] if processes == 4 else BUDGETS)]


def replay(folder: Path, config: str, processes: int, chosen: Sequence[tuple[str, str]]) -> list[Cell]:
    """Runs `replays` in one launch, and compares them with those of one process; all of `single` have to be first."""
    jobs = []
    for case, size in chosen:
        overrides = [value.format(folder=folder) for value in cases()[case]]
        overrides.append(f"batch.tokens_per_device={BUDGETS[size]}")
        jobs.append([*overrides, f"run.name={run_name(config, processes, case, size)}"])
    parity.launch_jobs(folder, config, processes, jobs, (__file__, RANK))
    return [compared(folder, config, processes, case, size) for case, size in chosen]


def run_name(config: str, processes: int, case: str, size: str) -> str:
    return parity.run_name(config, processes, f"{case} {size}")


def compared(folder: Path, config: str, processes: int, case: str, size: str) -> Cell:
    names = run_name("single", 1, case, "one"), run_name(config, processes, case, size)
    ours, theirs = (parity.train_lines(folder / "runs" / name) for name in names)
    pairs = list(zip(ours, theirs, strict=True))
    assert len(pairs) == STEPS
    assert all(line["grad_norm"] > 0 for line in ours), case  # or nothing would be compared
    loss = max(abs(b["loss"] - a["loss"]) for a, b in pairs) / max(abs(line["loss"]) for line in ours)
    norm = max(abs(b["grad_norm"] / a["grad_norm"] - 1) for a, b in pairs)
    return Cell(config, processes, case, size, loss, norm)


def matrix(folder: Path, only: Sequence[str]) -> Iterator[list[Cell]]:
    """Yields the cells of each launch. only: names of configs, sizes such as x2."""
    sizes = [int(word[1:]) for word in only if word[1:].isdigit()]
    configs = [word for word in only if not word[1:].isdigit()]
    yield replay(folder, "single", 1, replays(1))
    for config, processes in PLACES:
        chosen = (not configs or config in configs) and (not sizes or processes in sizes)
        if chosen and config != "single":
            yield replay(folder, config, processes, replays(processes))


RANK = "--rank"  # this script as a rank of a launch: then FOLDER and JOBS of `parity.work`


def main() -> int:
    if sys.argv[1:2] == [RANK]:
        from finetune.features import all_features, load_recipe

        parity.work(*map(Path, sys.argv[2:]), load_recipe, features=all_features())
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of configs, or sizes such as x4")
    parser.add_argument("--json", type=Path, help="write the matrix there")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="finetune-replay-") as folder:
        os.environ["FINETUNE_CACHE"] = f"{folder}/cache"
        prepare(Path(folder))
        for of_launch in matrix(Path(folder), arguments.only):
            one = of_launch[0]
            worst = max(of_launch, key=lambda cell: cell.loss)
            norm = max(cell.grad_norm for cell in of_launch)
            text = f"{one.config} x{one.processes}: {len(of_launch)} replays, losses within {worst.loss:.1e}"
            failed = [f"{cell.case} ({cell.micro_batches}) {cell.loss:.1e}" for cell in of_launch if not cell.passed]
            differs = f"; DIFFERS: {', '.join(failed)}" if failed else ""
            print(f"{text} ({worst.case}), gradient norms within {norm:.1e}{differs}", flush=True)
            cells += [{**cell._asdict(), "passed": cell.passed} for cell in of_launch]
    if arguments.json:
        parity.write_json(arguments.json, "scripts/proofs/replay_matrix.py", cells)
    return 0 if all(cell["passed"] for cell in cells) else 1


if __name__ == "__main__":
    raise SystemExit(main())
