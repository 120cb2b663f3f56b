"""A recipe's model without its weights: its Hugging Face config, its types in memory and its tokenizer."""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

from finetune.errors import UserError
from finetune.models.added_tokens import add_tokens
from finetune.models.checkpoint_files import tensor_names
from finetune.models.damage import check_settings, check_weights, read_object, short
from finetune.recipe.schema import Model, Recipe, Tokens
from finetune.utils import is_from_rust


def model_config(model: Model) -> PretrainedConfig:
    """Returns the Hugging Face config of the trained model: of a multimodal one the text part, or all of it where
    `model.train` is given. Raises UserError."""
    config = base_config(model)
    if model.train is not None:
        from finetune.models.vision import family_of

        family_of(config)
        _tie_as_in_files(model, config)
        return config
    if not config.sub_configs:
        return config
    from finetune.models.text_part import is_multimodal, text_part_of

    if model.config is None:
        part = text_part_of(model)
        return copy.deepcopy(part.text.config) if part else config
    if is_multimodal(config):
        text = config.get_text_config(decoder=True).model_type
        raise UserError(
            f"model.config: {config.model_type!r} has other parts than text, which would never be trained: give its "
            f"text part alone, `model_type: {text}`"
        )
    return config


def _tie_as_in_files(model: Model, config: PretrainedConfig) -> None:
    """Tie the head of a multimodal model where its files do: the default of its class may say otherwise (Mistral 3),
    and then only those ranks would have a head of its own that read the files. Raises UserError."""
    has_head = any(name.endswith("lm_head.weight") for name in tensor_names(model))
    text = config.get_text_config(decoder=True)
    config.tie_word_embeddings = config.tie_word_embeddings and (text.tie_word_embeddings or not has_head)


def base_config(model: Model) -> PretrainedConfig:
    """Returns the Hugging Face config of the recipe's model as it is. Raises UserError where there is none."""
    where = "model.config" if model.config is not None else f"model.name: {model.name!r}"
    with Parsing(f"{where}: no model config", model.name if model.config is None else None):
        if model.config is not None:
            _check_config_keys(model.config)
            return AutoConfig.for_model(**model.config)
        assert model.name is not None
        check_settings(Path(model.name).expanduser())
        return AutoConfig.from_pretrained(
            model.name, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
        )


MAX_LAYERS = 1000


def check_sizes(model: Model, config: PretrainedConfig) -> None:
    """Raises UserError for a `model.config` of which no model can be made, by making one without memory; and for a
    multimodal model whose text part is no model by itself.

    Call it before an engine starts: ZeRO-3 changes how models are made.
    """
    if model.config is None:
        check_weights(Path(model.name or "").expanduser())
        if base_config(model).sub_configs:
            from finetune.models.text_part import check_text_part

            check_text_part(model)
        return
    from finetune.models.weights import without_weights

    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if not 1 <= layers <= MAX_LAYERS:
        raise UserError(f"model.config.num_hidden_layers: expected 1 to {MAX_LAYERS:,}, got {layers:,}")
    try:
        without_weights(config)
    except (RuntimeError, ArithmeticError, AssertionError, AttributeError, LookupError, ValueError, TypeError) as error:
        raise UserError(f"model.config: no model can be made of these sizes: {short(error)}") from error


def training_config(recipe: Recipe) -> PretrainedConfig:
    """Returns the config of the recipe's model as its objective trains it, see `objective.dropout`. Raises
    UserError."""
    config = model_config(recipe.model)
    return without_dropout(config) if recipe.objective.drops_nothing else config


def _check_config_keys(config: dict[str, Any]) -> None:
    """Raises UserError for an unknown key: transformers accepts any, and a misspelt one would train another
    architecture."""
    known = [*AutoConfig.for_model(config["model_type"]).to_dict(), "rope_theta", "rope_scaling"]
    for name in config:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            raise UserError(f"model.config.{name}: not a setting of {config['model_type']}{hint}")


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Returns the config of each layer, where a setting such as `head_dim` differs between them; else the one of
    all."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def length_dependent_rope(config: PretrainedConfig) -> list[str]:
    """Returns the types of RoPE whose frequencies depend on the length of a document: `dynamic`, `longrope`."""
    types = rope_types(getattr(config.get_text_config(), "rope_parameters", None))
    return sorted(name for name in types if depends_on_length(name))


def rope_types(parameters: dict[str, Any] | None) -> set[str]:
    """Returns the types of RoPE in a config's `rope_parameters`, which may be nested by kind of layer."""
    nested = [inner for inner in (parameters or {}).values() if isinstance(inner, dict)]
    return {str(one.get("rope_type")) for one in (parameters or {}, *nested)}


def depends_on_length(rope_type: str) -> bool:
    """Whether a type of RoPE has other frequencies for a long document than for a short one."""
    return "dynamic" in rope_type or rope_type == "longrope"


def check_token_ids(config: PretrainedConfig, tokenizer_size: int, tokens: Tokens | None = None) -> None:
    """Raises UserError where the tokenizer has ids the embedding table does not. tokens: for which it grows."""
    rows = config.get_text_config().vocab_size + (len(tokens.add) if tokens else 0)
    if tokenizer_size > rows:
        raise UserError(
            f"the tokenizer has {tokenizer_size} tokens, the model's embedding {rows} rows: "
            "they do not belong together; check `model.tokenizer` and `model.name` or `model.config.vocab_size`"
        )


