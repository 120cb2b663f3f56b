"""`finetune new --from`: a recipe from a config of TRL, axolotl, LLaMA-Factory, Unsloth or torchtune."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune.desk.setup.conversion import Conversion
from finetune.desk.setup.foreign_axolotl import convert_axolotl
from finetune.desk.setup.foreign_command import COMMAND, command_values, is_command
from finetune.desk.setup.foreign_llama_factory import convert_llama_factory
from finetune.desk.setup.foreign_script import SUFFIXES, script_values
from finetune.desk.setup.foreign_torchtune import convert_torchtune, is_torchtune
from finetune.desk.setup.foreign_trl import convert_trl
from finetune.desk.setup.foreign_unsloth import convert_unsloth, flattened
from finetune.desk.setup.foreign_values import ForeignTable, one_line, read_config
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.utils import write_atomically

_CONVERTERS: dict[str, Callable[[Conversion], None]] = {
    "axolotl": convert_axolotl,
    "LLaMA-Factory": convert_llama_factory,
    "TRL": convert_trl,
    "Unsloth": convert_unsloth,
    "torchtune": convert_torchtune,
}


def write_converted(
    source: str, output: Path | None, name: str | None, devices: int | None, overrides: Sequence[str], console: Console
) -> Path:
    """Writes the recipe, lists what has no place in it, and the next commands; returns its path.

    source: file of the other tool, or a command line; devices: that it ran on; overrides: `section.key=value` of the
    recipe, over what was converted. Raises UserError.
    """
    origin, conversion = convert(source, devices)
    if name is not None:
        conversion.set("run.name", name)
    path = output or Path(f"{conversion.value('run.name')}.yaml")
    if path.exists():
        raise UserError(
            f"{path} exists already and is left as it is. Fix: give another --output or --name, or remove it"
        )
    for override in overrides:
        conversion.override(override)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, conversion.text(origin))
    for line in _printed(conversion, path):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    load_recipe(path)
    return path


def convert(source: str, devices: int | None = None) -> tuple[str, Conversion]:
    """Returns a short name of the source, and its conversion. Raises UserError."""
    path = Path(source)
    if path.suffix in SUFFIXES and not is_command(source):
        script = script_values(path)
        origin, tool, theirs, computed = one_line(path.name, 60), script.tool, script.values, script.computed
    else:
        origin, theirs = _values(source)
        tool, computed = _tool_of(origin, theirs), {}
    conversion = Conversion(tool, ForeignTable(theirs), devices)
    _CONVERTERS[conversion.tool](conversion)
    conversion.leave_the_rest()
    conversion.doubt_computed(computed)
    return origin, conversion


def _printed(conversion: Conversion, path: Path) -> list[str]:
    """Returns the lines for the terminal: what was left, what is to do, and the next commands."""
    lines = []
    if left := conversion.not_converted():
        lines += ["Not converted:", *(f"  {line}" for line in left)]
    if todos := conversion.todos():
        lines += ["To do, marked in the recipe:", *(f"  {todo}" for todo in todos)]
    shown = shlex.quote(str(path))
    config = f"--config-file accelerate_configs/{conversion.launch}.yaml " if conversion.launch else ""
    return [
        *lines,
        f"\nwritten: {path}, from {conversion.tool}. Next:\n",
        f"  python -m finetune check {shown}",
        f"  python -m finetune launch {config}{shown}",
    ]


def _values(source: str) -> tuple[str, dict[str, Any]]:
    """Returns a short name of the config and its values."""
    if is_command(source):
        return "arguments", command_values(source)
    path = Path(source)
    return one_line(path.name, 60), read_config(path)


def _tool_of(origin: str, theirs: dict[str, Any]) -> str:
    """Returns the tool that has such keys. Raises UserError if there is none."""
    if is_torchtune(theirs):
        return "torchtune"
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
        f"{origin}: not a config of a tool that is known here. Fix: give one of axolotl (with `base_model`), LLaMA-"
        "Factory (`stage`, `finetuning_type`), TRL (`model_name_or_path`), Unsloth (`model_name`, `random_state`) or "
        "torchtune (sections with `_component_`)"
    )
