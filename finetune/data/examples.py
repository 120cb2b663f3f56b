"""From a recipe's sources to tokenised examples: found in the cache, or made once and kept there.

`building/` makes an entry from a source, `cache/` keeps it. Weights and seeds are not part of an entry: they choose
among its examples afterwards.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import accumulate
from typing import Any

import jinja2
import numpy as np
import tokenizers
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune import __version__
from finetune.data.building.build import Plain, build, check_heads, open_source
from finetune.data.building.chunk import PARTS
from finetune.data.cache.entries import Entry, entries_folder, find_or_build, load
from finetune.data.chat.jinja import asks_for_today, dated
from finetune.data.chat.renderer import Renderer, labels_of, renderer
from finetune.data.chat.template import resolve_template
from finetune.data.mixture import choose, choose_by_tokens, passes_per_epoch, source_names
from finetune.data.report import Report
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.schema import Source

CODE_VERSION = 3  # raise it whenever the same row would give other tokens or another mask
# Of a source: what chooses among its examples, or names them.
_NOT_IN_AN_ENTRY = {"weight", "name", "max_epochs"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """One document, ready for `collate`."""

    path: str  # file or dataset
    row: int  # its line or row there, from 1
    input_ids: NDArray[np.int32]  # (T,)
    labels: NDArray[np.int32]  # (T,) the id where trained, else -100; never trained at 0
    source: int = 0  # number of its source in the recipe
    part: str = ""  # chosen | rejected, of a preference


class Examples:
    """The examples of an epoch, source after source, chosen by `weight`; a sequence that reads from disk.

    lengths, num_trained: (N,) int64, tokens and trained tokens of every example. report: what was read and dropped.
    made_s: for every source the seconds that tokenising it took just now; None where it was found in the cache.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        chosen: Sequence[NDArray[np.int64]],
        report: Report,
        made_s: Sequence[float | None] = (),
    ):
        self._entries, self._chosen = tuple(entries), tuple(chosen)  # (n,) each: numbers in an entry
        self._ends = list(accumulate(len(numbers) for numbers in chosen))  # where the next source begins
        self.report, self.made_s = report, tuple(made_s)
        self.lengths = self._column(lambda entry: np.diff(entry.offsets))
        self.num_trained = self._column(lambda entry: entry.num_trained)

    def _column(self, of: Callable[[Entry], NDArray[np.int64]]) -> NDArray[np.int64]:
        """(N,) a value of every example; what every entry has once, in order, is not copied."""
        parts = [
            of(entry) if _is_all(numbers, len(entry)) else of(entry)[numbers]
            for entry, numbers in zip(self._entries, self._chosen, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> Example:
        """Example `i`; raises IndexError beyond the end, so that a for loop ends."""
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of {len(self)}")
        source = bisect_right(self._ends, i)
        begins = self._ends[source - 1] if source else 0
        return example_of(self._entries[source], int(self._chosen[source][i - begins]), source)

    def of_source(self, source: int) -> range:
        """The examples of a source."""
        return range(self._ends[source - 1] if source else 0, self._ends[source])

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))


def example_of(entry: Entry, i: int, source: int) -> Example:
    """Example `i` of the entry of source number `source`."""
    place = slice(entry.offsets[i], entry.offsets[i + 1])
    ids = np.array(entry.input_ids[place])  # a copy: torch wants memory it may write to
    labels = labels_of(ids, entry.trained[place])
    return Example(entry.names[entry.files[i]], int(entry.rows[i]), ids, labels, source, PARTS[entry.parts[i]])


def _is_all(numbers: NDArray[np.int64], count: int) -> bool:
    return len(numbers) == count and bool(np.all(np.diff(numbers) == 1))


