"""Unsloth's scripts and notebooks: the arguments of their calls, read from the syntax tree. Nothing is run.

Literals are values, and so are names that are assigned one literal, once; all else is named as computed.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.desk.setup.foreign_command import COMMAND
from finetune.desk.setup.foreign_trl import trainers
from finetune.desk.setup.foreign_values import MAX_BYTES, MAX_TABLE_BYTES, one_line, read_bounded
from finetune.errors import UserError

SUFFIXES = (".py", ".ipynb")
_MODELS = ("FastLanguageModel", "FastModel", "FastVisionModel")
_FILES_OF = ("json", "csv", "parquet", "text")  # names that `load_dataset` takes with `data_files`
# Arguments of trainers that are objects of the script; what they were made of is read at the calls that made them.
_OBJECTS = ("model", "tokenizer", "processing_class", "args", "train_dataset")


@dataclass
class ScriptValues:
    """Arguments by name, and the code of those that only a run would tell."""

    values: dict[str, Any] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)


def script_values(path: Path) -> ScriptValues:
    """Returns the arguments of the calls that load the model and its adapters and train. Raises UserError."""
    tree = _parsed(_code(path), path)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    if not any(_owner(call) in _MODELS for call in calls):
        raise UserError(
            f"{path}: no call of Unsloth's {', '.join(_MODELS)}. Fix: give a script or notebook of Unsloth; of other "
            "tools the config, or the command line in quotes"
        )
    found, constants = ScriptValues(), _constants(tree)
    for call in calls:
        for name, node in _arguments(call):
            code = f"line {node.lineno}: {one_line(ast.unparse(node), 80)}"
            try:
                value = constants[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)
            except (KeyError, ValueError, TypeError):
                found.computed[name] = code
            else:
                found.values[name] = value
                found.computed.pop(name, None)
    found.values |= {name: True for call in calls if (name := _name(call)) == "train_on_responses_only"}
    _read_datasets(found)
    return found


def _code(path: Path) -> str:
    """Returns the Python of a script, or of a notebook's cells without the lines of IPython. Raises UserError."""
    if path.suffix != ".ipynb":
        return read_bounded(path, MAX_BYTES)
    try:
        cells = json.loads(read_bounded(path, MAX_TABLE_BYTES))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: not a notebook. Fix: save it again as .ipynb, or export it as .py") from None
    return re.sub(r"(?m)^([ \t]*)[!%].*$", r"\1pass", "\n".join(sources))


def _parsed(code: str, path: Path) -> ast.Module:
    try:
        return ast.parse(code)
    except SyntaxError as error:
        place = path if path.suffix == ".ipynb" else f"{path}:{error.lineno}"
        raise UserError(f"{place}: not valid Python: {error.msg}. Fix: correct the line, or leave it out") from None
    except (ValueError, RecursionError, MemoryError):
        raise UserError(f"{path}: Python that cannot be read. Fix: give the script alone") from None


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Returns names that are assigned once in the whole script, by a literal."""
    stored = Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    )
    stored.update(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))
    constants: dict[str, Any] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Name) and stored[target.id] == 1:
            with contextlib.suppress(ValueError, TypeError):
                constants[target.id] = ast.literal_eval(node.value)
    return constants


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _owner(call: ast.Call) -> str:
    """Returns the name before the point: FastLanguageModel of FastLanguageModel.from_pretrained."""
    value = call.func.value if isinstance(call.func, ast.Attribute) else None
    return value.id if isinstance(value, ast.Name) else ""


def _arguments(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yields the arguments of a call that decide about the training, by the names that Unsloth and TRL have."""
    name = _name(call)
    named = [(one.arg, one.value) for one in call.keywords if one.arg is not None]
    if _owner(call) in _MODELS and name in ("from_pretrained", "get_peft_model"):
        if name == "from_pretrained" and call.args:
            yield "model_name", call.args[0]
        yield from named
    elif name == "load_dataset":
        yield from zip(("dataset_name", "dataset_config"), call.args, strict=False)
        names = {"path": "dataset_name", "name": "dataset_config"}
        yield from ((names.get(one, one), value) for one, value in named)
    elif name == "get_chat_template":
        yield from ((one, value) for one, value in named if one == "chat_template")
    elif name.endswith("Trainer") and (trainer := name.removesuffix("Trainer").lower()) in trainers():
        yield COMMAND, ast.copy_location(ast.Constant(trainer), call)
        yield from ((one, value) for one, value in named if one not in _OBJECTS)
    elif name == "TrainingArguments" or name.removesuffix("Config").lower() in trainers():
        yield from named


def _read_datasets(found: ScriptValues) -> None:
    """Turns `load_dataset("json", data_files="rows.jsonl")` into the file."""
    files = found.values.get("data_files")
    if found.values.get("dataset_name") in _FILES_OF:
        del found.values["dataset_name"]
        if isinstance(files, dict) and "train" in files:
            files = files["train"]
        if isinstance(files, str | list):
            found.values["dataset_name"] = files
            del found.values["data_files"]
