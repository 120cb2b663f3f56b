"""The tokens that end a generation: in evaluation and in the result's generation config, which `generate` uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from transformers import GenerationConfig, PreTrainedTokenizerFast

from finetune.data.chat.template import resolve_template
from finetune.data.chat.template_check import turn_end_ids
from finetune.data.dataset import Dataset, Stream
from finetune.data.samples import Example
from finetune.data.token_text import special_ids
from finetune.recipe import Recipe
from finetune.recipe.schema import Model

_EXAMPLES_READ = 1000  # of each source of ids
_MIN_SHARE = 0.1  # of rows: a truncated one ends with any token


def end_ids(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, datasets: Sequence[Dataset | Stream | None]
) -> set[int]:
    """Returns the ids that end a generation, the same on every rank.

    These are the tokenizer's end token, those in the base model's generation config, the end of turn if rows are
    rendered by the chat template, and the last token of rows that are given as ids.
    """
    assert isinstance(tokenizer.eos_token_id, int)  # load_tokenizer sees to it
    ends = {tokenizer.eos_token_id, *_ends_of_base(recipe.model, tokenizer)}
    formats = {format for data in datasets if data for format in data.formats}
    template = resolve_template(recipe.model.chat_template, tokenizer, recipe.model.chat_template_arguments)
    if template is not None and formats - {"text", "tokens"}:
        ends |= turn_end_ids(tokenizer, template)
    for data in datasets:
        for source, format in enumerate(data.formats if data else ()):
            if data and format == "tokens":
                ends |= _ends_of_rows(data.first_examples(source, _EXAMPLES_READ), tokenizer)
    return ends


def _ends_of_base(model: Model, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Returns those in a published model's generation config (Llama 3.1 has three); none with another tokenizer."""
    if model.name is None or model.config is not None or model.tokenizer is not None:
        return set()
    try:
        ids = GenerationConfig.from_pretrained(model.name, revision=model.revision or "main").eos_token_id
    except OSError:  # it has no such file
        return set()
    named = set(ids) if isinstance(ids, list) else {ids}
    return {i for i in named if i in special_ids(tokenizer)}


def _ends_of_rows(examples: Iterable[Example], tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Returns the special tokens that are the last target of at least `_MIN_SHARE` of the rows."""
    last = Counter(int(one.input_ids[one.loss_mask][-1]) for example in examples for one in example.sequences[:1])
    enough, added = _MIN_SHARE * sum(last.values()), special_ids(tokenizer)
    return {i for i, count in last.items() if i in added and count >= enough}
