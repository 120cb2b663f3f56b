"""Scripts and notebooks of Unsloth and TRL: the arguments of their calls, read from the syntax tree. Nothing is run.

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
_OBJECTS = ("model", "tokenizer", "processing_class", "args", "train_dataset", "peft_config")
# TRL's names for arguments of transformers' models and of peft, and the values of peft's that are left out.
_OF_MODEL = {"attn_implementation", "dtype", "torch_dtype", "revision", "trust_remote_code"}
_OF_ADAPTERS = {"target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save", "r": "lora_r"}
_OF_ADAPTERS |= {"task_type": "lora_task_type", "bias": "lora_bias"}
_PEFT_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}


@dataclass
class ScriptValues:
    """Arguments by name, and the code of those that only a run would tell."""

    tool: str
    values: dict[str, Any] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)


def script_values(path: Path) -> ScriptValues:
    """Returns the arguments of the calls that load the model and its adapters and train. Raises UserError."""
    tree = _parsed(_code(path), path)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    is_unsloth = any(_owner(call) in _MODELS for call in calls)
    if not is_unsloth and not any(_trainer(call) for call in calls):
        raise UserError(
            f"{path}: no call of Unsloth's {', '.join(_MODELS)}, or of a trainer of TRL. Fix: give a script or "
            "notebook of these; of other tools the config, or the command line in quotes"
        )
    found, constants = ScriptValues("Unsloth" if is_unsloth else "TRL"), _constants(tree)
    for name, node in _named(calls, is_unsloth):
        code = f"line {node.lineno}: {one_line(ast.unparse(node), 80)}"
        try:
            value = constants[node.id] if isinstance(node, ast.Name) else _literal(node)
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


def _trainer(call: ast.Call) -> str | None:
    """Returns the trainer of TRL that a call makes."""
    name = _name(call).removesuffix("Trainer").lower()
    return name if _name(call).endswith("Trainer") and name in trainers() else None


def _literal(node: ast.expr) -> Any:
    """Returns a literal, and of `torch.bfloat16` the name. Raises ValueError or TypeError."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return node.attr
    return ast.literal_eval(node)


def _named(calls: list[ast.Call], is_unsloth: bool) -> Iterator[tuple[str, ast.expr]]:
    """Yields the arguments of all calls, by the names that the tool has."""
    if is_unsloth:
        for call in calls:
            yield from _arguments(call)
        return
    datasets = [call for call in calls if _name(call) == "load_dataset"]
    for call in calls:
        if call in datasets[1:]:  # for evaluation, by its split
            continue
        names = {"split": "dataset_train_split"} if call in datasets else {}
        yield from ((names.get(name, name), node) for name, node in (*_of_model_and_adapters(call), *_arguments(call)))


def _of_model_and_adapters(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yields the arguments of calls of transformers and peft, and a trainer's model, by the names that TRL has."""
    name, named = _name(call), {one.arg: one.value for one in call.keywords if one.arg is not None}
    if name == "from_pretrained" and _owner(call).startswith("AutoModel"):
        yield from (("model_name_or_path", node) for node in call.args[:1])
        yield from ((key, node) for key, node in named.items() if key in _OF_MODEL)
    elif _trainer(call) and isinstance(named.get("model"), ast.Constant):
        yield "model_name_or_path", named["model"]
    elif name == "BitsAndBytesConfig":
        yield from named.items()
    elif name == "LoraConfig":
        adapters = {_OF_ADAPTERS.get(key, key): node for key, node in named.items()}
        left_out = {"use_peft": True, **{k: value for k, value in _PEFT_DEFAULTS.items() if k not in adapters}}
        yield from ((key, ast.copy_location(ast.Constant(value), call)) for key, value in left_out.items())
        yield from adapters.items()


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
    elif (trainer := _trainer(call)) is not None:
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
