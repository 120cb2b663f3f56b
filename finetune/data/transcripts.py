"""Error rates of transcripts, by the package jiwer.

    reference    Good morning, Ms Lee.      4 words
    heard        good morning miss Lee      4 words differ in "Good", "morning,", "Ms", "Lee."     word error rate 1.00
    normalized   good morning ms lee                          in "ms"                                              0.25

An error is a word that is left out, added or replaced, by the fewest changes; the rate is that of all words of all
references together (https://doi.org/10.21437/Interspeech.2004-668), so it can be above 1. Normalized texts have lower
case and no punctuation of Unicode's categories P. In languages without spaces between words the character error rate
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.errors import UserError

RATES = ("word_error_rate", "normalized_word_error_rate", "character_error_rate")


def check_jiwer() -> Any:
    """Returns the package. Raises UserError if it is missing."""
    try:
        import jiwer  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "word error rates: jiwer is not installed, which counts them. Fix: pip install 'finetune-recipes[audio]', "
            "or jiwer"
        ) from None
    return jiwer


def error_rates(references: Sequence[str], heard: Sequence[str]) -> dict[str, float]:
    """Returns the rates of `RATES`. references, heard: texts, one pair or more. Raises UserError without jiwer.

    A reference without words adds no words, and the words that were heard in its place as errors; of such references
    alone the rate is the number of these words, as jiwer defines it.
    """
    jiwer = check_jiwer()
    blanks = jiwer.SubstituteRegexes({r"\s+": " "})  # lines are words apart, too
    words, characters = jiwer.ReduceToListOfListOfWords(), jiwer.ReduceToListOfListOfChars()
    plain = [jiwer.ToLowerCase(), jiwer.RemovePunctuation()]

    def rate(function: Any, *steps: Any) -> float:
        how = jiwer.Compose(list(steps))
        return float(function(list(references), list(heard), how, how))

    return {
        "word_error_rate": rate(jiwer.wer, blanks, words),
        "normalized_word_error_rate": rate(jiwer.wer, *plain, blanks, words),
        "character_error_rate": rate(jiwer.cer, blanks, jiwer.Strip(), characters),
    }
