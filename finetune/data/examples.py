"""From a recipe's sources to tokenised examples on disk: read once, cached by everything that could change them.

An entry of the cache is a folder of flat arrays (`T` tokens and `N` examples of one source) that numpy maps:

    input_ids.npy  (T,) int32         offsets.npy  (N + 1,) int64, example i is [offsets[i], offsets[i + 1])
    trained.npy    (T,) bool          files.npy    (N,) int32, number in the report's `files`
    report.json                       rows.npy     (N,) int64

Weights and seeds are not part of an entry: they choose among its examples afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import tokenizers
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune.data.chat import UNTRAINED, Rendered, Renderer, Tokens, labels_of, renderer
from finetune.data.chat_template import resolve_template
from finetune.data.formats import check_columns, parse_row
from finetune.data.report import Report, SourceReport
from finetune.data.samples import BadRow
from finetune.data.show import plain_text
from finetune.data.sources import Opened
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.schema import Source

__all__ = ["UNTRAINED", "Example", "Examples", "Report", "SourceReport", "cache_root", "prepare_examples"]

CODE_VERSION = 1  # raise it whenever the same row would give other tokens or another mask
ROWS_AT_ONCE = 1000  # handed to the tokenizer in one call, which spreads them over the cores
BAD_ROWS_LISTED = 10
ARRAYS = ("input_ids", "trained", "offsets", "files", "rows")


@dataclass(frozen=True)
class Example:
    """One document, ready for `collate`."""

    path: str  # file or dataset
    row: int  # its line or row there, from 1
    input_ids: NDArray[np.int32]  # (T,)
    labels: NDArray[np.int32]  # (T,) the id where trained, else -100; never trained at 0


@dataclass(frozen=True)
class _Entry:
    """One source's folder of the cache, mapped into memory."""

    input_ids: NDArray[np.int32]  # (T,)
    trained: NDArray[np.bool_]  # (T,)
    offsets: NDArray[np.int64]  # (N + 1,)
    files: NDArray[np.int32]  # (N,)
    rows: NDArray[np.int64]  # (N,)
    names: tuple[str, ...]  # of files
    report: SourceReport

    def example(self, i: int) -> Example:
        place = slice(self.offsets[i], self.offsets[i + 1])
        ids = np.array(self.input_ids[place])  # a copy: torch wants memory it may write to
        return Example(self.names[self.files[i]], int(self.rows[i]), ids, labels_of(ids, self.trained[place]))


class Examples:
    """The examples of an epoch, source after source, chosen by `weight`; a sequence that reads from disk.

    lengths, num_trained: (N,) int64, tokens and trained tokens of every example. report: what was read and dropped.
    """

    def __init__(self, entries: Sequence[_Entry], chosen: Sequence[NDArray[np.int64]], report: Report):
        self._entries = tuple(entries)
        self._source = np.repeat(np.arange(len(chosen)), [len(c) for c in chosen])  # (N,) entry of an example
        self._within = np.concatenate(chosen)  # (N,) its number there
        self.report = report
        per_entry = [_counts(entry) for entry in entries]
        self.lengths = np.concatenate([lengths[c] for (lengths, _), c in zip(per_entry, chosen, strict=True)])
        self.num_trained = np.concatenate([trained[c] for (_, trained), c in zip(per_entry, chosen, strict=True)])

    def __len__(self) -> int:
        return len(self._within)

    def __getitem__(self, i: int) -> Example:
        """Example `i`; raises IndexError beyond the end, so that a for loop ends."""
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of {len(self)}")
        return self._entries[self._source[i]].example(int(self._within[i]))

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))