def prepare_examples(
    recipe: Recipe,
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int], None] | None = None,
) -> Examples:
    """Read, render, mask and tokenise `sources` (`recipe.data.train` or `.eval`), or find it done in the cache.

    Uses no process group: every process may call it at once, the first builds each entry and the others wait at a file
    lock. Before anything is tokenised the first rows of all the recipe's sources are looked at.
    progress: called with the number of rows done in the source at hand.
    Raises UserError with file and row for data that cannot be used, and where nothing trainable is left.
    """
    plain = [open_source(source) for source in sources]
    model = recipe.model
    template = resolve_template(model.chat_template, tokenizer, model.chat_template_arguments)
    made = renderer(tokenizer, template, recipe.objective.train_on)
    rendering = key_of_rendering(made)
    digests = [one.opened.digest() for one in plain]
    folders = [
        entries_folder() / key_of_entry(recipe, one.source, digest, rendering)
        for one, digest in zip(plain, digests, strict=True)
    ]
    if any(load(folder) is None for folder in folders):
        check_heads(recipe, made)
    entries, made_s = [], []
    for one, digest, folder in zip(plain, digests, folders, strict=True):
        if one.note:
            log.warning("%s", one.note)
        fill = partial(build, data=recipe.data, plain=one, digest=digest, made=made, progress=progress)
        entry, seconds = find_or_build(folder, about_entry(recipe, one, made), fill)
        entries.append(entry)
        made_s.append(seconds)
    return _choose_from(recipe, sources, entries, made_s)


def _choose_from(
    recipe: Recipe, sources: Sequence[Source], entries: Sequence[Entry], made_s: Sequence[float | None]
) -> Examples:
    """Raises UserError where the weights leave nothing."""
    is_mixture = sources is recipe.data.train
    mixture = recipe.data.mixture if is_mixture else None
    by_tokens = mixture is not None and mixture.by == "tokens"
    sizes = [len(entry.input_ids) if by_tokens else len(entry) for entry in entries]
    passes = passes_per_epoch(sizes, sources, mixture, recipe.train.epochs if is_mixture else None)
    chosen = [
        choose_by_tokens(np.diff(entry.offsets), each, recipe.run.seed, number)
        if by_tokens
        else choose(len(entry), each, recipe.run.seed, number)
        for number, (entry, each) in enumerate(zip(entries, passes, strict=True))
    ]
    if not sum(len(numbers) for numbers in chosen):
        raise UserError("data: the weights of the sources leave no example at all; raise `weight`")
    names = source_names(sources)
    for entry, source, name, each, numbers in zip(entries, sources, names, passes, chosen, strict=True):
        entry.report.name, entry.report.weight = name, source.weight
        entry.report.passes, entry.report.taken = round(each, 6), len(numbers)
    return Examples(entries, chosen, Report(tuple(entry.report for entry in entries)), made_s)


# --- what an entry's tokens depend on


def key_of_entry(recipe: Recipe, source: Source, digest: str, rendering: str) -> str:
    """sha256 of everything that the tokens and masks of a source depend on."""
    data = recipe.data
    parts = {
        "code": [CODE_VERSION, tokenizers.__version__, transformers.__version__, jinja2.__version__],
        "content": digest,
        "source": source.model_dump(exclude=_NOT_IN_AN_ENTRY),
        "rendering": rendering,
        "length": [data.max_length, data.overlong],
        "bad_rows": [data.on_bad_row, data.max_bad_share],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def key_of_rendering(made: Renderer) -> str:
    """sha256 of all that `renderer` was made of; a vocabulary is large, so once for all sources."""
    fast: Any = made.tokenizer
    backend = json.loads(fast.backend_tokenizer.to_str())
    parts = {
        "tokenizer": {name: part for name, part in backend.items() if name not in ("truncation", "padding")},
        "special": [made.special, made.adds_bos],
        "template": dated(made.template.text) if made.template else None,
        "today": str(date.today()) if made.template and asks_for_today(made.template.text) else None,
        "train_on": made.train_on,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def about_entry(recipe: Recipe, plain: Plain, made: Renderer) -> dict[str, Any]:
    """What an entry is of, for people: `cache list` shows it."""
    return {
        "source": plain.name,
        "split": plain.source.split,
        "format": plain.source.format,
        "tokenizer": made.tokenizer.name_or_path or type(made.tokenizer).__name__,
        "template": made.template.name if made.template else None,
        "train_on": made.train_on,
        "max_length": recipe.data.max_length,
        "overlong": recipe.data.overlong,
        "finetune": __version__,
        "code_version": CODE_VERSION,
    }
