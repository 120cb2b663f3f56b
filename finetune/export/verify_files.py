"""The gate for files: an export has those that were written, and no other; each is what the run or the base has.

Files that servers read beside the weights are compared as a whole: tokenizer, chat templates, generation config,
processors, code. config.json may differ in few keys, each with the value that training gave it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from finetune.errors import UserError
from finetune.export.figures import Figures
from finetune.export.formats import EIGHT_BITS
from finetune.export.gguf_file import gguf_of
from finetune.export.gguf_settings import open_gguf, package
from finetune.export.gguf_tokenizer import add_tokenizer
from finetune.export.hf_folder import COPIED, METADATA, PROGRESS, describe, settings_files
from finetune.export.scoring import LABELS
from finetune.export.streamed import StreamedModel
from finetune.export.tensor_files import TensorFiles
from finetune.export.trained import ADAPTER, Trained
from finetune.export.verify_settings import read_settings
from finetune.export.weight_files import INDEX, shard_name
from finetune.models.base_config import first_line

VERIFY = "verify.json"
_ALWAYS = {"README.md", METADATA, VERIFY}
# What says nothing of how a model or a tokenizer acts.
_INERT = {"transformers_version", "_name_or_path", "name_or_path", "_from_model_config", "is_local", "local_files_only"}
_OF_BASE = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "vocab_size")  # in config.json


def compare_files(figures: Figures, trained: Trained, written: StreamedModel, export: Path) -> None:
    """Compare all files of an export but the tensors. Raises UserError if one cannot be read."""
    about = export / METADATA
    if about.is_file():
        figures.problems += _other_metadata(read_settings(about), written)
    if (file := gguf_of(export)) is not None:
        allowed = {file.name, "Modelfile"}
        figures.problems += _other_fields(file, trained.settings) if about.is_file() else []
    else:
        ours = files_beside_weights(trained.settings)
        compare_each(figures, ours, export)
        base = written.base.folder if written.base else None  # whose code and settings of processors are copied
        copied = {path.name: path for pattern in COPIED for path in sorted(base.glob(pattern))} if base else {}
        sees = trained.recipe is not None and trained.recipe.model.train is not None
        needs = about.is_file() and (trained.is_adapter or written.part is not None) and not written.is_scoring
        if not sees:  # else by the run's own bounds (verify_settings.py)
            compare_each(figures, {n: p for n, p in copied.items() if needs or (export / n).is_file()}, export)
        weights = _weight_files(figures, export)
        _compare_config(figures, trained, written, export)
        allowed = {*ours, *copied, *weights, "config.json", *(COPIED if sees else ())}
    _compare_names(figures, export, allowed)


def compare_adapter(figures: Figures, trained: Trained, export: Path) -> None:
    """Compare a folder of an adapter with the adapter that a run has trained. Raises UserError for another result."""
    if trained.is_checkpoint or not trained.is_adapter:
        raise UserError(f"{export}: an adapter, and {trained.run_dir} has no adapter as its result to compare it with")
    settings = [read_settings(folder / "adapter_config.json") for folder in (export, trained.folder)]
    free = frozenset({"base_model_name_or_path", "revision"})  # of the copy that is on the hub
    figures.problems += other_keys("adapter_config.json", settings[1], settings[0], free)
    ours = files_beside_weights(trained.settings)
    if (trained.folder / LABELS).is_file():
        ours[LABELS] = trained.folder / LABELS
    compare_each(figures, ours, export)
    _compare_names(figures, export, {*ours, "adapter_config.json", ADAPTER})
    if not (export / ADAPTER).is_file():
        figures.problems.append(f"{ADAPTER} is missing")
        return
    tensors = TensorFiles([export / ADAPTER])
    for name in sorted({*tensors.names()} ^ {*trained.shapes}):
        figures.problems.append(f"{ADAPTER}: {name} is {'not in the run' if name in tensors else 'missing'}")
        return
    for name in tensors.names():
        one, other = tensors.read(name), trained.read(name)
        if one.dtype != other.dtype or one.shape != other.shape or not one.equal(other):
            figures.problems.append(f"{ADAPTER}: {name} is not the run's")
            return
        figures.tensors += 1


def files_beside_weights(settings: Path) -> dict[str, Path]:
    """Returns tokenizer, templates and generation config of a folder, by their paths in it."""
    return {path.relative_to(settings).as_posix(): path for path in settings_files(settings)}


def compare_each(figures: Figures, ours: Mapping[str, Path], export: Path) -> None:
    for name, path in ours.items():
        if not (export / name).is_file():
            figures.problems.append(f"{name} is missing")
        elif not name.endswith(".json"):
            if path.read_bytes() != (export / name).read_bytes():
                figures.problems.append(f"{name} is not the run's")
        elif path.read_bytes() != (export / name).read_bytes():
            figures.problems += other_keys(name, _content(path), _content(export / name))


def _content(file: Path) -> dict[str, Any]:
    settings = read_settings(file)
    if file.name != "generation_config.json":
        return settings
    settings = GenerationConfig(**settings).to_dict()
    ends = settings["eos_token_id"]
    return {**settings, "eos_token_id": sorted({*ends}) if isinstance(ends, list) else [ends]}


def other_keys(
    file: str, ours: dict[str, Any], theirs: dict[str, Any], free: frozenset[str] = frozenset()
) -> list[str]:
    """Returns the first three keys that differ, with both values, each cut to what fits a line."""
    keys = [k for k in sorted(ours.keys() | theirs.keys()) if ours.get(k) != theirs.get(k) and k not in _INERT | free]
    return [f"{file}: {key} is {_cut(theirs.get(key))}, and {_cut(ours.get(key))} in the run" for key in keys[:3]]


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _weight_files(figures: Figures, export: Path) -> set[str]:
    """Returns the names of weight files, and of their index, as transformers finds them."""
    index, held = export / INDEX, sorted(path.name for path in export.glob("*.safetensors"))
    if held == [shard_name(1, 1)]:
        if index.is_file():
            figures.problems.append(f"{INDEX}: unexpected beside {held[0]}, which has all tensors")
        return {*held, INDEX}
    numbered = [shard_name(number, len(held)) for number in range(1, len(held) + 1)]
    if held != numbered or not index.is_file():
        expected = f"{numbered[0]}, ... and {INDEX}" if numbered else shard_name(1, 1)
        figures.problems.append(f"weights: {', '.join(held[:3]) or 'no file'}: expected {expected}")
        return {*held, INDEX}
    places = read_settings(index).get("weight_map", {})
    real = {name: file for file in held for name in TensorFiles([export / file]).names()}
    if sum(len(TensorFiles([export / file]).names()) for file in held) != len(real):
        figures.problems.append("weights: two files have a tensor of the same name")
    if places != real:
        name = min({*places.items()} ^ {*real.items()})[0]
        figures.problems.append(f"{INDEX}: {name} is in {places.get(name)}, and the files have it in {real.get(name)}")
    return {*held, INDEX}


def _compare_names(figures: Figures, export: Path, allowed: set[str]) -> None:
    """Report files that export does not write, and links."""
    allowed |= _ALWAYS | ({PROGRESS} if export.name.endswith(".partial") else set())
    for path in sorted(export.rglob("*")):
        name = path.relative_to(export).as_posix()
        if path.is_symlink():
            figures.problems.append(f"{name}: a link; an export has files alone")
        elif not path.is_dir() and name not in allowed:
            figures.problems.append(f"{name}: unexpected file: it was not written by the export; remove it")


def _compare_config(figures: Figures, trained: Trained, written: StreamedModel, export: Path) -> None:
    """Compare what config.json says besides how the model computes: its class, special tokens, rows, tying, type."""
    theirs = read_settings(export / "config.json")
    if (named := theirs.get("architectures") or []) != [kind := type(written.model).__name__] and (
        written.base is None or named != (read_settings(written.base.folder / "config.json").get("architectures") or [])
    ):
        figures.problems.append(f"config.json: architectures is {named}, and [{kind!r}] in the run")
    types = {part.get(key) for part in (theirs, theirs.get("text_config") or {}) for key in ("dtype", "torch_dtype")}
    if other := sorted(str(one) for one in types - {None, figures.dtype}):
        figures.problems.append(f"config.json: dtype is {other[0]}, and the weights are {figures.dtype}")
    if "quantization_config" in theirs and figures.format not in EIGHT_BITS:
        figures.problems.append("config.json: quantization_config is there, and the weights are not quantized")
    if written.base is None or (written.is_scoring and trained.is_adapter):
        return
    source = read_settings(written.base.folder / "config.json")
    if source.get("model_type") != theirs.get("model_type"):
        return
    ours, others = (_with_defaults(folder) for folder in (written.base.folder, export))
    for section in ("", "text_config"):
        for key in _OF_BASE:
            one, other = ((c.get(section) or {} if section else c).get(key) for c in (ours, others))
            grown = key == "vocab_size" and written.added_rows is not None and one is not None
            untied = key == "tie_word_embeddings" and written.unties
            one = written.added_rows if grown else False if untied and one is not None else one
            if one != other and not (key == "pad_token_id" and written.is_scoring):
                figures.problems.append(f"config.json: {key} is {other}, and {one} in the run")


def _with_defaults(folder: Path) -> dict[str, Any]:
    """Returns config.json with the defaults of its class; of a class that is code, which is not run here, as it is."""
    settings = read_settings(folder / "config.json")
    if "auto_map" in settings:
        return settings
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / 'config.json'}: transformers makes no model by it: {first_line(error)}") from None


def _other_metadata(about: dict[str, Any], written: StreamedModel) -> list[str]:
    """Returns how export.json differs from what the run's would say, but for versions, places and the format."""
    free = {"versions", "dtype", "quantised"}
    ours = {key: value for key, value in describe(written).items() if key not in free}
    theirs = {key: value for key, value in about.items() if key not in free}
    for one in (ours, theirs):
        if isinstance(one.get("base"), dict):
            one["base"] = one["base"].get("tensors")
    return other_keys(METADATA, ours, theirs)


def _other_fields(file: Path, settings: Path) -> list[str]:
    """Returns how what a GGUF file says of its tokenizer and template differs from what the export writes."""
    gguf, fields = package(), open_gguf(file).fields
    writer = gguf.GGUFWriter(None, "llama")
    add_tokenizer(writer, gguf, settings, len(fields["tokenizer.ggml.tokens"].data))
    ours = {key: value.value for key, value in writer.kv_data[0].items() if key.startswith("tokenizer.")}
    theirs = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    ours = {
        key: [int(v) if isinstance(v, int) else v for v in one] if isinstance(one, list) else one
        for key, one in ours.items()
    }
    return other_keys(file.name, ours, theirs)
