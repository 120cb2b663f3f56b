"""Error rates of transcripts are those of a plain edit distance over all pairs together."""

from __future__ import annotations

import random
import string
import sys

import pytest

from finetune.data.transcripts import RATES, error_rates
from finetune.errors import UserError


def edits(one: list[str] | str, other: list[str] | str) -> int:
    """Levenshtein's distance, by its recurrence."""
    before = list(range(len(other) + 1))
    for i, left in enumerate(one, start=1):
        row = [i]
        for j, right in enumerate(other, start=1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (left != right)))
        before = row
    return before[-1]


def plain(text: str) -> str:
    return "".join(c for c in text.lower() if c not in string.punctuation)


def test_rates_are_edits_over_all_that_was_said() -> None:
    pytest.importorskip("jiwer")
    rng = random.Random(0)
    words = ["So", "so", "it", "it,", "rains.", "snows", "日本", "don't", "-"]
    said = [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(40)]
    heard = [" ".join(rng.choices(words, k=rng.randint(0, 9))) for _ in range(40)]
    said[3], heard[3] = "two\nlines  here", " two lines here\n"
    found = error_rates(said, heard)
    assert tuple(found) == RATES
    for name, spoken in (("word_error_rate", str), ("normalized_word_error_rate", plain)):
        pairs = [(spoken(a).split(), spoken(b).split()) for a, b in zip(said, heard, strict=True)]
        assert found[name] == sum(edits(*pair) for pair in pairs) / sum(len(a) for a, _ in pairs)
    pairs = [(" ".join(a.split()), " ".join(b.split())) for a, b in zip(said, heard, strict=True)]
    assert found["character_error_rate"] == sum(edits(*pair) for pair in pairs) / sum(len(a) for a, _ in pairs)


def test_the_docstring_s_example_and_silence() -> None:
    pytest.importorskip("jiwer")
    rates = error_rates(["Good morning, Ms Lee."], ["good morning miss Lee"])
    assert (rates["word_error_rate"], rates["normalized_word_error_rate"]) == (1.0, 0.25)
    assert error_rates([""], [""]) == dict.fromkeys(RATES, 0.0)
    assert error_rates(["", "a b"], ["c", "a b"])["word_error_rate"] == 0.5


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(UserError, match=r"jiwer is not installed.*pip install 'finetune-recipes\[audio\]'"):
        error_rates(["a"], ["a"])
