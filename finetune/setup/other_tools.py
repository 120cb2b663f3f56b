"""`finetune new --from`: a recipe from a config of TRL, axolotl, LLaMA-Factory or Unsloth."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune.errors import UserError
from finetune.recipe import load_recipe
from finetune.recipe.yaml_tree import read
from finetune.setup.conversion import Conversion, scalar
from finetune.setup.foreign_axolotl import convert_axolotl
from finetune.setup.foreign_llama_factory import convert_llama_factory
from finetune.setup.foreign_trl import COMMAND, TRAINERS, convert_trl
from finetune.setup.foreign_unsloth import convert_unsloth, flattened
from finetune.utils import write_atomically

_CONVERTERS: dict[str, Callable[[Conversion], None]] = {
    "axolotl": convert_axolotl,
    "LLaMA-Factory": convert_llama_factory,
    "TRL": convert_trl,
    "Unsloth": convert_unsloth,
}


def write_converted(
    source: str, output: Path | None, name: str | None, devices: int | None, overrides: Sequence[str], console: Console
) -> Path:
    """Writes the recipe, lists what has no place in it, and the next commands; returns its path.

    source: file of the other tool; devices: that it ran on; overrides: `section.key=value` of the recipe, over what was
    converted. Raises UserError.
    """
    origin, theirs = _values(source)
    conversion = Conversion(_tool_of(origin, theirs), theirs, devices)
    _CONVERTERS[conversion.tool](conversion)
    conversion.leave_the_rest()
    if name is not None:
        conversion.set("run.name", name)
    path = output or Path(f"{conversion.value('run.name')}.yaml")
    if path.exists():
        raise UserError(f"{path} exists already and is left as it is: give another --output or --name, or remove it")
    for override in overrides:
        conversion.override(override)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, conversion.text(origin))
    lines = []
    if conversion.left:
        lines += ["Not converted:", *(f"  {', '.join(names)}: {reason}" for reason, names in conversion.left.items())]
    if todos := conversion.todos():
        lines += ["To do, marked in the recipe:", *(f"  {todo}" for todo in todos)]
    shown = shlex.quote(str(path))
    config = f"--config-file accelerate_configs/{conversion.launch}.yaml " if conversion.launch else ""
    lines += [
        f"\nwritten: {path}, from {conversion.tool}. Next:\n",
        f"  python -m finetune check {shown}",
        f"  python -m finetune launch {config}{shown}",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    load_recipe(path)
    return path


def _values(source: str) -> tuple[str, dict[str, Any]]:
    """Returns a short name of the config and its values; of words of a command line, with the file of `--config`."""
    if " --" not in f" {source}":
        return Path(source).name, read(Path(source)).values
    words = shlex.split(source)
    begin = next(i for i, word in enumerate(words) if word.startswith("--"))
    arguments: dict[str, list[str]] = {}
    for word in words[begin:]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            last = arguments.setdefault(name.replace("-", "_"), [])
            last += [value] if equals else []
        elif not word.endswith(".py"):
            last.append(word)
    # `trl dpo ...`, or `accelerate launch ... trl/scripts/dpo.py ...`, whose options of the launcher come before
    scripts = [Path(word).stem for word in words if word.endswith(".py")] or words[1:2]
    theirs: dict[str, Any] = {COMMAND: scripts[0]} if scripts and scripts[0] in TRAINERS else {}
    if config := arguments.pop("config", None):
        theirs = read(Path(config[0])).values | theirs
    for name, values in arguments.items():
        of_option = [scalar(value) for value in values]
        if of_option:
            theirs[name] = of_option[0] if len(of_option) == 1 else of_option
        else:  # a switch, which `no_` turns off
            theirs[name.removeprefix("no_")] = not name.startswith("no_")
    return "arguments", theirs


def _tool_of(origin: str, theirs: dict[str, Any]) -> str:
    """Returns the tool that has such keys. Raises UserError if there is none."""
    if "base_model" in theirs:
        return "axolotl"
    if {"stage", "finetuning_type"} & theirs.keys():
        return "LLaMA-Factory"
    unsloth = {"model_name", "use_gradient_checkpointing", "random_state", "full_finetuning", "format_type"}
    if unsloth & flattened(theirs).keys() or isinstance(theirs.get("training"), dict):
        return "Unsloth"
    if {"model_name_or_path", COMMAND} & theirs.keys():
        return "TRL"
    raise UserError(
        f"{origin}: not a config of axolotl (`base_model`), LLaMA-Factory (`stage`, `finetuning_type`), TRL "
        "(`model_name_or_path`) or Unsloth (`model_name`, `random_state`)"
    )
