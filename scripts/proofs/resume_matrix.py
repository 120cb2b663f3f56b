"""Stop on one backend, go on on any other: every pair (saved under, resumed under), against the run never stopped.

    python scripts/proofs/resume_matrix.py                           # every config with 1, 2 and 4 processes: hours
    python scripts/proofs/resume_matrix.py --covering 7              # one of thirty pairs, drawn to cover the others
    python scripts/proofs/resume_matrix.py --only ddp:2 zero3:2 tp   # each of these with each; tp at every size it has
    python scripts/proofs/resume_matrix.py --cases "full images tower" "lora images"   # these, if a config runs them

Each config is launched twice: once to run through 30 steps with a checkpoint at step 10, once to go on from
everybody's checkpoint. The 20 losses after the stop and the final weights must be those of one process that ran
through, the row ids of each step the very same, and if both of a pair are the same, all of it bit by bit. Exit
status 1 if it is not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import parity

from finetune.tracking.metrics import read_steps

Place = tuple[str, int]  # accelerate config, processes

SHARDED = ("ddp", "fsdp2", "fsdp2_offload", "zero2", "zero3", "zero3_offload")
DIVIDED: tuple[Place, ...] = (("ep", 2), ("ep", 4))  # only for models with experts
FOUR_STAGES: tuple[Place, ...] = (("pp_interleaved", 2), ("pp_4", 4))  # only for models with as many layers
SINGLE: Place = ("single", 1)
PLACES: tuple[Place, ...] = (
    SINGLE,
    *((config, size) for size in (1, 2, 4) for config in SHARDED),
    *(("hsdp", 4), ("tp", 2), ("fsdp2_tp", 4)),
    *(("cp", 2), ("ulysses", 2), ("fsdp2_cp", 4)),
    *(("pp", 2), ("pp_dp", 4), ("pp_fsdp2", 4), ("pp_zero", 4), ("pp_tp", 4), ("pp_fsdp2_tp", 8), ("pp_hsdp", 8)),
    ("pp_fsdp2_cp", 8),
    *FOUR_STAGES,
    *DIVIDED,
)
STOP, STEPS = 10, 30  # the default suite sets fewer
EVERYWHERE = tuple(case for case in parity.CASES if case.name in ("full", "full dpo", "lora", "lora dropout rslora"))
# Where ranks share rows, a rule refuses it.
NO_DROPOUT = ("cp", "ulysses", "fsdp2_cp", "pp", "pp_dp", "pp_fsdp2", "pp_zero", "pp_tp", "pp_fsdp2_tp", "pp_hsdp")
NO_DROPOUT += ("pp_fsdp2_cp",)
# State that is not fp32, on a place of each kind.
FEW: tuple[Place, ...] = (("single", 1), ("fsdp2", 2), ("zero3", 2), ("tp", 2))
ON_FEW: tuple[parity.Case, ...] = (
    next(case for case in parity.CASES if case.name == "full bf16"),
    next(case for case in parity.CASES if case.name == "lora dpo adapters off"),
    next(case for case in parity.CASES if case.name == "full qwen3_5"),
    *(case for case in parity.CASES if case.name in ("full text part", "lora text part")),
    # Its blocks are others under other shards (measured: 2.2e-5); on the same place it is bitwise all the same.
    parity.Case("full adamw_8bit", ("optimizer.name=adamw_8bit",), loss=1e-4, parameter=float("inf")),
)
# Statistics of a step, heads of scores and predictions of a teacher, on three kinds of place.
WITH_OBJECTIVES: tuple[Place, ...] = (("single", 1), ("fsdp2", 2), ("zero3", 2))
OF_OBJECTIVES = tuple(
    case for case in parity.CASES if case.name in ("full orpo", "full kto", "full reward", "full distill")
)
# Towers: ranks with images or clips in some micro-batches only, on every kind of place that takes them.
WITH_IMAGES: tuple[Place, ...] = (*WITH_OBJECTIVES, ("ddp", 2), ("zero2", 2), ("hsdp", 4), ("tp", 2))
OF_IMAGES = tuple(case for case in parity.CASES if case.name in (*parity.OF_IMAGES, "full audio gemma4"))
# Experts that are divided, in two ways, and the same ones if each rank has them all.
WITH_EXPERTS: tuple[Place, ...] = (("single", 1), ("ddp", 2), ("fsdp2", 4), ("zero3", 4), ("tp", 2), *DIVIDED)
OF_EXPERTS = tuple(case for case in parity.CASES if case.name in ("full mixtral balance", "lora mixtral experts"))
# Rows of tokens that the recipe adds, with moments of their own; tied to the head and not.
WITH_TOKENS: tuple[Place, ...] = (("single", 1), ("ddp", 2), ("fsdp2", 2), ("zero3", 2))
OF_TOKENS = tuple(case for case in parity.CASES if case.name in ("full tokens", "lora tokens", "lora tied tokens"))
# Four layers, as two stages, as four, and unsplit.
WITH_STAGES: tuple[Place, ...] = (("single", 1), ("fsdp2", 2), ("pp", 2), *FOUR_STAGES)
OF_STAGES = tuple(case for case in parity.CASES if case.name in ("full deep", "lora deep"))
# Momentum of matrices that are stepped whole, in every kind of range.
WITH_MUON: tuple[Place, ...] = (("single", 1), ("fsdp2", 2), ("zero2", 2), ("zero3", 2), ("tp", 2), ("hsdp", 4))
OF_MUON = tuple(case for case in parity.CASES if case.name == "full muon")

# The loss scale and the good steps since it fell, of which a run reads the next skipped step.
WITH_FP16: tuple[Place, ...] = (
    *(("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("fsdp2", 4), ("zero2", 2), ("zero3", 2), ("zero3", 4)),
    *(("pp", 2), ("pp_fsdp2", 4)),
)
OF_FP16 = tuple(case for case in parity.CASES if case.name in ("full fp16", "lora fp16"))


@dataclass(frozen=True)
class Pair:
    """One cell of the matrix."""

    saved: Place
    resumed: Place
    case: parity.Case

    @property
    def name(self) -> str:
        return f"{run_name(self.saved, self.case)}-on-{self.resumed[0]}-{self.resumed[1]}"


def cases(*places: Place) -> tuple[parity.Case, ...]:
    """Of a pair; of one place, all that it is saved under."""
    plain = () if any(place in (*DIVIDED, *FOUR_STAGES) for place in places) else EVERYWHERE
    if any(config in NO_DROPOUT for config, _ in places):
        plain = tuple(case for case in plain if "dropout" not in case.name)
    elif len(places) > 1:  # the harder one says it all
        plain = tuple(case for case in plain if case.name != "lora")
    few = ON_FEW if all(place in FEW for place in places) else ()
    experts = OF_EXPERTS if all(place in WITH_EXPERTS for place in places) else ()
    stages = OF_STAGES if all(place in WITH_STAGES for place in places) else ()
    objectives = OF_OBJECTIVES if all(place in WITH_OBJECTIVES for place in places) else ()
    images = OF_IMAGES if all(place in WITH_IMAGES for place in places) else ()
    tokens = OF_TOKENS if all(place in WITH_TOKENS for place in places) else ()
    muon = OF_MUON if all(place in WITH_MUON for place in places) else ()
    fp16 = OF_FP16 if all(place in WITH_FP16 for place in places) else ()
    fp16 = fp16 or (OF_FP16[:1] if all(place in (*WITH_FP16, *FEW) for place in places) else ())  # tp: no adapters
    return (*plain, *few, *experts, *stages, *objectives, *images, *tokens, *muon, *fp16)


def covering(seed: int) -> list[Pair]:
    """A selection of all pairs that covers

    - every place as the one that saves, as the one that resumes, and as both;
    - every kind of config with every kind;
    - every word of a case's name saved twice and resumed twice by another place.

    Greedy: next is what covers most that is not covered yet, for the processes it starts; the seed decides ties.
    """
    pairs = [Pair(saved, on, case) for saved in PLACES for on in PLACES for case in cases(saved, on)]
    Random(seed).shuffle(pairs)
    wanted = Counter({what: times for pair in pairs for what, times in covered_by(pair).items()})
    chosen: list[Pair] = []
    runs: set[tuple[Place, parity.Case]] = set()  # that save what has been chosen, or are compared with it
    while any(number > 0 for number in wanted.values()):
        best = max(pairs, key=lambda pair: sum(wanted[one] > 0 for one in covered_by(pair)) / cost(pair, runs))
        pairs.remove(best)
        chosen.append(best)
        runs |= {(best.saved, best.case), (SINGLE, best.case)}
        wanted.subtract(dict.fromkeys(covered_by(best), 1))
    return chosen


def covered_by(pair: Pair) -> dict[tuple[Any, ...], int]:
    """What a pair covers, and how often `covering` wants it."""
    is_same, ends = pair.saved == pair.resumed, {"saved": pair.saved, "resumed": pair.resumed}
    kinds = ("itself", pair.saved) if is_same else (kind_of(pair.saved), kind_of(pair.resumed))
    words = [] if is_same else [(end, word) for end in ends for word in pair.case.name.split()]
    return {kinds: 1, **dict.fromkeys(ends.items(), 1), **dict.fromkeys(words, 2)}


def cost(pair: Pair, runs: set[tuple[Place, parity.Case]]) -> float:
    """Processes that train for a pair beside `runs`; the resumed run makes two thirds of the steps."""
    needed = {(pair.saved, pair.case), (SINGLE, pair.case)} - runs
    return pair.resumed[1] * (STEPS - STOP) / STEPS + sum(place[1] for place, _ in needed)


def kind_of(place: Place) -> str:
    return "single" if place[0] == "single" else parity.kind(place[0])


def run_name(place: Place, case: parity.Case) -> str:
    return parity.run_name(*place, case.name)


def job(folder: Path, place: Place, case: parity.Case, name: str) -> list[str]:
    checkpoint = f"checkpoint={{every_steps: {STOP}, keep: 3}}"
    own = (f"train.max_steps={STEPS}", checkpoint, "batch.rows_per_device=2", "data.eval=[]", "tracking.samples=true")
    return [*parity.job(folder, *place, case), *own, f"run.name={name}"]


def prepare(folder: Path, pairs: Sequence[Pair]) -> None:
    """Models and rows, and what the pairs go on from and are compared with."""
    parity.prepare(folder)
    for place in PLACES:
        names = {pair.case.name for pair in pairs if place in (pair.saved, SINGLE)}
        if names:
            print(f"saving under {place[0]} x{place[1]}", file=sys.stderr, flush=True)
            save(folder, place, sorted(names))


def save(folder: Path, place: Place, names: Sequence[str] = ()) -> None:
    """Run through, with a checkpoint on the way. names: of cases, if not all are run."""
    jobs = [
        job(folder, place, case, run_name(place, case))
        for case in cases(place)
        if (not names or case.name in names) and not finished(folder / "runs" / run_name(place, case))
    ]
    if jobs:
        parity.launch_jobs(folder, *place, jobs)


def resume(folder: Path, pairs: list[Pair]) -> None:
    """Go on from the checkpoint of each pair's saved run, in one launch of the place that they have in common."""
    place, left = pairs[0].resumed, [pair for pair in pairs if not finished(folder / "runs" / pair.name)]
    for pair in left:
        copy_at_stop(folder / "runs" / run_name(pair.saved, pair.case), folder / "runs" / pair.name)
    if left:
        parity.launch_jobs(folder, *place, [job(folder, place, pair.case, pair.name) for pair in left])


