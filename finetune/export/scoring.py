"""What a result with a head of scores needs in addition to weights: its labels, and a padding token.

transformers scores the last token that is not `pad_token_id`. A token that ends documents must not be that one: their
score would be read one token too early.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from finetune.errors import UserError
from finetune.models.damage import read_object
from finetune.models.wrapped import has_scores
from finetune.utils import unwrap_peft

LABELS = "labels.json"  # of an adapter, whose base has none; a `config.json` would make the folder a full model
_LIKELY = ("pad", "reserved", "unused", "unk")  # parts of names of tokens that no document ends with, the best first


def write_score_settings(
    model: Any, tokenizer: PreTrainedTokenizerFast, end_ids: set[int], adapter: bool, folder: Path
) -> None:
    """Set the padding token of model and tokenizer; write an adapter's labels. end_ids: tokens that end a document."""
    assert has_scores(model)
    config = unwrap_peft(model).config
    tokenizer.pad_token = padding_token(tokenizer, end_ids)
    config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if adapter:
        (folder / LABELS).write_text(json.dumps(list(config.id2label.values())) + "\n", encoding="utf-8")


def padding_token(tokenizer: PreTrainedTokenizerFast, end_ids: set[int]) -> str | None:
    """Returns a special token that ends no document: the tokenizer's own if it can be.

    None where there is none: transformers then refuses padded batches, and a single text has no padding.
    """
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    free = {number: text for number, text in added.items() if number not in end_ids and text != tokenizer.eos_token}
    own = [text for text in free.values() if text == tokenizer.pad_token]
    named = [text for part in _LIKELY for text in free.values() if part in text.lower()]
    return next(iter([*own, *named, *free.values()]), None)


def read_labels(adapter: Path) -> tuple[str, ...]:
    """Returns the labels of an adapter's scores. Raises UserError where there are none."""
    try:
        return tuple(json.loads((adapter / LABELS).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{adapter}: an adapter of a sequence classification model without {LABELS}") from None


def is_scoring(folder: Path) -> bool:
    """Returns whether a result, an adapter or a full model, has a head of scores."""
    if (folder / "adapter_config.json").is_file():
        return read_object(folder / "adapter_config.json").get("task_type") == "SEQ_CLS"
    config = read_object(folder / "config.json")
    return any("ForSequenceClassification" in name for name in config.get("architectures") or ())
