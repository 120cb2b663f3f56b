"""Writes docs/reference/recipe-memory.md: devices and memory of the launch that each recipe's header has, by `plan`.

    python scripts/docs/recipe_memory.py                 # minutes; after a change of a recipe or of finetune/plan

Each row counts as one document of `data.max_length` tokens, all supervised, and full of images, clips or videos if the
recipe takes any: the most there can be. A size of devices is named if `plan` says `fits`, with its margin. Left out:
quickstart, which is for a CPU; Mistral Large 4's, whose layers cannot run without values.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from finetune.engine.compatibility import check_launch
from finetune.engine.costs.common import PARTS
from finetune.engine.hardware import GIB, shipped_hardware
from finetune.engine.launch import Launch, read_config_file
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.plan.images import most_images
from finetune.plan.lengths import widest
from finetune.plan.memory import Memory, Place, estimate_memory
from finetune.plan.search import heaviest
from finetune.plan.shapes import costs_at
from finetune.plan.tables import config_and_source
from finetune.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
SIZES = (8, 12, 16, 24, 32, 40, 48, 80, 141, 180)  # GB of devices that are named; below 16 of no row of hardware.yaml
PAGE = ROOT / "docs" / "reference" / "recipe-memory.md"


def planned_recipes() -> list[Path]:
    paths = sorted((ROOT / "recipes").glob("*/*.yaml"))
    others = ("base", "tasks", "quickstart", "mistral-large-4")
    return [path for path in paths if path.parent.name not in others]


def launch_of(text: str) -> Launch:
    """Returns the launch that a header names, with the keys beside it (`parallelism_config_ep_size: 8`)."""
    found = re.search(r"--config-file (\S+)(?:.*?--num-processes (\d+))?", text.partition("# Sources:")[0])
    assert found is not None
    launch = read_config_file(str(ROOT / found[1]), int(found[2]) if found[2] else None)
    for key, size in re.findall(r"(parallelism_config_\w+_size): (\d+)", text):
        launch.config["parallelism_config"][key] = int(size)
    for key, value in re.findall(r"(fsdp_reshard_after_forward): (\w+)", text):
        launch.config["fsdp_config"][key] = value == "true"
    return launch


def memory(recipe: Recipe, config: PretrainedConfig, launch: Launch, path: Path) -> Memory:
    """Raises UserError if recipe and launch do not go together."""
    micro_batches = check_launch(recipe, str(path), launch, config)
    batch = heaviest(recipe.batch, widest(recipe, "the most there can be", config))
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


def row(path: Path) -> str:
    """Returns the table's row of a recipe."""
    recipe, text = load_recipe(path, []), path.read_text(encoding="utf-8")
    config, launch = config_and_source(recipe)[0], launch_of(text)
    own, kept = memory(recipe, config, launch, path), costs_at(recipe, config, launch, "cuda").state(0).persistent
    parts = {name: kept[name] / 1e9 for name in PARTS if kept[name]}
    cells = [
        f"[{path.parent.name}/{path.stem}](../../recipes/{path.parent.name}/{path.name})",
        launch.where if launch.processes == 1 else f"{launch.where} x {launch.processes}",
        devices(recipe, config, launch, path),
        f"{own.tensors / 1e9:.1f}",
        f"{sum(parts.values()):.1f}",
        ", ".join(f"{name} {size:.1f}" if size >= 0.05 else f"{name} {size:.2f}" for name, size in parts.items()),
        micro_batch(recipe, config),
    ]
    return f"| {' | '.join(cells)} |"


def devices(recipe: Recipe, config: PretrainedConfig, launch: Launch, path: Path) -> str:
    """Returns the smallest devices of the header's launch, and of FSDP2 on half and twice as many."""
    count = launch.processes
    size = smallest_device(memory(recipe, config, launch, path).tensors, count)
    found = [f"{count} x {size} GB" if size else f"{count} x more than {SIZES[-1]} GB"]
    if launch.kind == "fsdp2" and launch.parallelism.is_plain:
        for other in (n for n in (count // 2, count * 2) if n > 1 and recipe.batch.rows % n == 0):
            needed = memory(recipe, config, replace(launch, processes=other), path)
            if least := smallest_device(needed.tensors, other):
                found.append(f"{other} x {least}")
        alone = memory(recipe, config, read_config_file(str(ROOT / "accelerate_configs/single.yaml"), 1), path)
        if least := smallest_device(alone.tensors, 1):
            found.append(f"1 x {least} with single")
    return ", ".join(found)


def micro_batch(recipe: Recipe, config: PretrainedConfig) -> str:
    if recipe.batch.tokens_per_device is not None:
        size = f"{recipe.batch.tokens_per_device:,}"
    else:
        size = f"{recipe.batch.rows_per_device} x {recipe.data.max_length:,}"
    files = most_images(recipe.data, config)
    names = {"image": "images", "audio": "sound", "video": "videos"}
    return size + (f", {len(files)} x {files[0].tokens:,} of {names[files[0].kind]}" if files else "")


def main() -> None:
    before, mark, _ = PAGE.read_text(encoding="utf-8").partition("<!-- made by scripts/docs/recipe_memory.py -->\n")
    rows = []
    for path in planned_recipes():
        try:
            rows.append(row(path))
        except UserError as error:
            raise SystemExit(f"{path}: {error}") from None
        print(rows[-1], flush=True)
    head = "| recipe | launch | smallest devices | peak, GB | kept, GB | of that, GB | micro-batch, tokens |"
    table = "\n".join([head, "| --- | --- | --- | --- | --- | --- | --- |", *rows])
    PAGE.write_text(f"{before}{mark}\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
