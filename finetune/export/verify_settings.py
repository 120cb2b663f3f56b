"""The gate for what stands beside the weights: the settings by which a model computes, and by which servers answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from finetune.errors import UserError
from finetune.export.figures import Figures
from finetune.export.gguf_file import gguf_of, modelfile
from finetune.export.gguf_settings import is_written, other_settings, rope_of
from finetune.export.gguf_tokenizer import other_tokens
from finetune.export.hf_folder import METADATA
from finetune.export.quantised import settings_of
from finetune.export.trained import Trained
from finetune.export.verify_models import model_of
from finetune.models.base_config import base_config, first_line
from finetune.models.config import model_config
from finetune.models.remote_code import load_auto
from finetune.models.score_model import labelled
from finetune.models.vision import processor_settings
from finetune.objectives import score_labels
from finetune.recipe import Recipe

# What an export may have otherwise than the base.
_FREE = {"dtype", "torch_dtype", "tie_word_embeddings", "vocab_size", "use_cache", "architectures", "_name_or_path"}
_FREE |= {"quantization_config", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "name_or_path"}


def compare_settings(figures: Figures, recipe: Recipe, trained: Trained, base: str | None, export: Path) -> Any:
    """Compare the settings of an export with those of the run; returns the config of the run's model, of a GGUF file's
    that of its text part. Raises UserError for a config that is none."""
    file = gguf_of(export)
    config = _run_config(recipe, base, file is not None)
    if file is not None:
        if is_written(config):
            whole = base_config(model_of(recipe, base)) if recipe.model.config is None else None
            figures.problems += other_settings(config, whole, file)
        else:
            _compare_values(figures, str(file), *_as_transformers_reads(config, file))
        figures.problems += other_tokens(trained.settings, file)
        compare_modelfile(figures, trained, export, file)
        return config
    _compare_values(figures, "config.json", _computing(config), _computing(_config_of(export)))
    _compare_quantisation(figures, export)
    if recipe.data.image is not None:
        _compare_processors(figures, recipe, base, export)
    return config


def read_settings(file: Path) -> dict[str, Any]:
    """Returns a JSON file of settings. Raises UserError for another one."""
    try:
        settings = json.loads(file.read_bytes())
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise UserError(f"{file}: not a JSON object: was it copied whole?")
    return settings


def _run_config(recipe: Recipe, base: str | None, text_alone: bool) -> Any:
    model = model_of(recipe, base)
    if labels := score_labels(recipe.objective):  # its result is a text model also of a multimodal base
        return labelled(model_config(model), labels)
    if text_alone:
        return model_config(model.model_copy(update={"train": None}))
    return model_config(model) if model.config is not None else base_config(model)


def _config_of(export: Path) -> Any:
    try:
        return load_auto(AutoConfig, export)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise UserError(f"{export / 'config.json'}: transformers makes no model by it: {first_line(error)}") from None


def _compare_values(figures: Figures, name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            figures.problems.append(f"{name}: {key} is {theirs.get(key)}, and {ours.get(key)} in the run")


# What transformers reads from a GGUF file; the rest it takes from the class.
_IN_GGUF = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")


def _as_transformers_reads(config: Any, file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the run's settings and a file's, of an architecture that is not written here: another tool made it."""
    theirs = load_auto(AutoConfig, file.parent, gguf_file=file.name)
    found = [{key: getattr(one, key, None) for key in _IN_GGUF} for one in (config, theirs)]
    for one, values in zip((config, theirs), found, strict=True):
        values["rope_theta"] = rope_of(one).get("rope_theta")
        values["rms_norm_eps"] = values["rms_norm_eps"] and round(values["rms_norm_eps"], 9)  # fp32 in the file
    return found[0], found[1]


def _computing(config: Any) -> dict[str, Any]:
    """Returns what decides how a model computes."""

    def chosen(settings: dict[str, Any]) -> dict[str, Any]:
        return {
            key: chosen(value) if key.endswith("_config") and isinstance(value, dict) else value
            for key, value in settings.items()
            if key not in _FREE
        }

    return chosen(config.to_dict())


def _compare_quantisation(figures: Figures, export: Path) -> None:
    """Compare what config.json says of eight bits with what `--quantize` writes, but for the layers that it leaves."""
    if not rounded_here(export):
        return
    stated = read_settings(export / "config.json")["quantization_config"]
    ours = settings_of(figures.format, stated.get("ignore", []))
    _compare_values(figures, "config.json, quantization_config", ours, stated)


def rounded_here(export: Path) -> bool:
    """Returns whether `--quantize` wrote an export."""
    return (export / METADATA).is_file() and bool(read_settings(export / METADATA).get("quantised"))


def _compare_processors(figures: Figures, recipe: Recipe, base: str | None, export: Path) -> None:
    """Compare the settings of the processors, of a run on images, with those of the run."""
    assert recipe.data.image is not None
    for name, content in processor_settings(model_of(recipe, base), recipe.data.image).items():
        if not (export / name).is_file():
            figures.problems.append(f"{name} is missing: images would be seen by other settings")
            continue
        _compare_values(figures, name, json.loads(content), read_settings(export / name))


def compare_modelfile(figures: Figures, trained: Trained, export: Path, file: Path) -> None:
    """Compare what Ollama is told beside the file: the ends of an answer, and nothing that changes one."""
    if not (path := export / "Modelfile").is_file():
        return
    said = {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
    expected = set(modelfile(trained, file.name).splitlines())
    figures.problems += [f"{path}: has no line {line!r}" for line in sorted(expected - said)]
    free = ("#", "LICENSE ", "PARAMETER num_ctx ")
    others = sorted(line for line in said - expected if line and not line.startswith(free))
    figures.problems += [f"{path}: {line!r} is not of the run" for line in others[:1]]
