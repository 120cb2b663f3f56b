"""The tokenizer of a recipe, and whether it belongs to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast
from transformers.integrations.mistral.constants import is_tekken_vocab_filename
from transformers.utils.hub import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, cached_file

from finetune.errors import UserError
from finetune.models.base_config import Parsing, check_unpacked
from finetune.models.damage import read_object
from finetune.models.remote_code import load_auto
from finetune.recipe.schema import Model, Tokens


def load_tokenizer(model: Model) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of `model.tokenizer`, else of `model.name`. Raises UserError if it cannot be loaded or
    is not a fast one.

    Padding never reaches the loss: training rows have none. It is used on the left when generating, so a tokenizer
    without a pad token gets an end token for it, in memory and in the saved result alike.
    """
    source = model.tokenizer or model.name
    assert source is not None  # the schema wants one of the two
    revision = model.revision if model.tokenizer is None else None
    key = "model.tokenizer" if model.tokenizer else "model.name"
    check_unpacked(key, Path(source).expanduser())
    where = f"{key}: no tokenizer from {source!r}"
    with Parsing(where, source):
        loaded = load_auto(AutoTokenizer, source, model.trust_remote_code, revision=revision or "main")
        tokenizer = _with_specials(loaded)
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            tokenizer("a")  # settings such as `model_max_length` are used here for the first time
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"{source!r} has only a slow tokenizer ({type(tokenizer).__name__}). Exact masks need character offsets. "
            "Fix: give `model.tokenizer` a folder with a tokenizer.json"
        )
    if not tokenizer.chat_template:
        tokenizer.chat_template = _processor_template(source, revision or "main")
    if tokenizer.eos_token is None:
        raise UserError(
            f"the tokenizer of {source!r} has no end token (eos_token). Generation would never stop. Fix: set "
            "`eos_token` in its tokenizer_config.json"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _with_specials(tokenizer: Any) -> Any:
    """Returns a tokenizer made of Mistral's `tekken.json` alone with its special tokens, others as they are."""
    file = getattr(tokenizer, "vocab_file", None) or ""
    if tokenizer.eos_token is not None or not is_tekken_vocab_filename(file):
        return tokenizer
    from transformers.integrations.mistral import convert_tekken_tokenizer  # imports mistral-common, if it is there

    return convert_tekken_tokenizer(file, tokenizer.chat_template or "")


def _processor_template(source: str, revision: str) -> str | None:
    """Returns the chat template that a repository keeps with its processor alone (Qwen3-Omni), None without one. Raises
    UserError for a damaged file."""
    path = cached_file(
        source,
        LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else read_object(Path(path)).get("chat_template")


def check_token_ids(config: PretrainedConfig, tokenizer_size: int, tokens: Tokens | None = None) -> None:
    """Raises UserError if the tokenizer has ids the embedding table does not. tokens: for which it grows."""
    rows = config.get_text_config().vocab_size + (len(tokens.add) if tokens else 0)
    if tokenizer_size > rows:
        raise UserError(
            f"the tokenizer has {tokenizer_size} tokens, the model's embedding {rows} rows. They do not belong "
            "together. Fix: check `model.tokenizer` and `model.name` or `model.config.vocab_size`"
        )


def read_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a result as it is. Raises UserError if a file of it is damaged."""
    with Parsing(f"{folder}: no tokenizer can be read", str(folder)):
        tokenizer = load_auto(AutoTokenizer, folder)
        tokenizer("a")  # settings such as `model_max_length` are used here for the first time
        return tokenizer
