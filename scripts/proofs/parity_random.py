"""The promise, measured where no list looks: recipes and accelerate configs drawn at random.

    python scripts/proofs/parity_random.py --cases 100 --seed 1
    python scripts/proofs/parity_random.py --cases 10 --only ep tp      # these configs alone

A case is a config, a model and settings that no list combines. What a rule refuses is counted by its
message. The rest trains there and on one process, and every step's loss must agree as closely as in `parity.py`. Exit
status 1 if one fails or differs; the same seed draws the same cases.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import parity
from parity import ATTENTION, BALANCE, BF16_LOSS_RELATIVE, LORA, LOSS_RELATIVE, QLORA, Case, Difference

from finetune.startup import quiet_libraries

Place = tuple[str, int]
PLACES: tuple[Place, ...] = (
    *(("ddp", 2), ("fsdp2", 2), ("fsdp2_offload", 2), ("zero2", 2), ("zero3", 2), ("zero3_offload", 2), ("hsdp", 4)),
    *(("tp", 2), ("fsdp2_tp", 4), ("cp", 2), ("cp_ring", 2), ("fsdp2_cp", 4), ("zero3_cp", 2), ("ulysses", 2)),
    *(("pp", 2), ("pp_gpipe", 2), ("pp_interleaved", 2), ("pp_dp", 4), ("ep", 2), ("ep", 4)),
)
DENSE, EXPERTS = ("llama", "llama_tied", "mistral", "qwen3", "llama_deep"), ("mixtral", "qwen3_moe")
STEPS_IN_BACKWARD = ("fsdp2", "fsdp2_offload", "hsdp", "ep")
WITHOUT_DROPOUT = ("cp", "cp_ring", "fsdp2_cp", "zero3_cp", "ulysses", "pp", "pp_gpipe", "pp_interleaved", "pp_dp")
ROWS: dict[str, tuple[str, ...]] = {
    "packed": (),
    "unpacked": ("data.packing=false",),
    "budget": ("data.packing=false", "data.max_length=32", "batch.rows=9", "batch.tokens_per_device=40"),
    "stream": ("data.streaming=true", "data.window=48"),
}


def draw(random: Random, place: Place, number: int) -> Case:
    """One case. What its config refuses of everyone is drawn seldom, so that most of them run."""
    config, _ = place
    models = {"ep": EXPERTS, "pp_interleaved": ("llama_deep",), "tp": DENSE, "fsdp2_tp": DENSE}
    model = random.choice(models.get(config, (*DENSE, *EXPERTS)))
    mode, rows = random.choice(("full", "lora", "qlora")), random.choice(tuple(ROWS))
    in_backward = config in STEPS_IN_BACKWARD and rows != "budget" and random.random() < 0.3
    overrides = [*{"full": (), "lora": (*LORA, "optimizer.lr=1e-3"), "qlora": QLORA}[mode], *ROWS[rows]]

    def sometimes(share: float, *chosen: str) -> None:
        if random.random() < share:
            overrides.extend(chosen)

    if mode != "full":
        sometimes(0.2, "lora.rslora=true")
        if model in EXPERTS:
            overrides.append(ATTENTION)
        elif model != "llama_tied":  # whose head has a row of zeros, which DoRA refuses
            sometimes(0.25, "lora.targets=[lm_head, q_proj]")
        if mode == "lora" or not config.startswith("zero3"):  # no rehearsal of that
            sometimes(0.2, "lora.dora=true")
        if not in_backward and config not in WITHOUT_DROPOUT:  # drawn by forward: of another size, others
            sometimes(0.3, "lora.dropout=0.1")
    recomputed = random.choice(("false", "false", "true", "selective"))
    overrides.append(f"train.activation_checkpointing={recomputed}")
    if recomputed != "selective":
        sometimes(0.4, "train.activation_offload=true")
    if in_backward:
        overrides += ["optimizer.in_backward=true", "optimizer.max_grad_norm=null"]
    else:
        overrides += random.choice(((), ("optimizer.name=paged_adamw",), ("optimizer={name: sgd, lr: 0.1}",)))
        if rows != "budget":
            overrides.append(f"batch.rows_per_device={random.choice(('1', '1', '2', 'auto'))}")
    bf16 = model in DENSE and random.random() < 0.25
    if bf16:
        overrides.append("train.precision=bf16")
    sometimes(0.3, f"model.cross_entropy={random.choice(('plain', 'chunked'))}")
    sometimes(0.2, "objective.z_loss=1e-3")
    sometimes(0.2, "objective.label_smoothing=0.1")
    if model in EXPERTS:
        sometimes(0.3, BALANCE)
    bound = BF16_LOSS_RELATIVE if bf16 else LOSS_RELATIVE
    # No bound on weights: AdamW divides each gradient by its own size, and some of these are nothing but rounding.
    return Case(f"{number}", tuple(overrides), model, loss=bound, parameter=float("inf"), one_forward=in_backward)


def refusal(folder: Path, place: Place, case: Case) -> str | None:
    """Why a rule forbids it, there or anywhere."""
    from finetune.desk.setup.check import check_recipe

    for config, processes in (("single", 1), place):
        overrides = parity.job(folder, config, processes, case)
        report = check_recipe(folder / "recipe.yaml", overrides, parity.config_file(folder, config), processes)
        if report.error:
            return re.sub(r".*?(recipe\.yaml:|the maths:)\s+", "", " ".join(report.error.split()), count=1)
    return None


def train(folder: Path, place: Place, cases: list[Case]) -> dict[str, str]:
    """All of them in one launch, and in another one what is left if one fails. Returns the failures."""
    config, processes = place
    failed: dict[str, str] = {}
    while cases:
        try:
            parity.launch_jobs(folder, config, processes, [parity.job(folder, config, processes, c) for c in cases])
            return failed
        except subprocess.CalledProcessError:
            said = (folder / f"{config}-{processes}.log").read_text(encoding="utf-8")
            done = said.count("done [") // processes
            errors = [line for line in said.splitlines() if re.search(r"Error\b|Failure\b", line)]
            failed[cases[done].name] = errors[0] if errors else said[-200:]
            cases = cases[done + 1 :]
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="names of configs")
    parser.add_argument("--json", type=Path, help="write what ran there")
    arguments = parser.parse_args()
    places = [place for place in PLACES if not arguments.only or place[0] in arguments.only]
    if not places:
        parser.error(f"--only: configs are {', '.join(sorted({config for config, _ in PLACES}))}")
    quiet_libraries()
    folder = Path(tempfile.mkdtemp(prefix="finetune-parity-"))
    os.environ["FINETUNE_CACHE"] = str(folder / "cache")
    os.environ["HF_HUB_OFFLINE"] = "1"
    parity.prepare(folder)
    random, refused = Random(arguments.seed), Counter[str]()
    chosen: dict[Place, list[Case]] = {}
    for number in range(arguments.cases):
        place = random.choice(places)
        case = draw(random, place, number)
        if reason := refusal(folder, place, case):
            refused[reason] += 1
        else:
            chosen.setdefault(place, []).append(case)
    for reason, times in refused.most_common():
        print(f"refused {times}: {reason}")
    drawn = {case.name: case for cases in chosen.values() for case in cases}
    problems = {f"single x1 {name}": why for name, why in train(folder, ("single", 1), list(drawn.values())).items()}
    without = {problem.split()[-1] for problem in problems}
    differences: list[Difference] = []
    for place, cases in chosen.items():
        config, processes = place
        print(f"{config} x{processes}: {len(cases)} cases", file=sys.stderr, flush=True)
        cases = [case for case in cases if case.name not in without]
        failed = train(folder, place, cases)
        problems |= {f"{config} x{processes} {name}": why for name, why in failed.items()}
        differences += [parity.compare(folder, *place, case) for case in cases if case.name not in failed]
    parity.show(differences)
    for difference in differences:
        if not difference.passed:
            problems[f"{difference.config} x{difference.processes} {difference.case}"] = "; ".join(difference.problems)
    for where, why in problems.items():
        case = drawn[where.split()[-1]]
        print(f"{where}: {why}\n    {case.model} {' '.join(case.overrides)}")
    if arguments.json:
        command = f"scripts/proofs/parity_random.py --cases {arguments.cases} --seed {arguments.seed}"
        cells = [{**vars(d), "model": drawn[d.case].model, "overrides": drawn[d.case].overrides} for d in differences]
        parity.write_json(arguments.json, command, cells)
    shutil.rmtree(folder)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
