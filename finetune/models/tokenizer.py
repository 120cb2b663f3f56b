"""The tokenizer of a recipe, and what its special tokens must satisfy."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from finetune.errors import UserError
from finetune.recipe.schema import Model


def load_tokenizer(model: Model) -> PreTrainedTokenizerFast:
    """From `model.tokenizer`, else from `model.name`. Raises UserError where it cannot be loaded or is not a fast one.

    Padding never reaches the loss: training rows have none. It is used on the left when generating, so a tokenizer
    without a pad token gets an end token for it, in memory and in the saved result alike.
    """
    source = model.tokenizer or model.name
    assert source is not None  # the schema wants one of the two
    revision = model.revision if model.tokenizer is None else None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision or "main", trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        key = "model.tokenizer" if model.tokenizer else "model.name"
        raise UserError(f"{key}: no tokenizer from {source!r}: {first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"{source!r} has only a slow tokenizer ({type(tokenizer).__name__}); exact masks need character offsets. "
            "Give `model.tokenizer` a folder with a tokenizer.json"
        )
    if tokenizer.eos_token is None:
        raise UserError(f"the tokenizer of {source!r} has no end token (eos_token): generation would never stop")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def first_line(error: BaseException) -> str:
    """The first line of a library's message, without its trailing stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
