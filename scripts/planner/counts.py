"""What a step of a config dispatches, waits for, casts, copies and sends, counted on CUDA devices that are not there.

    python scripts/planner/counts.py fsdp2 zero3 --processes 8
    python scripts/planner/counts.py single --processes 1 --set mode=lora lora.rank=8

The project's own run as one rank of N (`tests/support/fake_run.py`), on a CPU-only torch: the second step of one
with its optimizer's state, of full rows. Bytes are those of this model, a tiny one unless a recipe names another; waits
are those of any model.
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
from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import parity
import tiny

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("forward", "backward", "reduction", "optimizer", "end of the step")


def measure(recipe_file: str, where: str, processes: int, rank: int, *overrides: str) -> dict[str, Any]:
    from fake_run import fake_run, with_heaviest
    from trainers import ready_trainer

    from finetune.engine.base import Engine
    from finetune.engine.launch import read_config_file
    from finetune.errors import UserError
    from finetune.features import all_features, load_recipe
    from finetune.models.base_model import Base
    from finetune.training.prepare import prepare
    from finetune.training.trainer import Trainer

    file = str(ROOT / "accelerate_configs" / f"{where}.yaml")
    try:
        recipe, launch = load_recipe(recipe_file, [*overrides, "data.eval=[]"]), read_config_file(file, processes)
        if launch.parallelism.tensor > 1:
            remember_trial(Base.of(recipe).config)
        prepared = prepare(recipe, recipe_file, launch, all_features())
    except UserError as refusal:
        return {"refused": str(refusal)}

    def start(engine: Engine) -> Trainer:
        trainer = ready_trainer(prepared, engine)
        trainer.loader = with_heaviest(trainer.loader, recipe)
        return trainer

    meter = fake_run(recipe, prepared.base.config, file, processes, start, rank, block=1)
    return {
        "phases": {
            name: {
                **vars(counts := meter.phases[name]),
                "peak_bytes": peak,
                "collectives": [[*key, n] for key, n in counts.collectives.items()],
            }
            for name, peak in meter.peaks.items()
        },
        "at_peak": meter.at_peak.most_common(12),
    }


def remember_trial(config: PretrainedConfig) -> None:
    """Leave the outcome of the trial of divided layers in the cache. In a fork: after its backward autograd has counted
    the devices of a process for good, and its threads cannot share one mode of fake tensors."""
    from finetune.engine.split_trial import tensor_split_problem

    pid = os.fork()
    if pid == 0:
        try:
            tensor_split_problem(config)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def main() -> None:
    arguments = parse_arguments()
    if arguments.measure:  # in a process of its own, whose libtorch is changed
        found = measure(str(arguments.recipe), arguments.configs[0], arguments.processes, 0, *arguments.overrides)
        print(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)
    with tempfile.TemporaryDirectory() as folder:
        recipe = arguments.recipe or tiny_recipe(Path(folder), arguments.processes)
        for config in arguments.configs:
            program = [sys.executable, __file__, config, "--measure", "--processes", str(arguments.processes)]
            program += ["--recipe", str(recipe), "--set", *arguments.overrides]
            done = subprocess.run(program, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            found = json.loads(done.stdout.splitlines()[-1])
            Console(width=150).print(found["refused"] if "refused" in found else table(config, arguments, found))


def tiny_recipe(folder: Path, processes: int) -> Path:
    tiny.save_model(folder, "llama")
    tiny.write_rows(folder / "rows.jsonl", tiny.conversations(120))
    values = parity.base_recipe(folder)
    del values["data"]["eval"], values["evaluate"]
    values["batch"] = {"rows": 2 * processes, "rows_per_device": 1}
    values["train"] |= {"precision": "bf16", "activation_checkpointing": True}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder / "recipe.yaml"


def table(config: str, arguments: argparse.Namespace, found: dict[str, Any]) -> Table:
    shown = Table(title=f"{config}, rank 0 of {arguments.processes}: the second step")
    for heading in (
        "phase",
        "operators",
        "waits",
        "casts, MiB",
        "host copies",
        "MiB",
        "collectives, and MiB given to them",
        "peak MiB",
    ):
        shown.add_column(heading, justify="left" if heading in ("phase", "waits") else "right")
    for name in PHASES:
        counts = found["phases"][name]
        sent = [
            f"{number} {operator} on {device}, {counts['collective_bytes'][operator] / 2**20:.2f}"
            for operator, device, number in counts["collectives"]
        ]
        shown.add_row(
            name,
            f"{sum(counts['operators'].values()):,}",
            "\n".join(f"{number} {wait}" for wait, number in counts["waits"].items()),
            f"{counts['cast_bytes'] / 2**20:.2f}",
            "\n".join(f"{number} {way}" for way, number in counts["host_copies"].items()),
            f"{counts['host_copy_bytes'] / 2**20:.2f}",
            "\n".join(sent),
            f"{counts['peak_bytes'] / 2**20:.2f}",
        )
    return shown


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", help="names in accelerate_configs/")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--recipe", type=Path, help="default: a tiny Llama in bf16")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="overrides", help="of the recipe")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))
    main()
