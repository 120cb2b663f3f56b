"""The memory of a run by running it: its own set-up and steps as one rank of N, on devices that are not there.

    python -m finetune.training.exact RECIPE CONFIG PROCESSES BATCH [KEY=VALUE ...]

BATCH is the largest micro-batch, as JSON: [[tokens of each document], supervised tokens].

In a process of its own, for it changes tables of libtorch (`planning/fake_devices.py`). A line of JSON for each phase
that begins, and at last one with the peaks.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from finetune.errors import UserError
from finetune.planning.estimate.command import accelerate_config
from finetune.planning.estimate.micro_batch import HeaviestBatch
from finetune.planning.estimate.search import Choice
from finetune.training.display import PassProgress
from finetune.utils import print_line

WITH_VALUES = ("pp", "pp_dp", "ep", "zero2_offload", "zero3_nvme")  # configs whose steps read values: see docs/gpu.md
PHASES = ("load", "wrap", "forward", "backward", "reduction", "optimizer", "save")
_ORDER = ("load", "wrap", *("batch", "forward", "backward", "reduction", "optimizer") * 2, "save")  # of a run


@dataclass(frozen=True)
class ExactMemory:
    phases: dict[str, int]  # bytes of tensors on the device at the peak of each, of rank 0
    at_peak: list[tuple[str, int]]  # what lay there: shape, type and phase in which it came; bytes
    micro_batches: int  # of a step

    @property
    def tensors(self) -> int:
        return max(self.phases.values())


def exact_memory(
    recipe_file: str,
    overrides: Sequence[str],
    config_file: str,
    processes: int,
    batch: HeaviestBatch,
    progress: Callable[[float, str], None] = lambda share, phase: None,
) -> ExactMemory:
    """Returns what a rank of a run takes on fake H100s. progress: is told the share that is done and what runs.

    Seconds to minutes. Raises UserError where the run would, and where this torch cannot have such devices.
    """
    from finetune.planning.fake_devices import why_not

    if reason := why_not():
        raise UserError(f"--exact needs devices that are not there: {reason}; leave it out for the estimate by formula")
    program = [sys.executable, "-m", "finetune.training.exact", recipe_file, config_file, str(processes)]
    program += [json.dumps([batch.documents, batch.targets]), *overrides]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        found, begun = dict[str, Any](), 0
        for line in running.stdout:
            if not line.startswith("{"):
                continue
            found = json.loads(line)
            if "phase" in found:
                begun = _ORDER.index(found["phase"], begun) if found["phase"] in _ORDER[begun:] else begun
                progress(begun / len(_ORDER), found["phase"])
        errors = running.stderr.read()
    if "error" in found:
        raise UserError(found["error"])
    if "phases" not in found:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        raise UserError(f"--exact: {config_file} cannot run on devices without values: {last[0]}")
    return ExactMemory(found["phases"], [(what, size) for what, size in found["at_peak"]], found["micro_batches"])


def show_exact(recipe_file: Path, overrides: Sequence[str], places: Sequence[Choice], console: Console) -> None:
    """Prints the memory by formula, of the best place that can run on such devices, beside that of its steps as they
    run. Raises UserError."""
    place = next((one for one in places if one.config not in WITH_VALUES), None)
    if place is None:
        raise UserError(
            "--exact: no place to run: it takes the best of a plan (not --sweep or --memory), and none of "
            f"{', '.join(WITH_VALUES)}, whose steps read values"
        )
    with tempfile.TemporaryDirectory() as folder, PassProgress(console, "steps", 100, 0, True) as progress:
        file = Path(folder, f"{place.config}.yaml")
        file.write_text(yaml.safe_dump(accelerate_config(place), sort_keys=False), encoding="utf-8")
        changed = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in place.changes.items())]

        def told(share: float, _phase: str) -> None:
            progress.update(round(100 * share))

        found = exact_memory(str(recipe_file), changed, str(file), place.launch.processes, place.batch, told)
    formula, mib = place.memory.phases, 2**20
    table = Table("phase", "by formula, MiB", "as it runs, MiB", box=None, pad_edge=False)
    for phase, size in found.phases.items():
        same = formula.get(phase)
        table.add_row(phase, "" if same is None else f"{same / mib:.2f}", f"{size / mib:.2f}")
    print_line(console, f"\n{place.config}, {place.launch.processes} processes, tensors of rank 0:", highlight=False)
    console.print(table)
    # With several micro-batches, gradients lie there in the run, too.
    if place.launch.kind == "replicated" and place.launch.processes > 1 and found.micro_batches == 1:
        buckets = place.memory.persistent["gradients"] / mib
        print_line(
            console, f"the reducer of DDP does not run there: its buckets, {buckets:.2f} MiB, are in the formula alone"
        )
    largest = ", ".join(f"{what} {size / mib:.2f}" for what, size in found.at_peak[:4])
    print_line(console, f"at the peak, MiB: {largest}", highlight=False, markup=False)


def main(
    recipe_file: str, config_file: str, processes: int, batch: HeaviestBatch, overrides: Sequence[str]
) -> dict[str, Any]:
    """Returns what is written last."""
    with contextlib.suppress(ImportError):
        import bitsandbytes  # noqa: F401  (before there seem to be devices: it then looks for functions of CUDA builds)

    from finetune.data.building import OpenedSources
    from finetune.data.dataset import build_training
    from finetune.engine.base import Engine
    from finetune.engine.compatibility import check_launch
    from finetune.engine.launch import read_config_file
    from finetune.models.config import training_config
    from finetune.models.tokenizer import load_tokenizer
    from finetune.planning.fake_run import fake_run, with_heaviest
    from finetune.recipe import load_recipe
    from finetune.training.run import build_trainer
    from finetune.training.signals import StopRequest

    recipe = load_recipe(recipe_file, overrides)
    config, tokenizer = training_config(recipe), load_tokenizer(recipe.model)
    micro_batches = check_launch(recipe, recipe_file, read_config_file(config_file, processes), config)
    training = build_training(recipe, tokenizer, OpenedSources(recipe))
    micro_batches_run: list[int] = []

    def start(engine: Engine) -> Any:
        console = Console(file=io.StringIO())
        data = (training, None)
        trainer = build_trainer(recipe, engine, tokenizer, config, data, micro_batches, StopRequest(), console)
        trainer.loader = with_heaviest(trainer.loader, recipe, batch)
        trainer.saver = SimpleNamespace(failed=False)  # pyright: ignore[reportAttributeAccessIssue]  (`_run` makes it)
        micro_batches_run.append(len(trainer.loader.step(0).batches))  # fewer rows each than a trial has found, perhaps
        return trainer

    meter = fake_run(recipe, config, config_file, processes, start, told=lambda phase: _say({"phase": phase}))
    peaks = {name: meter.phases[name].peak_bytes for name in PHASES if name in meter.phases}
    at_peak = meter.at_peak.most_common(12)
    return {"phases": peaks, "at_peak": at_peak, "micro_batches": micro_batches_run[0]}


def _say(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    try:
        documents, targets = json.loads(sys.argv[4])
        heaviest = HeaviestBatch(tuple(documents), targets)
        _say(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), heaviest, sys.argv[5:]))
    except UserError as refusal:
        _say({"error": str(refusal)})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if sys.exc_info()[0] is None:
            os._exit(0)  # libtorch's teardown would call into the changed tables
