"""Tokenizers, templates and recipes for the tests of the data room, all made in the process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListLike
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from repository import ROOT
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from finetune.data.chat.renderer import Renderer, build_renderer, labels_of
from finetune.data.chat.template import Template
from finetune.data.chat.template_choice import TEMPLATES, with_empty_thought
from finetune.data.examples import prepare_examples, recipe_renderer
from finetune.data.samples import Drawable, Example, Sequence
from finetune.recipe import Recipe
from finetune.recipe.schema import ROW_KINDS

CORPUS = [
    "the quick brown fox jumps over the lazy dog; what is two and two? It is four, of course.",
    "user assistant system question answer hello world how are you I am fine thanks",
    "def add(a, b):\n    return a + b\n\n0 1 2 3 4 5 6 7 8 9",
]


@lru_cache
def _trained(specials: tuple[str, ...]) -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(specials),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 5, trainer)
    return backend.to_str()


def byte_level(
    specials: ListLike[str] = ("<s>", "</s>"),
    *,
    template: str | None = None,
    trim_offsets: bool = False,
    adds_bos: bool = False,
    greedy: ListLike[str] = (),
    words: ListLike[str] = (),
    **named: str,
) -> PreTrainedTokenizerFast:
    """A small byte-level BPE. `greedy`: special tokens that swallow the white space behind them; `words`: added tokens
    that are not special. `named`: bos_token=, eos_token=, pad_token=."""
    backend = Tokenizer.from_str(_trained(tuple(specials)))
    parts = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if adds_bos:
        bos = named["bos_token"]
        parts.append(processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, specials.index(bos))]))
    backend.post_processor = processors.Sequence(parts)
    if greedy:
        backend.add_special_tokens([AddedToken(token, rstrip=True) for token in greedy])
    if words:
        backend.add_tokens(list(words))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = template
    return tokenizer


def family_template(name: str, *, tags: bool = False) -> str:
    """A template of `templates/`, or a "built-in" one, or "given" with an empty thought in its generation prompt;
    without `tags`, nothing says what the assistant writes."""
    if name.startswith("given "):
        plain = Template(family_template(name.removeprefix("given "), tags=tags), name)
        return with_empty_thought(plain, {"bos_token": "", "eos_token": ""}).text
    folder = TEMPLATES if name.startswith("built-in ") else ROOT / "tests/trainer/unit/data/templates"
    text = (folder / f"{name.removeprefix('built-in ')}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    if tags:
        return text
    return text.replace("{%- generation %}", "{%- if true %}").replace("{%- endgeneration %}", "{%- endif %}")


def sentencepiece_like(template: str) -> PreTrainedTokenizerFast:
    """A BPE over whole texts in which a space is "▁" and one stands before each, as converted from SentencePiece."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    alphabet = sorted({c for text in [*CORPUS, "é!?[]/INST4"] for c in text} | {"▁"})
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([word for text in CORPUS for word in text.split()] * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def word_level(vocab: Mapping[str, int], specials: ListLike[str], **named: str) -> PreTrainedTokenizerFast:
    """A tokenizer of given words and ids, for literal examples; the words are runs of white space or of the rest."""
    backend = Tokenizer(models.WordLevel(dict(vocab), unk_token="?"))  # the vocabulary has a "?"
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), behavior="isolated")
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def conversation(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """user, assistant, user, ... after an optional system message."""
    start = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return start + [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def recipe(
    path: Path | str, format: str = "text", *, source: Mapping[str, Any] | None = None, **changes: Any
) -> Recipe:
    """A recipe with one source, and an objective that takes its format. changes: `section__key=value`."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "test"},
        "model": {"config": {"model_type": "llama"}, "tokenizer": "none"},
        "data": {"train": [{"path": str(path), "format": format, **(source or {})}], "max_length": 64},
        "objective": {"name": next((name for name, kind in ROW_KINDS.items() if format in kind.formats), "sft")},
        "batch": {"rows": 4},
        "optimizer": {"lr": 1e-3},
        "train": {"epochs": 1},
    }
    if format == "classification":
        sections["objective"]["labels"] = ["no", "yes"]
    for name, value in changes.items():
        section, key = name.split("__")
        sections[section][key] = value
    return Recipe.model_validate({"mode": "full", **sections})


def prepare(
    path: Path | str, format: str = "text", *, tokenizer: PreTrainedTokenizerFast | None = None, **options: Any
):
    """`prepare_examples` over the one source of `recipe(path, format, **options)`."""
    made = recipe(path, format, **options)
    return prepare_examples(made, made.data.train, renderer_of(made, tokenizer))


def renderer_of(recipe: Recipe, tokenizer: PreTrainedTokenizerFast | None = None) -> Renderer:
    """The renderer of a recipe's rows for a tokenizer that is not in a folder."""
    return recipe_renderer(recipe.model, recipe.objective, tokenizer or text_tokenizer())


def text_tokenizer() -> PreTrainedTokenizerFast:
    return byte_level(bos_token="<s>", eos_token="</s>", adds_bos=True)


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def ids(example: Example) -> list[int]:
    """Of an example of one sequence, as in the next two."""
    (sequence,) = example.sequences
    return sequence.input_ids.tolist()


def labels(example: Example) -> list[int]:
    (sequence,) = example.sequences
    return labels_of(sequence.input_ids, sequence.loss_mask).tolist()


def trained_ids(example: Example) -> list[int]:
    (sequence,) = example.sequences
    return sequence.input_ids[sequence.loss_mask].tolist()


def labelled(row: int, labels: list[int], input_ids: list[int] | None = None, source: int = 0) -> Example:
    """An example of one sequence, trained where a label is not -100. input_ids: the labels, 0 for -100, by default."""
    loss_mask = np.array(labels) != -100
    given = np.array(labels) * loss_mask if input_ids is None else np.array(input_ids)
    return Example("f", row, source, (Sequence(given.astype(np.int32), loss_mask),))


def document(number: int, *lengths: int) -> Example:
    """An example whose tokens say which document they are of; in each sequence all but the first trained."""
    arrays = [np.arange(length, dtype=np.int32) + 100 * number + 50 * i for i, length in enumerate(lengths)]
    return Example("made", number, 0, tuple(Sequence(array, np.arange(len(array)) > 0) for array in arrays))


def render(
    sample: Drawable, tokenizer: PreTrainedTokenizerBase, train_on: str = "assistant", template: Template | None = None
) -> tuple[Any, Any]:
    """Returns (input_ids (T,), labels (T,)) of a sample that is one example; labels are -100 if not trained."""
    renderer = build_renderer(tokenizer, template, train_on)
    (group,) = renderer.draw(sample)
    (tokens,) = renderer.tokenize(group)
    return tokens[0], labels_of(tokens[0], tokens[1])
