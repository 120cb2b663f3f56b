"""Texts and spans as ids and masks, many at a time."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from tokenizers import pre_tokenizers

from finetune.data.chat.encoding import encoder
from finetune.errors import UserError


def test_many_texts_are_encoded_as_each_alone():
    encode = encoder(tiny.tokenizer()).encode
    texts, spans = ["some words", "", "more, and others"], [[(0, 4)], [], [(5, 9), (9, 16)]]
    together = encode(texts, spans)
    alone = [encode([text], [of_text])[0] for text, of_text in zip(texts, spans, strict=True)]
    assert [[part.tolist() for part in one] for one in together] == [[part.tolist() for part in one] for one in alone]
    assert [trained.any() for _, trained in together] == [True, False, True]
    assert encode([], []) == []


def test_a_tokenizer_whose_library_panics_is_told(capfd: pytest.CaptureFixture[str]):
    """Rust's panic is no Exception of Python's, and would end a run without a word of the text."""
    tokenizer: Any = tiny.tokenizer()
    encode = encoder(tokenizer).encode
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.FixedLength(0)
    with pytest.raises(UserError, match=r"fails on the text that begins 'some words': .*tokenizer\.json is damaged"):
        encode(["", "some words"], [[], [(0, 4)]])
    assert "panicked" in capfd.readouterr().err
