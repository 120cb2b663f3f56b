"""Tokenizes the examples of a recipe's sources: loaded from the cache, or built once and kept there.

`building.py` builds an entry from a source, `token_cache.py` keeps it. Weights and seeds are not part of an entry: they
choose among its examples afterwards, so that changing one does not tokenize again.

    sizes 900 and 100 tokens, mixture {by: tokens, temperature: 2}
    shares  like 900^(1/2) : 100^(1/2) = 3 : 1         an epoch has 1,000 tokens, as the sources together
    takes   750 of 900 tokens, 250 of 100              0.83 passes over the first source, 2.5 over the second
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from itertools import accumulate, chain
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

import jinja2
import numpy as np
import tokenizers
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune import __version__
from finetune.data.building import EntryBuild, OpenedSource, OpenedSources, build_source
from finetune.data.cache_entries import entries_folder
from finetune.data.chat.renderer import Renderer, build_renderer
from finetune.data.chat.template import asks_for_today, dated
from finetune.data.chat.template_choice import template_of
from finetune.data.content import source_content
from finetune.data.epochs import UNBOUNDED, EpochRows, RunLength, SourceShare, source_order
from finetune.data.objective_rows import objective_rows, trained_part
from finetune.data.samples import Example, Medium, concatenate_sizes
from finetune.data.token_cache import CacheEntry, DataReport, find_or_build, load
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import ObjectiveSettings
from finetune.recipe.schema import Audio, Data, HeldOut, Images, Mixture, Model, Source, Videos

if TYPE_CHECKING:
    from finetune.data.media.expansion import RowMedia
    from finetune.data.media.feature_reader import FeatureReader

CODE_VERSION = 10  # raise it whenever the same row would give other tokens or another mask, or is kept in another form
# Keys of a source that choose among its examples, or name them.
_NOT_IN_AN_ENTRY = {"weight", "name", "max_epochs"}

log = logging.getLogger(__name__)


class TargetColumns(Protocol):
    """Columns of the targets of every example, such as a teacher's predictions."""

    @property
    def identity(self) -> str: ...

    def of(self, example: Example) -> Mapping[str, NDArray[Any]] | None:
        """Returns arrays (num_targets, ...); None if the example is unknown."""
        ...


