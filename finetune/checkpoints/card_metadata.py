"""The YAML block at the top of a model card, read and changed without the rest of the card; imports nothing heavy."""

from __future__ import annotations

import re
from typing import Any

import yaml

from finetune.errors import UserError


def card_metadata(card: str) -> tuple[dict[str, Any], str]:
    """Returns a card's metadata, and the text after it. Raises UserError if the metadata is no YAML."""
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    if match is None:
        return {}, card
    try:
        metadata = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 2})" if mark is not None else ""
        raise UserError(f"README.md of the model: its metadata is no YAML{line}. Fix: correct it") from None
    return metadata if isinstance(metadata, dict) else {}, card[match.end() :]


def with_metadata(card: str, values: dict[str, Any]) -> str:
    """Returns the card with other values of these keys; one without metadata as it is."""
    metadata, text = card_metadata(card)
    return f"---\n{yaml.safe_dump(metadata | values, sort_keys=False)}---\n{text}" if metadata else card