def finished(run: Path) -> bool:
    """By an earlier start of this script in the same --folder."""
    return (run / "model").exists()


def copy_at_stop(run: Path, copy: Path) -> None:
    """A run directory with the checkpoint of the stop, and with all that was logged since."""
    checkpoint = f"checkpoints/step-{STOP:08d}"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run / checkpoint, copy / checkpoint)
    shutil.copy(run / "metrics.jsonl", copy)


def compare(folder: Path, pair: Pair) -> dict[str, Any]:
    """Largest relative difference of a loss after the stop, and of a weight at the end."""
    runs = folder / "runs"
    reference, itself = (runs / run_name(place, pair.case) for place in (("single", 1), pair.saved))
    other = runs / pair.name
    ours, theirs = parity.train_lines(reference), parity.train_lines(other)
    after = list(zip(ours, theirs, strict=True))[STOP:] if len(ours) == len(theirs) == STEPS else []
    loss = max((abs(b["loss"] - a["loss"]) / a["loss"] for a, b in after), default=float("inf"))
    parameter = parity.parameter_difference(reference / "model", other / "model")
    rows = samples(reference) == samples(other) and len(samples(other)) == STEPS - STOP
    bitwise = losses(itself) == losses(other) and parity.parameter_difference(itself / "model", other / "model") == 0
    skipped = [parity.skipped_steps(run_lines) for run_lines in (ours, theirs)]
    passed = loss <= pair.case.loss and parameter <= pair.case.parameter and rows and skipped[0] == skipped[1]
    return {
        "saved_under": f"{pair.saved[0]} x{pair.saved[1]}",
        "resumed_under": f"{pair.resumed[0]} x{pair.resumed[1]}",
        "case": pair.case.name,
        "loss": loss,
        "parameter": parameter,
        "same_rows": rows,
        "skipped": skipped[1],
        "bitwise": bitwise,
        "passed": bool(after) and passed and (bitwise or pair.saved != pair.resumed),
    }


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in parity.train_lines(run)]