class Examples:
    """The examples of an epoch, chosen by `weight`, or of a run, source after source; a sequence that reads from disk.

    sizes: of all examples; lengths, num_targets: (N,) int64, tokens and trained tokens of every example.
    report: counts of rows read and dropped. build_s: seconds that tokenizing each source took just now; None
    if it was in the cache.
    """

    def __init__(
        self,
        entries: Sequence[CacheEntry],
        chosen: Sequence[NDArray[np.int64]],
        report: DataReport,
        build_s: Sequence[float | None] = (),
        columns: Mapping[str, NDArray[np.floating]] | None = None,
        predictions: TargetColumns | None = None,
    ):
        self._entries, self._chosen = tuple(entries), tuple(chosen)  # (n,) each: indices in an entry
        self._ends = list(accumulate(len(indices) for indices in chosen))  # where the next source begins
        self._columns = dict(columns or {})
        self.predictions = predictions
        self.report, self.build_s = report, tuple(build_s)
        self.sizes = concatenate_sizes(
            # Arrays that every entry has once, in order, are not copied.
            entry.sizes()
            if len(indices) == len(entry) and np.all(np.diff(indices) == 1)
            else entry.sizes().take(indices)
            for entry, indices in zip(self._entries, self._chosen, strict=True)
        )
        self.lengths, self.num_targets = self.sizes.tokens, self.sizes.target_tokens

    def with_columns(self, columns: Mapping[str, NDArray[np.floating]]) -> Examples:
        """Returns the same examples with more numbers: (N,) one per example or (M,) one per sequence, in order."""
        more = {**self._columns, **columns}
        return Examples(self._entries, self._chosen, self.report, self.build_s, more, self.predictions)

    def with_predictions(self, predictions: TargetColumns) -> Examples:
        """Returns the same examples with a teacher's predictions at their targets."""
        return Examples(self._entries, self._chosen, self.report, self.build_s, self._columns, predictions)

    def identity(self) -> str:
        """Returns the sha256 of everything that the tokens of these examples depend on, computed columns excluded."""
        digest = hashlib.sha256()
        for entry, indices in zip(self._entries, self._chosen, strict=True):
            digest.update(f"{entry.key} {len(indices)} ".encode())
            digest.update(indices.astype("<i8").tobytes())
        return digest.hexdigest()

    def hashes(self) -> NDArray[np.uint64]:  # (N,)
        """Returns a hash of the tokens and images of every example: equal for equal rows, wherever they were read."""
        each = zip(self._entries, self._chosen, strict=True)
        return np.concatenate([np.asarray(entry.hashes)[indices] for entry, indices in each])

    def content(self, key: str) -> dict[str, dict[str, Any]]:
        """Returns the content of each source (`source_content`) by its place in the recipe. key: `train` or `eval`."""
        return {f"{key}[{i}]": source_content(entry) for i, entry in enumerate(self._entries)}

    def media(self) -> Iterator[Medium]:
        """Yields all files that entries name."""
        return chain.from_iterable(entry.media() for entry in self._entries)

    def media_files(self) -> list[str]:
        """Returns the paths of all files of images that entries name, sorted."""
        return sorted(set().union(*(entry.media_files() for entry in self._entries)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> Example:
        """Returns example `i`; raises IndexError beyond the end, so that a for loop ends."""
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of {len(self)}")
        source = bisect_right(self._ends, i)
        begin = self._ends[source - 1] if source else 0
        example = self._entries[source].example(int(self._chosen[source][i - begin]), source)
        if self.predictions is not None:
            example = replace(example, target_columns=self.predictions.of(example) or {})
        if not self._columns:
            return example
        places = slice(self.sizes.offsets[i], self.sizes.offsets[i + 1])
        added = {
            name: float(values[i]) if len(values) == len(self) else tuple(values[places].tolist())
            for name, values in self._columns.items()
        }
        return replace(example, columns={**example.columns, **added})

    def of_source(self, source: int) -> range:
        """Returns the indices of a source's examples."""
        return range(self._ends[source - 1] if source else 0, self._ends[source])

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True)
class Draw:
    """The examples of an epoch, and how much of each source every epoch takes."""

    first_epoch: Examples
    entries: Sequence[CacheEntry]
    present: Sequence[NDArray[np.int64]]  # (n,) of each source, in its entry: without those that are held out
    tokens: Sequence[NDArray[np.int64]]  # (n,)
    shares: Sequence[SourceShare]  # of `present`

    def run(self, length: RunLength, max_length: int | None) -> tuple[Examples, EpochRows]:
        """Returns every example of the run once, and the rows of its epochs. max_length: see `EpochRows`."""
        rows, first = EpochRows(self.shares, self.tokens, length, max_length), self.first_epoch
        chosen = [indices[of_source] for indices, of_source in zip(self.present, rows.chosen, strict=True)]
        return Examples(self.entries, chosen, first.report, first.build_s), rows


def prepare_examples(
    recipe: Recipe,
    sources: Sequence[Source],
    renderer: Renderer,
    progress: Callable[[int], None] | None = None,
    opened: OpenedSources | None = None,
    held_out: bool = False,
) -> Examples:
    """Reads, renders, masks and tokenizes `sources` (`recipe.data.train` or `.eval`), or loads them from the cache;
    returns the examples of an epoch.

    Uses no process group: every process may call it at once, the first builds each entry and the others wait at a file
    lock. Before anything is tokenized the first rows of all the recipe's sources are rendered.
    progress: called with the number of rows done in the current source. opened: of this recipe, if other parts of the
    run open sources too. held_out: the rows of `recipe.data.train` that `data.eval.share` keeps from training, instead
    of the others.
    Raises UserError with file and row for data that cannot be used, and if no trainable example is left.
    """
    return draw_examples(recipe, sources, renderer, progress, opened, held_out).first_epoch


def draw_examples(
    recipe: Recipe,
    sources: Sequence[Source],
    renderer: Renderer,
    progress: Callable[[int], None] | None = None,
    opened: OpenedSources | None = None,
    held_out: bool = False,
) -> Draw:
    """Returns the examples of the first epoch as `prepare_examples`, and the selection of later epochs."""
    opened = opened or OpenedSources(recipe)
    of_sources = [opened.open(source) for source in sources]
    rendering = rendering_key(renderer)
    digests = [one.reader.digest() for one in of_sources]
    folders = [
        entries_folder() / entry_key(recipe, one.source, digest, rendering)
        for one, digest in zip(of_sources, digests, strict=True)
    ]
    cached = [load(folder) for folder in folders]
    if any(entry is None for entry in cached):
        opened.check_heads(renderer)
    entries, build_s = [], []
    for one, digest, folder, entry in zip(of_sources, digests, folders, cached, strict=True):
        if one.note:
            log.warning("%s", one.note)
        seconds = None
        if entry is None:
            build = EntryBuild(recipe, one, renderer, progress)
            fill = partial(build_source, build=build, digest=digest)
            entry, seconds = find_or_build(folder, entry_metadata(recipe.data, one, renderer), fill)
        entries.append(entry)
        build_s.append(seconds)
    return _choose_from(recipe, sources, entries, build_s, held_out)


def recipe_renderer(
    model: Model, objective: ObjectiveSettings, tokenizer: PreTrainedTokenizerBase, media: RowMedia | None = None
) -> Renderer:
    """Returns the renderer of a recipe's rows. media: of `row_media`. Raises UserError."""
    template, is_scored = template_of(model, tokenizer), objective.row_kind.is_text
    return build_renderer(tokenizer, template, trained_part(objective), is_scored, media)


def row_media(
    model: Model, rules: Sequence[Images | Audio | Videos] | None, tokenizer: PreTrainedTokenizerBase
) -> RowMedia | None:
    """Returns how a model takes the files of rows; None without rules (`data.media`). Raises UserError."""
    if not rules:
        return None
    from finetune.data.media.expansion import RowMedia
    from finetune.data.media.families import media_family

    first, *others = (media_family(model, of_kind, tokenizer) for of_kind in rules)
    kept = [one for one in (first, *others) if isinstance(one.rules, Audio) and one.rules.cache]
    if not kept:
        return RowMedia(first, rules[0], tuple(others))
    from finetune.data.media.feature_cache import FeatureCache

    return RowMedia(first, rules[0], tuple(others), {one.kind: FeatureCache.of(one).find for one in kept})


def media_reader(media: RowMedia | None) -> FeatureReader | None:
    """Returns the function that builds the inputs of a micro-batch for its files; None without files."""
    if media is None:
        return None
    from finetune.data.media.feature_reader import feature_reader

    families = [
        (family, not isinstance(family.rules, Images) and family.rules.cache) for family in media.families.values()
    ]
    (first, caches), *others = families
    return feature_reader(first, max(family.rules.threads for family, _ in families), caches, others)


def _choose_from(
    recipe: Recipe,
    sources: Sequence[Source],
    entries: Sequence[CacheEntry],
    build_s: Sequence[float | None],
    held_out: bool,
) -> Draw:
    """Raises UserError if the weights, or the share that is held out, leave no examples."""
    is_training = sources is recipe.data.train and not held_out
    mixture = recipe.data.mixture if is_training else None
    by_tokens = mixture is not None and mixture.by == "tokens"
    present = [np.arange(len(entry)) for entry in entries]
    if isinstance(recipe.data.eval, HeldOut) and sources is recipe.data.train:
        share, seed = recipe.data.eval.share, recipe.run.seed
        present = [np.flatnonzero(rows_held_out(e, share, seed, i) == held_out) for i, e in enumerate(entries)]
    tokens = [entry.sizes().tokens[indices] for entry, indices in zip(entries, present, strict=True)]
    shares: list[SourceShare] = []
    if held_out:
        passes, chosen = [1.0] * len(entries), present
    else:
        sizes = [int(each.sum()) if by_tokens else len(each) for each in tokens]
        passes = passes_per_epoch(sizes, sources, mixture, recipe.train.epochs if is_training else None)
        if (count := sum(each * len(part) for each, part in zip(passes, present, strict=True))) > MAX_EXAMPLES:
            raise UserError(
                f"data: the weights of the sources make an epoch of {count:.3g} examples. Fix: lower `weight`"
            )
        shares = [
            SourceShare(
                source_order(len(lengths), recipe.run.seed, i),
                each,
                source.max_epochs or UNBOUNDED if is_training else UNBOUNDED,
                lengths if by_tokens else None,
            )
            for i, (source, lengths, each) in enumerate(zip(sources, tokens, passes, strict=True))
        ]
        chosen = [indices[share.taken(0, 1)] for indices, share in zip(present, shares, strict=True)]
    if not sum(len(indices) for indices in chosen):
        problem = "data: the weights of the sources leave no example at all. Fix: raise `weight`"
        raise UserError("data.eval.share: it holds out no row at all. Fix: raise it" if held_out else problem)
    names = source_names(sources)
    for entry, source, name, each, indices in zip(entries, sources, names, passes, chosen, strict=True):
        entry.report.name, entry.report.weight = name, source.weight
        entry.report.passes, entry.report.taken = round(each, 6), len(indices)
    report = DataReport(tuple(entry.report for entry in entries))
    return Draw(Examples(entries, chosen, report, build_s), entries, present, tokens, shares)


def rows_held_out(entry: CacheEntry, share: float, seed: int, source_index: int) -> NDArray[np.bool_]:
    """Returns (N,) whether an example is of a row that is held out; rows of the same tokens are on the same side.

    round(share * rows) different rows: a function of the rows, the share and the seed.
    """
    _, first, row = np.unique(np.stack([entry.files, entry.rows]), axis=1, return_index=True, return_inverse=True)
    _, content = np.unique(entry.hashes[first], return_inverse=True)  # (rows,), of each row's first example
    count = int(content.max()) + 1
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, source_index, 1])))
    chosen = generator.permutation(count)[: round(share * count)]
    return np.isin(content, chosen)[row.reshape(-1)]


