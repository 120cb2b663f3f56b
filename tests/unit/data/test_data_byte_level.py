"""Tokens placed by their bytes: the same ids and masks as by the tokenizer's offsets, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import tiny
from data_helpers import byte_level as made_tokenizer
from data_helpers import family_template, sentencepiece_like, word_level
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune.data.chat.encoding import TRIED, ByteLevel, Encoder, Tokens, byte_level, encoder
from finetune.data.chat.renderer import build_renderer
from finetune.errors import UserError

from .test_data_mask_properties import LETTERS, MARKERS, SPACES, conversations
from .test_data_templates import CONVERSATIONS, FAMILIES

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
LLAMA3_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_LIKE = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


def changed(change: Callable[[Any], None], **options: Any) -> PreTrainedTokenizerFast:
    """The tests' byte-level tokenizer with another part."""
    backend = Tokenizer.from_str(made_tokenizer(SPECIALS, **options).backend_tokenizer.to_str())
    change(backend)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def with_part(name: str, part: Any, **options: Any) -> PreTrainedTokenizerFast:
    return changed(lambda backend: setattr(backend, name, part), **options)


PLACED: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "as it is": lambda: made_tokenizer(SPECIALS),
    "added words": lambda: made_tokenizer(SPECIALS, words=("<think>", "\n\n", "é漢", "  ", " four")),
    "NFC": lambda: with_part("normalizer", normalizers.NFC()),
    "NFC, added words": lambda: with_part("normalizer", normalizers.NFC(), words=("e\u0301", "four")),
    "no normalizer, as a list": lambda: with_part("normalizer", normalizers.Sequence([])),
    "words of Llama 3": lambda: with_part("pre_tokenizer", QWEN_LIKE),
    "digits": lambda: with_part(
        "pre_tokenizer",
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "one word": lambda: with_part("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "white space left out": lambda: with_part(
        "pre_tokenizer",
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "a BOS before plain text": lambda: made_tokenizer(SPECIALS, adds_bos=True, bos_token="<s>"),
}


def _unknown(backend: Any) -> None:
    backend.model = models.BPE({"<unk>": 0, "a": 1, "b": 2, "c": 3}, [], unk_token="<unk>")


def _prefixed(backend: Any) -> None:
    backend.model = models.BPE({"a": 0, "##b": 1, "c": 2}, [], continuing_subword_prefix="##")


NOT_PLACED: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "offsets without white space": lambda: made_tokenizer(SPECIALS, trim_offsets=True),
    "a space before each text": lambda: with_part("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "two spellings in bytes": lambda: with_part(
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False) for _ in range(2)]),
    ),
    "a metaspace": lambda: with_part(
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    ),
    "no bytes": lambda: with_part("pre_tokenizer", pre_tokenizers.Whitespace()),
    "no pre-tokenizer": lambda: word_level({"?": 0, "a": 1}, ["<s>"]),
    "SentencePiece": lambda: sentencepiece_like("{{ messages }}"),
    "lower case": lambda: with_part("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
    "unknown letters": lambda: changed(_unknown),
    "marked parts of words": lambda: changed(_prefixed),
    "tokens that swallow white space": lambda: made_tokenizer(SPECIALS[:2], greedy=("<|end|>",)),
    "and before them": lambda: changed(lambda one: one.add_special_tokens([AddedToken("<mask>", lstrip=True)])),
}


@lru_cache
def encoder_of(name: str) -> Encoder:
    return encoder(PLACED[name]())


def as_lists(found: list[Tokens]) -> list[tuple[list[int], list[bool]]]:
    return [(ids.tolist(), trained.tolist()) for ids, trained in found]


def by_offsets(made: Encoder, texts: list[str], spans: list[list[tuple[int, int]]]) -> list[Tokens]:
    return replace(made, byte_level=None).encode(texts, spans)


@st.composite
def text_and_spans(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]]]:
    """Spans ascend and do not overlap, as those of turns do; their borders are anywhere, or between two pieces."""
    piece = st.sampled_from([*SPECIALS, *MARKERS, *SPACES, *LETTERS]) | st.characters(codec="utf-8")
    pieces = draw(st.lists(piece, max_size=12))
    text = "".join(pieces)
    between = [len("".join(pieces[:i])) for i in range(len(pieces) + 1)]
    borders = sorted(draw(st.lists(st.integers(0, len(text)) | st.sampled_from(between), max_size=6)))
    return text, list(zip(borders[::2], borders[1::2], strict=False))


