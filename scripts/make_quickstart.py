"""Rows and tokenizer of the quickstart task: a date as people write it goes in, the same date in one format comes out.

    python scripts/make_quickstart.py            # into runs/quickstart-data
    python scripts/make_quickstart.py --out DIR

    DIR/train.jsonl  DIR/test.jsonl              the 3rd of March, 2021 -> 2021-03-03    (recipes/quickstart/full.yaml)
    DIR/words/train.jsonl  DIR/words/test.jsonl  the 3rd of March, 2021 -> 3 March 2021  (recipes/quickstart/lora.yaml)
    DIR/pairs/train.jsonl  DIR/pairs/test.jsonl  2021/03/03 preferred to 2021-03-03   (recipes/quickstart/dpo-lora.yaml)
    DIR/digits/train.jsonl  DIR/digits/test.jsonl  1234 -> 4321           (recipes/quickstart/digits-full.yaml)
    DIR/tokenizer/                               byte-level BPE learnt from the first of them

The prompts of the two pairs are of one kind, and those of the two test files are the same, so that what the second
stage changed is plain to see. Every run writes the same bytes. No date of a test file is in a training file.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SEED = 2021
FIRST, LAST = date(1950, 1, 1), date(2049, 12, 31)  # a hundred years: two digits of a year say which
NUM_TEST = 200
NUM_TRAIN = 16_000  # a tenth of all pairs of date and format, so what is learnt is the rule and not the rows
NUM_TRAIN_WORDS = 8_000
NUM_TRAIN_PAIRS = 3_200
VOCAB_SIZE = 320  # 3 special tokens, 256 bytes, 61 merges; recipes/quickstart/full.yaml says the same number

MONTHS = (  # calendar.month_name speaks the language of the machine
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2: 1 and 2 are what a Llama config calls bos, eos
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def month(day: date) -> str:
    return MONTHS[day.month - 1]


def ordinal(number: int) -> str:
    """
    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 30, 31)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '13th', '21st', '22nd', '23rd', '30th', '31st']
    """
    ending = "th" if 11 <= number <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


# How people write a date; each can be read in one way only.
FORMATS: tuple[Callable[[date], str], ...] = (
    lambda d: f"the {ordinal(d.day)} of {month(d)}, {d.year}",  # the 3rd of March, 2021
    lambda d: f"{month(d)} {d.day}, {d.year}",  # March 3, 2021
    lambda d: f"{d.year}, {month(d)} {ordinal(d.day)}",  # 2021, March 3rd
    lambda d: f"{d.day} {month(d)[:3]} {d.year % 100:02}",  # 3 Mar 21
    lambda d: f"{d.day:02}.{d.month:02}.{d.year}",  # 03.03.2021: with dots the day comes first
    lambda d: f"{d.year}/{d.month}/{d.day}",  # 2021/3/3: no one writes year, day, month
    lambda d: f"{d.day}/{d.month}/{d.year} (day first)",  # 3/3/2021 (day first)
    lambda d: f"{d.month}/{d.day}/{d.year} (month first)",  # 3/3/2021 (month first)
)


def words(day: date) -> str:
    """
    >>> words(date(2021, 3, 3))
    '3 March 2021'
    """
    return f"{day.day} {month(day)} {day.year}"


def slashes(day: date) -> str:
    """
    >>> slashes(date(2021, 3, 3))
    '2021/03/03'
    """
    return f"{day.year}/{day.month:02}/{day.day:02}"


def split_dates(rng: random.Random) -> tuple[list[date], list[date]]:
    """Every date of the hundred years, in train or in test."""
    dates = [FIRST + timedelta(days=n) for n in range((LAST - FIRST).days + 1)]
    rng.shuffle(dates)
    return dates[NUM_TEST:], dates[:NUM_TEST]


def questions(dates: list[date], count: int, rng: random.Random) -> list[tuple[str, date]]:
    """`count` different pairs of date and format, all formats equally often."""
    order = [(day, write) for day in dates for write in range(len(FORMATS))]
    rng.shuffle(order)
    by_format = [[pair for pair in order if pair[1] == i][: count // len(FORMATS)] for i in range(len(FORMATS))]
    mixed = [pair for same in by_format for pair in same]
    rng.shuffle(mixed)
    return [(FORMATS[i](day), day) for day, i in mixed]


def test_questions(dates: list[date]) -> list[tuple[str, date]]:
    """Each held-out date once, the formats in turn."""
    return [(FORMATS[i % len(FORMATS)](day), day) for i, day in enumerate(dates)]


def write_rows(path: Path, pairs: list[tuple[str, date]], answer: Callable[[date], str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for question, day in pairs:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer(day)}]
            file.write(json.dumps({"messages": turns}) + "\n")


def write_pairs(path: Path, pairs: list[tuple[str, date]]) -> None:
    """Of the two writings of a date, the one with slashes is preferred."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for question, day in pairs:
            answers = {name: [{"role": "assistant", "content": write(day)}] for name, write in WRITINGS.items()}
            file.write(json.dumps({"prompt": [{"role": "user", "content": question}], **answers}) + "\n")


def write_digits(folder: Path, rng: random.Random) -> None:
    """All numbers of four digits and their reverse, in train or in test."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [f"{number:04}" for number in range(10_000)]
    rng.shuffle(numbers)
    for name, some in (("train", numbers[NUM_TEST:]), ("test", numbers[:NUM_TEST])):
        rows = [[{"role": "user", "content": n}, {"role": "assistant", "content": n[::-1]}] for n in some]
        lines = "".join(json.dumps({"messages": turns}) + "\n" for turns in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def learn_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own: a date is read digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


WRITINGS: dict[str, Callable[[date], str]] = {"chosen": slashes, "rejected": date.isoformat}


def texts_of(pairs: list[tuple[str, date]]) -> Iterator[str]:
    """What a conversation holds between its special tokens, in both answer formats."""
    for question, day in pairs:
        yield from (f"user\n{question}", f"assistant\n{day.isoformat()}", f"assistant\n{words(day)}")


def make(out: Path) -> None:
    rng = random.Random(SEED)
    train_dates, test_dates = split_dates(rng)
    train = questions(train_dates, NUM_TRAIN, rng)
    test = test_questions(test_dates)
    write_rows(out / "train.jsonl", train, date.isoformat)
    write_rows(out / "test.jsonl", test, date.isoformat)
    write_rows(out / "words" / "train.jsonl", questions(train_dates, NUM_TRAIN_WORDS, rng), words)
    write_rows(out / "words" / "test.jsonl", test, words)
    write_pairs(out / "pairs" / "train.jsonl", questions(train_dates, NUM_TRAIN_PAIRS, rng))
    write_pairs(out / "pairs" / "test.jsonl", test)
    write_digits(out / "digits", rng)
    tokenizer = learn_tokenizer(texts_of(train))
    assert len(tokenizer) == VOCAB_SIZE
    tokenizer.save_pretrained(out / "tokenizer")
    print(f"{out}: {len(train)} rows to train on, {len(test)} held out; tokenizer of {len(tokenizer)} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the rows and the tokenizer of the quickstart task.")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart-data"), help="default: %(default)s")
    make(parser.parse_args().out)


if __name__ == "__main__":
    main()
