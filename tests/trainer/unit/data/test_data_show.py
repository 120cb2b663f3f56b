"""What people see of an example: the text of each token, marks for what cannot be seen, and lines for programs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from data_helpers import byte_level, conversation, prepare, sentencepiece_like, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.samples import Sequence
from finetune.data.token_text import Look, plain_text, render_rich, shortened, to_json_lines, tokens_of, visible

CHATML = ("<|im_start|>", "<|im_end|>")
TOKENIZER = byte_level(CHATML)


def sequence_of(ids: list[int], trained: set[int] | None = None) -> Sequence:
    """A sequence of which the tokens at `trained` (all but the first if None) are trained."""
    at = np.isin(np.arange(len(ids)), sorted(trained if trained is not None else set(range(1, len(ids)))))
    return Sequence(np.array(ids, np.int32), at)


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_json_lines(tmp_path):
    path = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in ("hello", "two", "three", "four")])
    lines = list(to_json_lines(prepare(path), 2))
    assert len(lines) == 2
    assert json.loads(json.dumps(lines[0])).keys() == {"path", "row", "input_ids", "labels"}
    assert len(list(to_json_lines(prepare(path)))) == 4


def test_a_preference_has_a_line_for_each_answer(tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "two?", "chosen": "2", "rejected": "three"}] * 2)
    lines = list(to_json_lines(prepare(path, "preference"), 1))
    assert [(line["row"], line["sequence"]) for line in lines] == [(1, 0), (1, 1)]
    assert lines[0]["input_ids"] != lines[1]["input_ids"]


# --- tokens


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_the_texts_of_tokens_add_up_to_the_decoded_text(text: str):
    ids = ids_of(text)
    tokens = tokens_of(sequence_of(ids), TOKENIZER)
    assert [token.id for token in tokens] == ids
    assert "".join(token.text for token in tokens) == TOKENIZER.decode(ids, clean_up_tokenization_spaces=False)


@settings(max_examples=60)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), min_size=1, max_size=40))
def test_so_do_tokens_that_no_text_gives(ids: list[int]):
    """Parts of characters without the rest of them, as after `overlong: truncate`."""
    tokens = tokens_of(sequence_of(ids), TOKENIZER)
    assert "".join(token.text for token in tokens) == TOKENIZER.decode(ids, clean_up_tokenization_spaces=False)


def test_a_character_of_several_tokens_is_written_by_the_last_of_them():
    tokens = tokens_of(sequence_of(ids_of("a🦊b")), TOKENIZER)
    assert [token.text for token in tokens] == ["a", "", "", "", "🦊", "b"]
    assert [token.part for token in tokens] == ["", "⟨F0⟩", "⟨9F⟩", "⟨A6⟩", "⟨8A⟩", ""]


def test_a_decoder_that_drops_the_first_space():
    tokenizer = sentencepiece_like("")
    ids = tokenizer("hello world, how", add_special_tokens=False)["input_ids"]
    tokens = tokens_of(sequence_of(ids), tokenizer)
    assert "".join(token.text for token in tokens) == tokenizer.decode(ids)


def test_a_decoder_that_strips_at_the_start_and_falls_back_to_bytes():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "▁Hi": 1, "▁you": 2, "<0xC3>": 3, "<0xA9>": 4, "!": 5, "▁": 6}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokens = tokens_of(sequence_of([1, 2, 3, 4, 5, 6, 1]), tokenizer)
    assert [token.text for token in tokens] == ["Hi", " you", "", "é", "!", " ", " Hi"]
    assert [token.part for token in tokens] == ["", "", "⟨C3⟩", "⟨A9⟩", "", "", ""]


def test_every_added_token_is_special():
    """`all_special_ids` has only those with a role; <|im_start|> has none here."""
    ids = ids_of("<|im_start|>user")
    assert [token.special for token in tokens_of(sequence_of(ids), TOKENIZER)][:2] == [True, False]


# --- in a terminal


def test_rich_text_shows_special_tokens_and_colours_what_is_trained(tmp_path):
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": conversation("hello", "naïve 🦊")}])
    examples = prepare(path, "messages", tokenizer=TOKENIZER, model__chat_template="chatml")
    shown = render_rich(examples[0].sequences[0], TOKENIZER)
    assert shown.plain == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nnaïve 🦊<|im_end|>\n"
    green = [shown.plain[s.start : s.end] for s in shown.spans if "green" in str(s.style)]
    assert "".join(green) == "naïve 🦊<|im_end|>"


def test_without_colour_what_is_trained_stands_in_brackets():
    ids = ids_of("<|im_start|>user fine<|im_end|>")
    first = len(ids_of("<|im_start|>user"))
    shown = render_rich(sequence_of(ids, set(range(first, len(ids)))), TOKENIZER, Look(colour=False))
    assert shown.plain == "<|im_start|>user[[ fine<|im_end|>]]"


def test_white_space_that_is_trained_is_seen():
    ids = ids_of("a\n\tb  \nc ")
    assert render_rich(sequence_of(ids), TOKENIZER).plain == "a⏎\n⇥\tb··⏎\nc·"
    assert render_rich(sequence_of(ids, set()), TOKENIZER).plain == "a\n\tb  \nc "


def test_borders_and_ids():
    ids = ids_of("ab🦊")
    shown = render_rich(sequence_of(ids), TOKENIZER, Look(colour=False, borders=True)).plain
    small = [str(i).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")) for i in ids]
    assert shown == "|a{}[[|b{}|⟨F0⟩{}|⟨9F⟩{}|⟨A6⟩{}|⟨8A⟩🦊{}]]".format(*small)
    line = render_rich(sequence_of(ids_of("\n"), set()), TOKENIZER, Look(colour=False, borders=True)).plain
    assert line.endswith("⏎\n"), "the id of a newline is on its own line"


def test_no_control_reaches_the_terminal():
    hostile = "\x1b[2J \x07 \u202e \x00 \r"
    shown = render_rich(sequence_of(ids_of(hostile)), TOKENIZER).plain
    assert shown == "␛[2J ␇ ⟨U+202E⟩ ␀ ␍" == visible(hostile)
    assert visible("👨\u200d👩 می\u200cخواهم\n\t") == "👨\u200d👩 می\u200cخواهم\n\t", "joiners are writing"


def test_a_long_example_loses_its_middle_and_says_so():
    ids = ids_of("x" * 1000)
    shown = render_rich(sequence_of(ids), TOKENIZER).plain
    assert shown.count("x") == 400
    assert "... 600 tokens not shown here, 600 of them trained (--full shows them) ..." in shown
    assert render_rich(sequence_of(ids), TOKENIZER, Look(full=True)).plain == "x" * 1000


@pytest.mark.parametrize("count", [1, 2, 3, 10, 400, 401])
def test_shortened_keeps_as_many_as_it_may(count: int):
    tokens = tokens_of(sequence_of(ids_of("x" * count)), TOKENIZER)
    (head, tail), left_out = shortened(tokens, 3)
    assert [*head, *left_out, *tail] == tokens
    assert len(head) + len(tail) == min(count, 3)


def test_plain_text_of_an_error_message():
    ids = np.array(ids_of("one\x1b two"))
    assert plain_text(Sequence(ids, np.arange(len(ids)) > 2), TOKENIZER).startswith("o")
    assert plain_text(Sequence(ids, np.ones(len(ids), bool)), TOKENIZER) == "[[one␛ two]]"
    many = np.array(ids_of("x" * 500))
    assert plain_text(Sequence(many, np.zeros(500, bool)), TOKENIZER) == "x" * 400 + " ... (500 tokens)"