def samples(run: Path) -> dict[int, list[str]]:
    """Row ids of every step after the stop, over all ranks."""
    rows_of_step: dict[int, list[str]] = {}
    for file in sorted((run / "samples").glob("*.jsonl")):
        for line in read_steps(file):
            rows_of_step.setdefault(line["step"], []).extend(line["rows"])
    return {step: sorted(rows) for step, rows in rows_of_step.items() if step > STOP}


def show(cells: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(str(cell["resumed_under"]) for cell in cells))
    for case in dict.fromkeys(str(cell["case"]) for cell in cells):
        table = Table("saved under", title=f"{case}: largest relative difference of a loss after resuming on")
        marks = {(c["saved_under"], c["resumed_under"]): mark(c) for c in cells if c["case"] == case}
        shown = [column for column in columns if any(on == column for _, on in marks)]
        for column in shown:
            table.add_column(column)
        for saved in dict.fromkeys(saved for saved, _ in marks):
            table.add_row(saved, *(marks.get((saved, column), "") for column in shown))
        Console(width=220).print(table)


def mark(cell: dict[str, Any]) -> str:
    if not cell["passed"]:
        return f"[red]FAILED {cell['loss']:.0e}[/red]"
    return "[green]bitwise[/green]" if cell["bitwise"] else f"{cell['loss']:.0e}"