# --- settings that an entry's tokens depend on


def entry_key(recipe: Recipe, source: Source, digest: str, rendering: str) -> str:
    """Returns the sha256 of everything that the tokens, masks and columns of a source depend on."""
    data = recipe.data
    parts = {
        "code": [CODE_VERSION, tokenizers.__version__, transformers.__version__, jinja2.__version__],
        "content": digest,
        "source": source.model_dump(exclude=_NOT_IN_AN_ENTRY),
        "rendering": rendering,
        "length": [data.max_length, data.overlong],
        "bad_rows": [data.on_bad_row, data.max_bad_share],
        "objective": asdict(objective_rows(recipe.objective, recipe.rollouts is not None)),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def rendering_key(renderer: Renderer) -> str:
    """Returns the sha256 of everything that rendering depends on; a vocabulary is large, so once for all sources."""
    fast: Any = renderer.tokenizer
    backend = json.loads(fast.backend_tokenizer.to_str())
    images = None
    if renderer.media:
        in_family = {"threads", "cache", "fps", "max_frames", "max_pixels", "min_pixels", "processor"}
        families = renderer.media.families.values()
        images = [part for one in families for part in (one.settings, one.rules.model_dump(exclude=in_family))]
    parts = {
        "tokenizer": {name: part for name, part in backend.items() if name not in ("truncation", "padding")},
        "special": [renderer.special, renderer.adds_bos],
        "template": dated(renderer.template.text) if renderer.template else None,
        **({"tool_use": dated(renderer.template.tool_use)} if renderer.template and renderer.template.tool_use else {}),
        "today": str(date.today()) if renderer.template and asks_for_today(renderer.template.text) else None,
        "train_on": renderer.train_on,
        **({} if renderer.ends_plain else {"ends_plain": False}),
        **({"images": images} if images else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def entry_metadata(data: Data, opened: OpenedSource, renderer: Renderer) -> dict[str, Any]:
    """Returns the inputs of an entry, for people: `cache list` shows them."""
    return {
        "source": opened.name,
        "split": opened.source.split,
        "format": opened.source.format,
        "tokenizer": renderer.tokenizer.name_or_path or type(renderer.tokenizer).__name__,
        "template": renderer.template.name if renderer.template else None,
        "train_on": renderer.train_on,
        "max_length": data.max_length,
        "overlong": data.overlong,
        "finetune": __version__,
        "code_version": CODE_VERSION,
    }


# --- how often an epoch takes each source


MAX_EXAMPLES = 10**9  # of an epoch: their indices alone are 8 GB


def source_names(sources: Sequence[Source]) -> list[str]:
    """Returns names of sources for metrics and tables: `name`, or the last part of `path`; numbered if not unique."""
    names = []
    for source in sources:
        last = PurePosixPath(source.path.rstrip("/")).name or source.path
        stem = last.split(".")[0] or last
        plain = "".join(character if character.isalnum() or character in "._" else "-" for character in stem)
        names.append(source.name or plain.strip("-") or "source")
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name}-{i}" for i, name in enumerate(names)]


def passes_per_epoch(
    sizes: Sequence[int], sources: Sequence[Source], mixture: Mixture | None, epochs: float | None
) -> list[float]:
    """Returns the passes over each source in an epoch; sizes in the unit of `mixture.by` (any, without a mixture).

    Without a mixture that is `weight`. With one, shares like weight * size^(1/temperature) of as many rows or tokens
    as the sources have together. The amount that `max_epochs` cuts from a source is given by the others in proportion.
    epochs: of the run, if known; None: `max_epochs` is checked when the run's length is known.
    """
    most = [source.max_epochs / epochs if source.max_epochs and epochs else UNBOUNDED for source in sources]
    if mixture is None:
        return [min(source.weight, cap) for source, cap in zip(sources, most, strict=True)]
    size = np.asarray(sizes, np.float64)
    power = 0.0 if mixture.temperature is None else 1.0 / mixture.temperature
    wanted = np.array([source.weight for source in sources]) * np.where(size > 0, size, 0.0) ** power
    wanted[size == 0] = 0.0
    room = np.asarray(most) * size
    return [float(share / n) if n else 0.0 for share, n in zip(filled(wanted, room, size.sum()), size, strict=True)]


def filled(wanted: NDArray[np.float64], room: NDArray[np.float64], total: float) -> NDArray[np.float64]:
    """Distributes `total` in proportion to `wanted`, no part above its `room`; less than `total` if all are full.

    filled([1, 1, 2], [5, inf, inf], 40) -> [5, 11.67, 23.33]
    """
    amounts = np.zeros_like(wanted)
    open_parts = wanted > 0
    while open_parts.any() and total > 0:
        shares = np.zeros_like(wanted)
        shares[open_parts] = wanted[open_parts] / wanted[open_parts].sum() * total
        over = open_parts & (shares > room)
        if not over.any():
            amounts[open_parts] = shares[open_parts]
            break
        amounts[over] = room[over]
        total -= room[over].sum()
        open_parts &= ~over
    return amounts


def check_caps(sources: Sequence[Source], passes: Sequence[float], epochs: float) -> None:
    """Raises UserError if a run of `epochs` passes over the mixture takes a source more often than it may."""
    for source_index, (source, each) in enumerate(zip(sources, passes, strict=True)):
        if source.max_epochs is not None and each * epochs > source.max_epochs * (1 + 1e-6):
            fewer = source.max_epochs / each / epochs
            raise UserError(
                f"data.train[{source_index}] ({source.path}): this run would read it {each * epochs:.2f} times, more "
                f"than its max_epochs ({source.max_epochs:g}). Fix: make the run {1 - fewer:.0%} shorter "
                "(train.max_steps), lower its `weight`, or raise `max_epochs`"
            )
