"""Writes "Where:" and "Memory:" of recipes' headers: what `plan` calculates for the launch that each header has.

    python scripts/docs/recipe_headers.py                 # after a change of a recipe or of finetune/plan
    python scripts/docs/recipe_headers.py llama3.1-8b

Each row counts as one document of `data.max_length` tokens, all supervised, and full of images if the recipe sees
any: the most there can be. A size of devices is named if `plan` says `fits`, with its margin. Left as they are:
quickstart, which is for a CPU; Mistral Large 4's, whose layers cannot run without values.
"""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from finetune.engine.compatibility import check_launch
from finetune.engine.costs.common import PARTS, State
from finetune.engine.hardware import GIB, shipped_hardware
from finetune.engine.launch import Launch, read_config_file
from finetune.errors import UserError
from finetune.plan.images import most_images
from finetune.plan.lengths import widest
from finetune.plan.memory import Memory, Place, estimate_memory
from finetune.plan.search import heaviest
from finetune.plan.shapes import costs_at
from finetune.plan.tables import config_and_source
from finetune.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[2]
WORDS = {1: "one", 2: "two", 4: "four", 8: "eight"}
SIZES = (8, 12, 16, 24, 32, 40, 48, 80, 141, 180)  # GB of devices that are named; below 16 of no row of hardware.yaml
MARGIN, WIDTH = "#            ", 120


def planned_recipes() -> list[Path]:
    paths = sorted((ROOT / "recipes").glob("*/*.yaml"))
    others = ("base", "tasks", "quickstart", "mistral-large-4")
    return [path for path in paths if path.parent.name not in others]


def launch_of(text: str) -> Launch:
    """Returns the launch that a header names, with the keys beside it (`parallelism_config_ep_size: 8`)."""
    found = re.search(r"--config-file (\S+)(?:.*?--num-processes (\d+))?", text.partition("# Where:")[0])
    assert found is not None
    launch = read_config_file(str(ROOT / found[1]), int(found[2]) if found[2] else None)
    for key, size in re.findall(r"(parallelism_config_\w+_size): (\d+)", text):
        launch.config["parallelism_config"][key] = int(size)
    for key, value in re.findall(r"(fsdp_reshard_after_forward): (\w+)", text):
        launch.config["fsdp_config"][key] = value == "true"
    return launch


def kept(recipe: Recipe, config: PretrainedConfig, launch: Launch) -> State:
    return costs_at(recipe, config, launch, "cuda").state(0)


def memory(recipe: Recipe, config: PretrainedConfig, launch: Launch, path: Path) -> Memory:
    """Raises UserError if recipe and launch do not go together."""
    micro_batches = check_launch(recipe, str(path), launch, config)
    batch = heaviest(recipe, widest(recipe, "the most there can be", config))
    return estimate_memory(recipe, config, Place(launch, launch.processes), batch, micro_batches)


def smallest_device(tensors: int, processes: int) -> int | None:
    """Returns the GB of the smallest devices on which these bytes fit; None: on none."""
    hardware = shipped_hardware()
    needed = tensors + hardware.reserve.bytes(tensors, processes)
    for size in SIZES:
        sold = [device.gib for device in hardware.devices.values() if device.memory_gb == size]
        gib = min(sold, default=size * 1e9 / GIB)
        if gib - needed / GIB >= hardware.reserve.margin * gib:
            return size
    return None


def fields(path: Path) -> tuple[str, str]:
    """Returns what stands behind Where and Memory."""
    recipe, text = load_recipe(path, []), path.read_text(encoding="utf-8")
    config, launch = config_and_source(recipe)[0], launch_of(text)
    own = memory(recipe, config, launch, path)
    count = launch.processes
    size = smallest_device(own.tensors, count)
    here = f"{WORDS.get(count, count)} GPU{'s' if count > 1 else ''} of"
    where = [f"{here} {size} GB or more" if size else f"{here} more than {SIZES[-1]} GB"]
    if launch.kind == "fsdp2" and launch.parallelism.is_plain:
        for other in (n for n in (count // 2, count * 2) if n > 1 and recipe.batch.rows % n == 0):
            needed = memory(recipe, config, replace(launch, processes=other), path)
            if least := smallest_device(needed.tensors, other):
                where.append(f"{WORDS.get(other, other)} of {least}")
        alone = memory(recipe, config, read_config_file(str(ROOT / "accelerate_configs/single.yaml"), 1), path)
        if least := smallest_device(alone.tensors, 1):
            where.append(f"one of {least} with single.yaml")
    elif launch.where == "single":
        where.append("ddp.yaml with 2 to 8 for speed")
    rows = f"{recipe.batch.rows_per_device} rows" if recipe.batch.rows_per_device != 1 else "a row"
    of_each = f"{recipe.data.max_length:,} tokens"
    if recipe.batch.tokens_per_device is not None:
        rows, of_each = "a micro-batch", f"{recipe.batch.tokens_per_device:,} tokens"
    if images := most_images(recipe, config):
        of_each += f", {len(images)} image{'s' if len(images) > 1 else ''} of {images[0]:,} among them"
    peak = f"{own.tensors / 1e9:.1f} GB a device at the peak, with {rows} of {of_each}; "
    return "; ".join(where), peak + kept_words(kept(recipe, config, launch)) + "; by `plan`"


def kept_words(state: State) -> str:
    parts = {name: size / 1e9 for name in PARTS if (size := state.persistent[name])}
    said = [f"{name} {size:.1f}" if size >= 0.05 else f"{name} {size:.2f}" for name, size in parts.items()]
    return f"{sum(parts.values()):.1f} GB kept: {', '.join(said)}"


def with_field(text: str, name: str, value: str) -> str:
    """Returns a header with another value of a field, which may go on in lines below it."""
    lead = f"# {name + ':':<11}"
    wrapped = textwrap.wrap(value, WIDTH - len(MARGIN), break_long_words=False, break_on_hyphens=False)
    made = lead + f"\n{MARGIN}".join(wrapped) + "\n"
    changed, count = re.subn(rf"^# {name}:.*\n(?:#  .*\n)*", lambda _: made, text, count=1, flags=re.MULTILINE)
    assert count == 1, name
    return changed


def made(path: Path) -> str:
    """Returns the recipe's file with its header as it should be."""
    where, needs = fields(path)
    return with_field(with_field(path.read_text(encoding="utf-8"), "Where", where), "Memory", needs)


def main() -> None:
    for path in planned_recipes():
        if all(word in str(path) for word in sys.argv[1:]):
            try:
                path.write_text(made(path), encoding="utf-8")
            except UserError as error:
                raise SystemExit(f"{path}: {error}") from None
            print(path.relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
