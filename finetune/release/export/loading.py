"""Loads the trained model of a run: a full model, or an adapter on its base."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

from finetune.checkpoints.trained import check_model_folder, is_scoring, read_labels
from finetune.errors import UserError
from finetune.models.added_tokens import grow_to
from finetune.models.base_checkpoint import base_checkpoint
from finetune.models.base_config import Parsing
from finetune.models.base_weights import compute_stored, load_stored
from finetune.models.config import model_config
from finetune.models.damage import check_settings, check_weights, mismatched_sizes, read_object, weights_problem
from finetune.models.lora_targets import names_as_given
from finetune.models.remote_code import load_auto, trusts_code
from finetune.models.score_model import labelled
from finetune.models.stored_config import stored_format
from finetune.models.stored_layers import StoredLinear
from finetune.models.text_part import is_multimodal
from finetune.models.tokenizer import read_tokenizer
from finetune.recipe.schema import Model
from finetune.release.export.merging import FittingAdapter, read_lora


def model_folder(run_dir: Path) -> Path:
    """Returns the result of a run directory, or the folder itself. Raises UserError if there is none."""
    folder = run_dir / "model" if (run_dir / "model").is_dir() else run_dir
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(
            f"{run_dir}: no result here (no model/config.json or model/adapter_config.json). Fix: check the path; if "
            "the run has not finished, run its command again"
        )
    return check_model_folder(folder)


def default_device() -> torch.device:
    """Returns the accelerator of this process, or the CPU if there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def load_result(run_dir: Path) -> tuple[Any, Any]:
    """Returns model and tokenizer of a run directory or a model folder. Raises UserError if there is none."""
    folder = model_folder(run_dir)
    if is_scoring(folder):
        raise UserError(f"{run_dir}: reward models and classifiers do not generate text. Fix: use `finetune score`")
    tokenizer = read_tokenizer(folder)
    model = load_trained(folder)
    if (folder / "generation_config.json").is_file():  # an adapter's model has its base's, with other end tokens
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.to(default_device()).eval(), tokenizer


def load_trained(
    folder: Path,
    base: str | None = None,
    adapter: str = "default",
    device_map: str | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Returns the model of a result: an adapter through peft, under a name, on its base. Raises UserError.

    base: a folder or hub id in place of the adapter's own; device_map: of `from_pretrained`; dtype: of a base that
    stays as it is stored, which cannot be cast; None: that of its config. transformers 5.23 loads
    adapters by itself as well, but not the magnitudes of DoRA, which it initializes again.
    """
    if not (folder / "adapter_config.json").is_file():
        with _LoadingModel(f"{folder} cannot be loaded", folder):
            if (stored := _load_stored(str(folder), None, dtype)) is not None:
                return compute_stored(stored)
            return load_auto(class_of_result(folder), folder, dtype="auto", device_map=device_map)
    from peft import PeftModel

    with warnings.catch_warnings():
        # For patterns that peft 0.21 itself adds for stacked experts, and that do match: it looks for modules only.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        on = _load_base(folder, base, device_map, dtype)
        settings = read_lora(folder)
        with FittingAdapter(folder), _by_layers(settings, on) as config:
            return compute_stored(PeftModel.from_pretrained(on, str(folder), adapter, config=config))


@contextlib.contextmanager
def _by_layers(config: Any, on: Any) -> Iterator[Any]:
    """Yields an adapter's config that names layers where results name their weights (`loadable_targets`): of a base
    that stays as it is stored these are bytes, whose shape peft would take for the layer's. None: it is as it is."""
    weights = [one for one in config.target_parameters or () if one.endswith(".weight")]
    if not weights or not any(isinstance(module, StoredLinear) for module in on.modules()):
        yield None
        return
    config.target_modules = {*config.target_modules, *(one.removesuffix(".weight") for one in weights)}
    config.target_parameters = [one for one in config.target_parameters if one not in weights] or None
    with names_as_given():
        yield config


def auto_class(name: str, trusted: bool | None = None) -> Any:
    """Returns transformers' auto class of a model that generates: another one if it is multimodal. trusted: see
    `load_auto`."""
    return AutoModelForMultimodalLM if is_multimodal(_config_of(name, trusted)) else AutoModelForCausalLM


def _config_of(name: str, trusted: bool | None) -> Any:
    with Parsing(f"{name}: no model config can be read", name):
        return load_auto(AutoConfig, name, trusted)


def class_of_result(folder: Path) -> Any:
    """Returns transformers' auto class of a full model, which may have a head of scores."""
    return AutoModelForSequenceClassification if is_scoring(folder) else auto_class(str(folder))


def _load_stored(
    name: str,
    trusted: bool | None,
    dtype: torch.dtype | None,
    config: Any = None,
    auto: Any = AutoModelForCausalLM,
) -> Any | None:
    """Returns a model that stays as it is stored; None for a plain one, and for formats that only transformers reads.
    config: with a head of scores; None: its own. Raises UserError."""
    config = config or _config_of(name, trusted)
    try:
        if stored_format(config, name) is None:
            return None
    except UserError:
        return None
    about = Model(name=name, trust_remote_code=bool(trusted))
    return load_stored(about, config, dtype or config.dtype or torch.bfloat16, auto)


def _load_base(adapter: Path, base: str | None, device_map: str | None, dtype: torch.dtype | None) -> Any:
    """Returns the base of an adapter, with the head that the adapter is for. Raises UserError."""
    settings = read_object(adapter / "adapter_config.json")
    name = base or settings["base_model_name_or_path"]
    size, trusted = len(read_tokenizer(adapter)), trusts_code(adapter)
    advice = "or name its new place as `base_model_name_or_path` in adapter_config.json"
    with _LoadingModel(f"the adapter's base {name!r} cannot be loaded", Path(name).expanduser(), advice):
        if settings.get("task_type") != "SEQ_CLS":
            if (stored := _load_stored(name, trusted, dtype)) is not None:
                return grow_to(stored, size)
            model = load_auto(auto_class(name, trusted), name, trusted, dtype="auto", device_map=device_map)
            return grow_to(model, size)
        about = Model(name=name, trust_remote_code=trusted)
        config = labelled(model_config(about), read_labels(adapter))
        config.get_text_config().pad_token_id = read_tokenizer(adapter).pad_token_id
        kind = AutoModelForSequenceClassification
        if (stored := _load_stored(name, trusted, dtype, config, kind)) is not None:
            return grow_to(stored, size)
        part = base_checkpoint(about)
        more = {"config": config, "dtype": "auto", "key_mapping": part and part.renames}
        return grow_to(load_auto(kind, name, trusted, **more), size)


class _LoadingModel(contextlib.AbstractContextManager[None]):
    """Turns the errors of transformers for a model that is missing or damaged into a UserError.

    folder: of the model, whose files are checked first if it is here; a hub id is no folder.
    """

    def __init__(self, what: str, folder: Path, advice: str = ""):
        self._what, self._folder, self._advice = what, folder, f", {advice}" if advice else ""
        check_settings(folder)
        check_weights(folder)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, UserError) and not self._folder.exists():  # of a config, which is read first
            raise UserError(f"{self._what}: {error}{self._advice}") from error
        # A name that is neither a folder's nor the hub's is a ValueError.
        if isinstance(error, OSError | ValueError | SafetensorError):
            problem = f"{weights_problem(error)}. Fix: complete its safetensors files{self._advice}"
            raise UserError(f"{self._what}: {problem}") from error
        if isinstance(error, RuntimeError) and mismatched_sizes(error):
            problem = "its weights have other shapes than its config.json says. Fix: take both from one place"
            raise UserError(f"{self._what}: {problem}") from error
