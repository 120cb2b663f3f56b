"""Damaged files of a model folder: the file, the problem and the remedy, in one line.

Libraries raise almost anything for them: a KeyError for an index without its map, Rust's panic for a tokenizer. So a
folder's small files and the headers of its weights are read here first; values are read by the library alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from finetune.errors import UserError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SETTINGS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", ADAPTER_CONFIG),
)
_REAL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_RESTORE = "copy or download the file again"


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file of a model. Raises UserError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}. Fix: check the file and its permissions") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: damaged: it is not UTF-8 text. Fix: {_RESTORE}") from None
    except json.JSONDecodeError as error:
        problem = "it is empty" if not error.doc.strip() else f"not valid JSON: {error}"
        raise UserError(f"{file}: damaged: {problem}. Fix: {_RESTORE}") from None
    except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
        raise UserError(f"{file}: damaged: JSON nested too deeply, or numbers too long. Fix: {_RESTORE}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a JSON object, got {type(content).__name__}. Fix: {_RESTORE}")
    return content


def check_settings(folder: Path) -> None:
    """Raises UserError for settings in a folder that are no JSON objects, or whose token ids are not numbers: for those
    of generation transformers raises no error, and answers would not end. A folder that is not here is not checked."""
    for file in [file for name in _SETTINGS if (file := folder / name).is_file()]:
        for key, value in read_object(file).items():
            values = value if isinstance(value, list) else [value]
            if key.endswith("_token_id") and not all(one is None or type(one) is int for one in values):
                raise UserError(
                    f"{file}: `{key}` is {value!r}, not a token id or a list of them. Fix: set it to a token id, a "
                    "list of them, or null"
                )
            if file.name == "generation_config.json" and key in _REAL and not isinstance(value, int | float | None):
                raise UserError(f"{file}: `{key}` is {value!r}, not a number. Fix: set it to a number")
            if key == "num_hidden_layers" and not (type(value) is int and value > 0):
                raise UserError(
                    f"{file}: `{key}` is {value!r}, not a number of layers. Fix: set it to the number of layers"
                )


def check_weights(folder: Path) -> None:
    """Raises UserError for weights in a folder that no library would read whole: by index and headers alone.

    A folder that is not here, or has no weights of any kind, is left to the library.
    """
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file() and not (folder / SAFE_WEIGHTS_NAME).is_file():
        files = sorted({folder / name for name in weight_map(index).values()})
    else:
        files = [file for name in (SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS) if (file := folder / name).is_file()]
    for file in files:
        check_tensors(file)
    others = ("training_args", "optimizer", "scheduler", "rng_state")
    pickles = [file.name for pattern in _PICKLES for file in sorted(folder.glob(pattern))]
    pickles = [name for name in pickles if not name.startswith(others)]
    if not files and pickles:
        raise UserError(
            f"{folder / pickles[0]}: the weights are in a pickle, which can run any program. Only safetensors are "
            "read. Fix: take the model's safetensors files, or convert the pickle on a machine that may run it"
        )


def weight_map(index: Path, whole: bool = True) -> dict[str, str]:
    """Returns the file of each tensor, by an index. Raises UserError unless they are next to it, if `whole`: those of
    the hub may be downloaded later."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{index}: has no `weight_map` from tensors to files. Fix: {_RESTORE}")
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise UserError(f"{index}: names {name!r}, which is not a file of this folder. Fix: {_RESTORE}")
        if whole and not (index.parent / name).is_file():
            raise UserError(f"{index}: names {name}, which is missing. Fix: complete the folder, or download it again")
    return places


def check_tensors(file: Path) -> None:
    """Raises UserError for a safetensors file whose header is damaged, or does not cover its bytes exactly."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read: {error.strerror or error}. Fix: check the file and its permissions"
        ) from None
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        size = f"{file.stat().st_size:,} bytes"
        raise UserError(f"{file}: damaged or incomplete ({size}; {reason[:200]}). Fix: {_RESTORE}") from None


def weights_problem(error: BaseException) -> str:
    """Returns the first line of a library's message, which advises to load pickles if there are no safetensors."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    pickled = "it has no safetensors files; pickles can run any program and are not read"
    return pickled if "safetensors" in text else text


def mismatched_sizes(error: RuntimeError) -> bool:
    """Returns whether transformers or peft has refused weights of other shapes than the config's."""
    return "ignore_mismatched_sizes" in str(error) or "size mismatch" in str(error)


def short(error: BaseException) -> str:
    """Returns a library's message in one line, without the stop."""
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