@settings(max_examples=200, derandomize=True, database=None)
@given(st.lists(text_and_spans(), min_size=1, max_size=4), st.sampled_from(sorted(PLACED)))
def test_ids_and_masks_are_those_of_offsets(rows: list[Any], name: str):
    texts, spans = [text for text, _ in rows], [spans for _, spans in rows]
    made = encoder_of(name)
    wanted = by_offsets(made, texts, spans)
    assert as_lists(made.encode(texts, spans)) == as_lists(wanted)
    assert made.byte_level is not None
    for placed, one in zip(made.byte_level.place(texts, spans), wanted, strict=True):
        assert placed is None or as_lists([placed]) == as_lists([one])


@settings(max_examples=80, derandomize=True, database=None)
@given(st.data(), st.sampled_from(sorted(FAMILIES)), st.booleans())
def test_under_every_template(data: st.DataObject, name: str, trims: bool):
    family = FAMILIES[name]
    named = {"eos_token": family.eos, **({"bos_token": family.bos} if family.bos else {})}
    words = (*family.words, *(token for token in family.specials if token not in named.values()))
    template = family_template(name)
    tokenizer = made_tokenizer(tuple(named.values()), words=words, template=template, trim_offsets=trims, **named)
    made = build_renderer(tokenizer)
    found = [one for _ in range(2) for group in made.draw(data.draw(conversations(name))) for one in group]
    texts, spans = [one.text for one in found], [list(one.spans) for one in found]
    assert as_lists(made.encoder.encode(texts, spans)) == as_lists(by_offsets(made.encoder, texts, spans))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.greedy])
def test_bytes_prove_the_usual_rows_of_every_template(name):
    """Or the tests above would compare offsets with themselves."""
    made = build_renderer(FAMILIES[name].tokenizer(family_template(name)))
    *_, (one,) = made.draw(CONVERSATIONS["thoughts" if name == "qwen3_thinking" else "one"])
    assert made.encoder.byte_level is not None
    assert None not in made.encoder.byte_level.place([one.text], [one.spans])


@pytest.mark.parametrize("name", NOT_PLACED)
def test_a_tokenizer_whose_tokens_may_stand_for_other_bytes(name):
    assert byte_level(NOT_PLACED[name]()) is None


def placed_by(name: str, text: str, *spans: tuple[int, int]) -> list[tuple[list[int], list[bool]]] | None:
    known = encoder_of(name).byte_level
    assert isinstance(known, ByteLevel)
    (found,) = known.place([text], [spans])
    return None if found is None else as_lists([found])


def test_what_bytes_do_not_prove():
    assert placed_by("as it is", "four<|im_end|>", (0, 14)) is not None
    assert placed_by("as it is", "four<|im_end|>", (0, 6)) is None  # a border within a token
    assert placed_by("as it is", "<s> four", (3, 8)) is not None
    assert placed_by("NFC", "e\u0301<|im_end|>", (0, 2)) is None  # one character less, once normalised
    assert placed_by("NFC", "é<|im_end|>", (0, 1)) is not None
    assert placed_by("white space left out", "a b", (0, 3)) is None
    assert placed_by("as it is", "") == [([], [])]


def test_one_text_does_not_move_the_others():
    made = encoder_of("NFC")
    texts = ["é four", "e\u0301", "", "漢字 four<|im_end|>", "e\u0301 e\u0301"]
    spans = [[(0, 1)], [(0, 2)], [], [(2, 7), (7, 17)], [(2, 5)]]
    assert made.byte_level is not None
    assert [one is None for one in made.byte_level.place(texts, spans)] == [False, True, False, False, True]
    assert as_lists(made.encode(texts, spans)) == as_lists(by_offsets(made, texts, spans))
    assert made.byte_level.place([], []) == made.encode([], []) == []


@pytest.mark.parametrize("first", ["four", "e\u0301"])
def test_many_texts_come_back_in_their_order(first):
    """Whatever the first of them say of the rest."""
    texts = [first] * TRIED + ["e\u0301 two", "two", "é"]
    spans = [[(0, len(text))] for text in texts]
    made = encoder_of("NFC")
    assert as_lists(made.encode(texts, spans)) == as_lists(by_offsets(made, texts, spans))


def test_a_tokenizer_whose_library_panics_is_told(capfd: pytest.CaptureFixture[str]):
    """Rust's panic is no Exception of Python's, and would end a run without a word of the text."""
    tokenizer: Any = tiny.tokenizer()
    encode = encoder(tokenizer).encode
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.FixedLength(0)
    with pytest.raises(UserError, match=r"fails on the text that begins 'some words': .*tokenizer\.json is damaged"):
        encode(["", "some words"], [[], [(0, 4)]])
    assert "panicked" in capfd.readouterr().err