def _counts(entry: _Entry) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(tokens, trained tokens) of every example of an entry, (N,) each."""
    trained = np.add.reduceat(entry.trained, entry.offsets[:-1], dtype=np.int64)
    return np.diff(entry.offsets), trained


def prepare_examples(
    recipe: Recipe,
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int], None] | None = None,
) -> Examples:
    """Read, render, mask and tokenise `sources` (`recipe.data.train` or `.eval`), or find it done in the cache.

    Uses no process group: every process may call it at once, the first builds each entry and the others wait at a file
    lock. progress: called with the number of rows done in the source at hand.
    Raises UserError with file and row for data that cannot be used, and where nothing trainable is left.
    """
    for source in sources:
        check_columns(source.format, source.columns)
    template = resolve_template(recipe.model.chat_template, tokenizer)
    made = renderer(tokenizer, template, recipe.objective.train_on)
    entries = [_entry(recipe, source, made, progress) for source in sources]
    chosen = [
        choose(len(entry.rows), source.weight, recipe.run.seed, number)
        for number, (entry, source) in enumerate(zip(entries, sources, strict=True))
    ]
    if not sum(len(numbers) for numbers in chosen):
        raise UserError("data: the weights of the sources leave no example at all; raise `weight`")
    for entry, source, numbers in zip(entries, sources, chosen, strict=True):
        entry.report.weight, entry.report.taken = source.weight, len(numbers)
    return Examples(entries, chosen, Report(tuple(entry.report for entry in entries)))


def choose(count: int, weight: float, seed: int, number: int) -> NDArray[np.int64]:
    """The round(weight * count) examples that an epoch takes of source `number`: whole passes, then a fixed choice.

    choose(4, 1.5, ...) -> 0 1 2 3 and two of them again, always the same two for a seed.
    """
    wanted = round(weight * count)
    passes, rest = divmod(wanted, count) if count else (0, 0)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number])))
    again = np.sort(generator.permutation(count)[:rest])
    return np.concatenate([np.tile(np.arange(count), passes), again]).astype(np.int64)


# --- the cache


def cache_root() -> Path:
    """$FINETUNE_CACHE, or ~/.cache/finetune."""
    return Path(os.environ.get("FINETUNE_CACHE") or "~/.cache/finetune").expanduser()


def _entry(recipe: Recipe, source: Source, made: Renderer, progress: Callable[[int], None] | None) -> _Entry:
    opened = Opened(source)
    folder = cache_root() / "data" / _key(recipe, opened, made)
    if not _is_complete(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # The lock stays behind on purpose: to remove it would let a third process lock a file of the same name.
            with filelock.FileLock(folder.with_suffix(".lock")):
                if not _is_complete(folder):
                    _build(folder, recipe, opened, made, progress)
        except OSError as error:
            raise UserError(
                f"{error.filename or folder}: the data cache cannot be written: {error.strerror or error}; "
                "set FINETUNE_CACHE to a folder with room"
            ) from None
    return _load(folder)


def _key(recipe: Recipe, opened: Opened, made: Renderer) -> str:
    """sha256 of everything that the tokens and masks of a source depend on."""
    fast: Any = made.tokenizer
    backend = json.loads(fast.backend_tokenizer.to_str())
    data, tokenizer = recipe.data, {k: v for k, v in backend.items() if k not in ("truncation", "padding")}
    parts = {
        "code": [CODE_VERSION, tokenizers.__version__, transformers.__version__],
        "content": opened.digest(),
        "source": opened.source.model_dump(exclude={"weight"}),
        "tokenizer": [tokenizer, made.special, made.adds_bos],
        "template": made.template.text if made.template else None,
        "train_on": made.train_on,
        "length": [data.max_length, data.overlong],
        "bad_rows": [data.on_bad_row, data.max_bad_share],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _is_complete(folder: Path) -> bool:
    return all((folder / f"{name}.npy").is_file() for name in ARRAYS) and (folder / "report.json").is_file()


def _build(
    folder: Path, recipe: Recipe, opened: Opened, made: Renderer, progress: Callable[[int], None] | None
) -> None:
    """Write an entry beside its place, then move it there: an entry is complete or absent."""
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        building = _Building(recipe, opened.source, made)
        building.run(opened, progress)
        temporary.mkdir()
        for name, array in building.arrays().items():
            np.save(temporary / f"{name}.npy", array, allow_pickle=False)
        about = {"files": building.names, "report": asdict(building.report)}
        (temporary / "report.json").write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # what is left of an entry that someone deleted in part
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _load(folder: Path) -> _Entry:
    about = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS}
    return _Entry(**arrays, names=tuple(about["files"]), report=SourceReport(**about["report"]))


# --- building an entry

_Place = tuple[str, int]  # (file or dataset, row)


class _Building:
    """The examples of one source as they are made."""

    def __init__(self, recipe: Recipe, source: Source, made: Renderer):
        self.data, self.source, self.made = recipe.data, source, made
        self.report = SourceReport(source.path)
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}  # of names
        self._kept: list[tuple[int, int, Tokens]] = []  # file number, row, tokens
        self._untrained: tuple[_Place, Tokens] | None = None  # an example of those without a trained token

    def run(self, opened: Opened, progress: Callable[[int], None] | None) -> None:
        """Raises UserError for bad rows beyond what the recipe allows, and where nothing is left."""
        rendered = self._rendered(opened)
        while chunk := list(islice(rendered, ROWS_AT_ONCE)):
            tokens = self.made.tokenise([one for _, one in chunk])
            for (place, _), found in zip(chunk, tokens, strict=True):
                self._keep(place, found)
            if progress:
                progress(self.report.rows)
        self._check_share()
        self._check_rest()

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of an entry by name."""
        lengths = [len(ids) for _, _, (ids, _) in self._kept]
        return {
            "input_ids": np.concatenate([ids for _, _, (ids, _) in self._kept]),
            "trained": np.concatenate([trained for _, _, (_, trained) in self._kept]),
            "offsets": np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            "files": np.array([file for file, _, _ in self._kept], np.int32),
            "rows": np.array([row for _, row, _ in self._kept], np.int64),
        }

    def _rendered(self, opened: Opened) -> Iterator[tuple[_Place, Rendered]]:
        """Rows as strings with spans, in the order of the source; bad ones are left out and counted."""
        for label, number, row in opened.rows(self._bad):
            try:
                sample = parse_row(row, self.source.format, self.source.columns)
                rendered = self.made.draw(sample)
            except BadRow as error:
                self._bad(label, number, str(error))
            except UserError as error:
                raise UserError(f"{label}:{number}: {error}") from None
            else:
                self.report.rows += 1
                yield (label, number), rendered

    def _bad(self, label: str, number: int, message: str) -> None:
        found = f"{label}:{number}: {message}"
        if self.data.on_bad_row == "error":
            raise UserError(f"{found}\n(`data.on_bad_row: skip` leaves such rows out and counts them)")
        self.report.rows += 1
        self.report.bad += 1
        if len(self.report.bad_rows) < BAD_ROWS_LISTED:
            self.report.bad_rows.append(found)

    def _keep(self, place: _Place, tokens: Tokens) -> None:
        for ids, trained in self._fitted(place, tokens):
            trained = trained.copy()
            trained[:1] = False  # the first token of a piece is predicted by nothing, too
            if not trained.any():
                self.report.no_supervised_token += 1
                self._untrained = self._untrained or (place, (ids, trained))
                continue
            self._kept.append((self._number(place[0]), place[1], (ids, trained)))
            self.report.examples += 1
            self.report.tokens += len(ids)
            self.report.supervised_tokens += int(trained.sum())

    def _fitted(self, place: _Place, tokens: Tokens) -> Iterator[Tokens]:
        """The pieces of at most max_length tokens that `overlong` makes of an example."""
        (ids, trained), most = tokens, self.data.max_length
        if len(ids) <= most:
            yield tokens
        elif self.data.overlong == "drop":
            self.report.dropped_overlong += 1
        elif self.data.overlong == "truncate":
            self.report.truncated += 1
            yield ids[:most], trained[:most]
        elif self.data.overlong == "split":
            self.report.split += 1
            for begin in range(0, len(ids), most):
                yield ids[begin : begin + most], trained[begin : begin + most]
        else:
            raise UserError(
                f"{place[0]}:{place[1]}: {len(ids)} tokens, but data.max_length is {most}; raise it, or set "
                "data.overlong to drop, truncate or split"
            )

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]

    def _check_share(self) -> None:
        report, most = self.report, self.data.max_bad_share
        if report.rows and report.bad > most * report.rows:
            listed = "\n".join(f"  {line}" for line in report.bad_rows)
            raise UserError(
                f"{self.source.path}: {report.bad} of {report.rows} rows are bad, more than data.max_bad_share "
                f"({most:g}) allows. The first of them:\n{listed}"
            )

    def _check_rest(self) -> None:
        """An error where no example is left, with one that was dropped and its mask."""
        report = self.report
        if report.examples:
            return
        message = (
            f"{self.source.path}: none of its {report.rows} rows can be trained on: {report.bad} bad, "
            f"{report.dropped_overlong} longer than data.max_length ({self.data.max_length}), "
            f"{report.no_supervised_token} without a trained token"
        )
        if self._untrained:
            (label, number), tokens = self._untrained
            shown = plain_text(*tokens, self.made.tokenizer)
            message += f".\n{label}:{number}, with [[ ]] around what is trained:\n{shown}"
        raise UserError(message)
