"""A recipe's base model without its weights: its Hugging Face config, its shapes, and reasons for a failed load."""

from __future__ import annotations

import contextlib
import difflib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.utils import CONFIG_NAME

from finetune.data.media.family_table import part_that_hears
from finetune.errors import UserError
from finetune.models.damage import ADAPTER_CONFIG, check_settings, read_object, short
from finetune.models.remote_code import from_config, load_auto
from finetune.recipe.schema import Model, Recipe
from finetune.utils import is_from_rust


def base_config(model: Model) -> PretrainedConfig:
    """Returns the Hugging Face config of the recipe's model as it is. Raises UserError if there is none."""
    where = "model.config" if model.config is not None else f"model.name: {model.name!r}"
    with Parsing(f"{where}: no model config", model.name if model.config is None else None):
        if model.config is not None:
            # transformers accepts any key, and a misspelt one would train another architecture.
            keys = [*AutoConfig.for_model(model.config["model_type"]).to_dict(), "rope_theta", "rope_scaling"]
            for key in model.config:
                if key not in keys:
                    close = difflib.get_close_matches(key, keys, n=1)
                    remedy = f"write `{close[0]}`" if close else "leave it out"
                    kind = model.config["model_type"]
                    raise UserError(f"model.config.{key}: not a setting of {kind}. Fix: {remedy}")
            return AutoConfig.for_model(**model.config)
        assert model.name is not None
        folder = Path(model.name).expanduser()
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG_NAME).is_file():
            raise UserError(
                f"model.name: {model.name} is an adapter without its base. Fix: merge it (`python -m finetune merge "
                "RUN` for a run of this tool, peft's `merge_and_unload` for others) and name the merged folder"
            )
        check_unpacked("model.name", folder)
        check_settings(folder)
        config = load_auto(AutoConfig, model.name, model.trust_remote_code, revision=model.revision or "main")
        return config if model.train is None else part_that_hears(config)


def check_unpacked(key: str, path: Path) -> None:
    """Raises UserError if a model's path is a GGUF file, or a folder with nothing else to read."""
    packed = [path] if path.is_file() else sorted(path.glob("*.gguf")) if not (path / CONFIG_NAME).exists() else []
    packed = [file for file in packed if file.suffix == ".gguf"]
    if packed:
        raise UserError(
            f"{key}: {packed[0]} is a GGUF file, which cannot be trained. Fix: unpack it once "
            f"(`python -m finetune.unpack {shlex.quote(str(packed[0]))} FOLDER`) and name FOLDER"
        )


def without_weights(
    config: PretrainedConfig, auto: Any = AutoModelForCausalLM, trusted: bool | None = None, **common: Any
) -> Any:
    """Returns a model of shapes alone (device `meta`), not tied. trusted: see `load_auto`; common: arguments of
    transformers' `from_config`."""
    with torch.device("meta"), no_init_weights():
        return from_config(auto, config, trusted, **common)


def rope_types(parameters: dict[str, Any] | None) -> set[str]:
    """Returns the types of RoPE in a config's `rope_parameters`, which may be nested by kind of layer."""
    nested = [inner for inner in (parameters or {}).values() if isinstance(inner, dict)]
    return {str(one.get("rope_type")) for one in (parameters or {}, *nested)}


def depends_on_length(rope_type: str) -> bool:
    """Returns whether a type of RoPE has other frequencies for a long document than for a short one."""
    return "dynamic" in rope_type or rope_type == "longrope"


NO_FOLDER = "no such folder. Fix: give one, or the id of a model on the hub, as org/name"


def is_missing_folder(name: str) -> bool:
    """Returns whether the name of a model can only be that of a folder, which is not there."""
    return (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).expanduser().is_dir()


def not_found_reason(name: str | None, error: BaseException) -> str | None:
    """Returns why no model was found under a name, and the fix; None if the failure has another cause."""
    if name is not None and is_missing_folder(name):
        return NO_FOLDER
    if constants.HF_HUB_OFFLINE and isinstance(error.__cause__, LocalEntryNotFoundError):
        return (
            "it is neither a folder here nor in the hub's cache, and nothing is downloaded offline. Fix: download it "
            "while online, or give a folder"
        )
    return None


# Errors that libraries raise while they parse settings and tokenizers of another shape than they expect.
_PARSING = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError),
    *(StrictDataclassError, SafetensorError),
)


class Parsing(contextlib.AbstractContextManager[None]):
    """Turns whatever a library raises over a model's settings or tokenizer into a UserError.

    It names the file that is damaged, if the folder is here and has one; else `what`, such as a place in the
    recipe. name: of the model, a folder or hub id.
    """

    def __init__(self, what: str, name: str | None):
        self._what, self._name = what, name

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or not (isinstance(error, _PARSING) or is_from_rust(error)):
            return
        if self._name is not None and (folder := Path(self._name).expanduser()).is_dir():
            if (file := folder / "tokenizer.json").is_file():
                read_object(file)
            check_settings(folder)
        remedy = "correct model.config" if self._name is None else "check the name, and that its files are complete"
        reason = not_found_reason(self._name, error) or f"{short(error)}. Fix: {remedy}"
        raise UserError(f"{self._what}: {reason}") from error


def first_line(error: BaseException) -> str:
    """Returns the first line of a library's message, without its trailing stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Returns the config of each layer, if a setting such as `head_dim` differs between them; else that of all."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def head_sizes(config: PretrainedConfig) -> tuple[int, int] | None:
    """Returns the size of an attention head's queries and keys, and that of its values; None if a config has none."""
    size: Any = getattr(config, "head_dim", None)
    if getattr(config, "qk_nope_head_dim", None):  # DeepSeek's multi-head latent attention
        size = config.qk_nope_head_dim + config.qk_rope_head_dim
    elif not size:
        heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
        if not isinstance(heads, int) or not isinstance(hidden, int):
            return None
        size = hidden // heads
    return size, getattr(config, "v_head_dim", None) or size


@dataclass(frozen=True)
class Dtypes:
    """Types in memory. `compute` is the type of the matrix products."""

    trained: torch.dtype
    frozen: torch.dtype
    compute: torch.dtype


def dtypes(recipe: Recipe) -> Dtypes:
    """Returns the types by `train.precision` and `model.dtype`; see Precision in the README."""
    compute = {"fp32": torch.float32, "fp16": torch.float16}.get(recipe.train.precision, torch.bfloat16)
    trained = torch.bfloat16 if recipe.train.precision == "bf16_true" else torch.float32
    frozen = compute if recipe.model.dtype == "auto" else getattr(torch, recipe.model.dtype)
    return Dtypes(trained=trained, frozen=frozen, compute=compute)