def selected(only: list[str]) -> list[Place]:
    """only: `config` or `config:processes`; all if there are none. `single` is the reference, and always among them."""
    return [
        (config, size)
        for config, size in PLACES
        if config == "single" or not only or {config, f"{config}:{size}"} & set(only)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="configs, as `ddp` or `ddp:2`; single is always one")
    parser.add_argument("--cases", nargs="+", default=[], help="of scripts/proofs/parity_matrix.py, and no others")
    parser.add_argument("--covering", type=int, metavar="SEED", help="the pairs that this seed draws (`covering`)")
    parser.add_argument("--json", type=Path, help="write the matrix there")
    parser.add_argument("--folder", type=Path, help="work there, keep everything, do not repeat what is there")
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - {name for place in PLACES for name in (place[0], "{}:{}".format(*place))}:
        parser.error(f"--only {' '.join(sorted(unknown))}: configs are {' '.join(dict(PLACES))}")
    if arguments.covering is not None and (arguments.only or arguments.cases):
        parser.error("--covering draws from all pairs: leave out --only and --cases")
    places = selected(arguments.only)
    if unknown := set(arguments.cases) - {case.name for place in places for case in cases(place)}:
        parser.error(f"--cases {' '.join(sorted(unknown))}: none of these places has them")
    together = {case.name for saved in places for place in places for case in cases(saved, place)}
    if arguments.cases and together.isdisjoint(arguments.cases):  # a pair runs the harder one of two
        parser.error(f"--cases {' '.join(arguments.cases)}: pairs of these places run {', '.join(sorted(together))}")
    if arguments.cases:
        places = [place for place in places if any(case.name in arguments.cases for case in cases(place))]
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="finetune-resume-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(FINETUNE_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1")
    pairs = [
        Pair(saved, place, case)
        for place in places
        for saved in places
        for case in cases(saved, place)
        if not arguments.cases or case.name in arguments.cases
    ]
    if arguments.covering is not None:
        pairs = covering(arguments.covering)
    prepare(folder, pairs)
    cells = []
    for place in places:
        here = [pair for pair in pairs if pair.resumed == place]
        if here:
            print(f"resuming under {place[0]} x{place[1]}", file=sys.stderr, flush=True)
            resume(folder, here)
        cells += [compare(folder, pair) for pair in here]
    show(cells)
    if arguments.json:
        parity.write_json(arguments.json, "scripts/proofs/resume_matrix.py", cells)
    if not arguments.folder:
        shutil.rmtree(folder)
    return 0 if all(cell["passed"] for cell in cells) else 1


if __name__ == "__main__":
    raise SystemExit(main())
