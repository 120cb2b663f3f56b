"""Memory of recipes by phase, weighed on CUDA devices that are not there (`tests/support/fake_run.py`).

    python scripts/planner/phase_memory.py --json benchmarks/results/phase_memory.json
    python scripts/planner/phase_memory.py --only 1B

The second step of rank 0, a row of 4,096 tokens on each device, recomputed layers, bf16; models of the published
shapes, without weights. Twenty seconds to some minutes of processor time each, one after another.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import counts
import yaml

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import tiny

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("load", "wrap", "forward", "backward", "optimizer")
ONE_B, EIGHT_B, SEVENTY_B = (f"meta-llama/Llama-{name}" for name in ("3.2-1B", "3.1-8B", "3.3-70B-Instruct"))
LORA = ("mode=lora", "lora={rank: 16, alpha: 32}", "optimizer.weight_decay=0")
QLORA = (*LORA, "mode=qlora", "lora.dropout=0.05", "quantization={type: nf4}")


class Place(NamedTuple):
    name: str
    model: str
    overrides: tuple[str, ...]
    config: str
    processes: int


PLACES = (
    Place("1B full", ONE_B, (), "single", 1),
    Place("8B full", EIGHT_B, ("batch.rows=8",), "fsdp2", 8),  # the recipe's: one micro-batch a step
    Place("70B qlora", SEVENTY_B, QLORA, "fsdp2", 2),
    Place("70B lora", SEVENTY_B, LORA, "fsdp2_offload", 2),
)


def write_recipe(folder: Path, model: str, processes: int) -> Path:
    from finetune.plan.tables import shipped_config

    config = shipped_config(model)
    assert config is not None
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    path = counts.tiny_recipe(folder, processes)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values["model"] = {"name": str(folder / "model")}
    values["data"] |= {"max_length": 4096, "packing": False}  # rows of a run are replaced by the heaviest
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def weigh(place: Place) -> dict[str, Any]:
    """Returns GiB by phase."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder), place.model, place.processes)
        program = [sys.executable, counts.__file__, place.config, "--measure", "--processes", str(place.processes)]
        program += ["--recipe", str(recipe), "--set", *place.overrides]
        done = subprocess.run(program, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    phases = json.loads(done.stdout.splitlines()[-1])["phases"]
    gib = {name: round(phases[name]["peak_bytes"] / 2**30, 2) for name in PHASES}
    return {"recipe": place.name, "config": place.config, "processes": place.processes, **gib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a recipe's name")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"| recipe | config | processes | {' | '.join(PHASES)} |\n|{' --- |' * (3 + len(PHASES))}")
    found = []
    for place in PLACES:
        if arguments.only in place.name:
            found.append(weigh(place))
            print(f"| {' | '.join(map(str, found[-1].values()))} |", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))
    main()