_OF_OTHER_HEADS = ("classifier", "summary")


def check_no_dropout(config: PretrainedConfig) -> None:
    """Raises UserError where a model has dropout, for `batch.rows_per_device: auto`: each forward draws again, so its
    number of rows would move the losses."""
    for name, value in active_dropouts(config):
        raise UserError(
            "batch.rows_per_device: dropout is drawn for each forward, so under `auto` losses would depend on the "
            f"hardware (the model's `{name}` is {value}): give a number"
        )


def active_dropouts(config: PretrainedConfig) -> Iterator[tuple[str, float]]:
    """Yields the settings (name, probability) by which a model drops at random."""
    for name, value in config.to_dict().items():
        if not isinstance(value, float) or value <= 0 or name.startswith(_OF_OTHER_HEADS):
            continue
        if "drop" in name or "jitter" in name:
            yield name, value


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Returns a copy of the config by which a model drops nothing at random."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        for name, _ in list(active_dropouts(part)):
            setattr(part, name, 0.0)
    return config


def restore_dropout(config: PretrainedConfig, base: PretrainedConfig) -> None:
    """Give a config the dropout of the one that it was made from by `without_dropout`."""
    for part, of_base in ((config, base), (config.get_text_config(), base.get_text_config())):
        for name, value in active_dropouts(of_base):
            setattr(part, name, value)


@dataclass(frozen=True)
class Dtypes:
    """Types in memory. `compute` is what the matrix products run in."""

    trained: torch.dtype
    frozen: torch.dtype
    compute: torch.dtype


def dtypes(recipe: Recipe) -> Dtypes:
    """Returns the types by `train.precision` and `model.dtype`; see Precision in the README."""
    compute = {"fp32": torch.float32, "fp16": torch.float16}.get(recipe.train.precision, torch.bfloat16)
    trained = torch.bfloat16 if recipe.train.precision == "bf16_true" else torch.float32
    frozen = compute if recipe.model.dtype == "auto" else getattr(torch, recipe.model.dtype)
    return Dtypes(trained=trained, frozen=frozen, compute=compute)


def load_tokenizer(model: Model, tokens: Tokens | None = None) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of `model.tokenizer`, else of `model.name`. Raises UserError where it cannot be loaded or
    is not a fast one.

    Padding never reaches the loss: training rows have none. It is used on the left when generating, so a tokenizer
    without a pad token gets an end token for it, in memory and in the saved result alike. tokens: to add.
    """
    source = model.tokenizer or model.name
    assert source is not None  # the schema wants one of the two
    revision = model.revision if model.tokenizer is None else None
    where = f"{'model.tokenizer' if model.tokenizer else 'model.name'}: no tokenizer from {source!r}"
    with Parsing(where, source):
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision or "main", trust_remote_code=model.trust_remote_code
        )
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            tokenizer("a")  # settings such as `model_max_length` are used here for the first time
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"{source!r} has only a slow tokenizer ({type(tokenizer).__name__}); exact masks need character offsets. "
            "Give `model.tokenizer` a folder with a tokenizer.json"
        )
    if tokenizer.eos_token is None:
        raise UserError(f"the tokenizer of {source!r} has no end token (eos_token): generation would never stop")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokens is not None:
        add_tokens(tokenizer, tokens)
    return tokenizer


def check_same_vocabulary(key: str, name: str | None, tokenizer: PreTrainedTokenizerFast, model: Model) -> None:
    """Raises UserError where the tokenizer of another model, `key: name`, has other tokens or ids than the recipe's.

    name: None where there is no other model.
    """
    if name is None:
        return
    other = load_tokenizer(model.model_copy(update={"name": name, "tokenizer": None, "revision": None}))
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        token = min(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
        raise UserError(
            f"{key}: {name!r} has another vocabulary than the model that is trained, so their log-probabilities cannot "
            f"be compared: {token!r} is id {theirs.get(token)} there and {ours.get(token)} here"
        )


NO_FOLDER = "no such folder; give one, or the id of a model on the hub, as org/name"


def is_missing_folder(name: str) -> bool:
    """Whether the name of a model can only be that of a folder, which is not there."""
    return (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).expanduser().is_dir()


def why_not_found(name: str | None, error: BaseException) -> str | None:
    """Returns why a library found nothing under a model's name; None where it found something, or tried the network."""
    if name is not None and is_missing_folder(name):
        return NO_FOLDER
    if constants.HF_HUB_OFFLINE and isinstance(error.__cause__, LocalEntryNotFoundError):
        return "it is neither a folder here nor in the hub's cache, and nothing is downloaded offline"
    return None


# What libraries raise while they parse settings and tokenizers of another shape than they expect.
_PARSING = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError),
    *(StrictDataclassError, SafetensorError),
)


class Parsing(contextlib.AbstractContextManager[None]):
    """Turns whatever a library raises over a model's settings or tokenizer into a UserError.

    It names the file that is damaged, if the folder is here and one is found; else `what`, such as a place in the
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
        raise UserError(f"{self._what}: {why_not_found(self._name, error) or short(error)}") from error


def read_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a result as it is. Raises UserError if a file of it is damaged."""
    with Parsing(f"{folder}: no tokenizer can be read", str(folder)):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer("a")  # settings such as `model_max_length` are used here for the first time
        return tokenizer


def first_line(error: BaseException) -> str:
    """Returns the first line of a library's message, without its trailing stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
