"""`score`: applies a finished reward model or classifier to the rows of a file: pairs, answers or texts.

Letters: B sequences of a forward, T tokens of the longest, N labels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from rich.console import Console
from rich.progress import track
from rich.table import Table

from finetune.checkpoints.trained import is_scoring
from finetune.data.chat.renderer import Rendered, Renderer, build_renderer
from finetune.data.formats.detect import detect_format, parse_row
from finetune.data.samples import BadRow, Labelled, Preference, Ranked
from finetune.data.sources.source import SourceReader
from finetune.errors import RunFailure, UserError
from finetune.models.tokenizer import read_tokenizer
from finetune.models.wrapped import output_head
from finetune.objectives.ranking import rounding_of, score_tolerance, share_of_best
from finetune.recipe.schema import Source
from finetune.release.export.loading import default_device, load_trained, model_folder
from finetune.utils import unwrap_peft

_FORMAT_ROWS = 100  # rows from which the format is detected
_WINDOW = 512  # rows whose sequences are scored together, the longest first
_BATCH_TOKENS = 16_384  # per forward, padding included
_FORMATS = {  # {is a classifier: formats}, in addition to plain texts and answers
    True: ("classification", "messages", "text", "tokens"),
    False: ("preference", "comparison", "ranked", "unpaired", "messages", "prompt_completion", "text", "tokens"),
}


@dataclass(frozen=True)
class Scorer:
    """Reward model or classifier with its tokenizer."""

    model: Any  # transformers' or peft's
    renderer: Renderer
    labels: tuple[str, ...]

    @property
    def is_classifier(self) -> bool:
        return len(self.labels) > 1

    def shares(self, scores: NDArray[np.float32]) -> list[float]:  # (N,)
        """Returns each score's share of the point for the best: 1, or less if rounding cannot tell them apart."""
        row = torch.from_numpy(scores)[None].double()
        return share_of_best(row, score_tolerance(row, rounding_of(self.model.dtype)))[0].tolist()

    @torch.no_grad()
    def scores(self, sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:  # (len(sequences), N)
        """Returns the scores at the last token of each, in order."""
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
        scores = np.zeros((len(sequences), len(self.labels)), np.float32)
        base, head, device = unwrap_peft(self.model).base_model, output_head(self.model), self.model.device
        while order:
            longest = len(sequences[order[0]])
            size = max(1, _BATCH_TOKENS // longest)
            batch, order = order[:size], order[size:]
            lengths = torch.tensor([len(sequences[i]) for i in batch])
            input_ids = torch.zeros(len(batch), longest, dtype=torch.int64)
            for row, i in zip(input_ids, batch, strict=True):
                row[: len(sequences[i])] = torch.from_numpy(sequences[i].astype(np.int64))
            mask = (torch.arange(longest) < lengths[:, None]).long()
            hidden = base(input_ids=input_ids.to(device), attention_mask=mask.to(device), use_cache=False)[0]  # (B,T,D)
            ends = hidden[torch.arange(len(batch), device=device), (lengths - 1).to(device)]
            scores[batch] = head(ends).float().cpu().numpy()
        return scores


def load_scorer(run_dir: Path) -> Scorer:
    """Returns the model of a run directory or a model folder. Raises UserError if it has no score head."""
    folder = model_folder(run_dir)
    if not is_scoring(folder):
        raise UserError(
            f"{run_dir}: this model generates text and has no score head. Fix: give a reward model or a classifier, or "
            "use `finetune generate`"
        )
    model = load_trained(folder)
    labels = tuple(unwrap_peft(model).config.id2label.values())
    train_on = "all" if len(labels) > 1 else "assistant"
    renderer = build_renderer(read_tokenizer(folder), None, train_on, is_scored=len(labels) > 1)
    return Scorer(model.to(default_device()).eval(), renderer, labels)


def source_of(path: str, format: str, limit: int | None) -> Source:
    """Returns the file as a recipe would have it. Raises UserError for an unknown format."""
    try:
        return Source.model_validate({"path": path, "format": format, "limit": limit})
    except ValidationError:
        raise UserError(f"--format: unknown format {format!r}. Fix: give `auto`, which detects it") from None


@dataclass(frozen=True)
class ScoredRow:
    """A row's position in the file, its sequences as texts, and its label."""

    place: tuple[str, int]  # file and row
    kind: str  # pair | ranked | text
    sequences: tuple[Rendered, ...]
    label: bool | int | str | None = None


def score_file(run_dir: Path, data: Source, output: Path | None, console: Console) -> dict[str, float]:
    """Score every row of a file, write a JSON object for each to `output`, whole or absent, and return the metrics.

    Raises UserError, and RunFailure if the disk is full.
    """
    scorer, reader, metrics = load_scorer(run_dir), SourceReader(data), Metrics()
    rows = _rendered_rows(scorer, data, reader)
    partial = output.with_name(f"{output.name}.partial") if output else None
    try:
        with ExitStack() as stack:
            file = stack.enter_context(partial.open("w", encoding="utf-8")) if partial else None
            total = reader.estimated_rows()
            shown = iter(track(rows, "scoring", total, console=console, disable=not console.is_terminal))
            while window := list(islice(shown, _WINDOW)):
                tokens = scorer.renderer.tokenize([sequence for row in window for sequence in row.sequences])
                scores = scorer.scores([of_sequence[0] for of_sequence in tokens])  # (sequences, N)
                ends = np.cumsum([len(row.sequences) for row in window])
                for row, of_row in zip(window, np.split(scores, ends[:-1]), strict=True):
                    result = _result(scorer, row, of_row)
                    metrics.add(result)
                    if file:
                        file.write(json.dumps({"path": row.place[0], "row": row.place[1], **result}) + "\n")
        if partial and output:
            partial.replace(output)
    except OSError as error:
        raise RunFailure(f"{output} could not be written: {error}. Fix: free space or give another --output") from None
    finally:
        if partial:
            partial.unlink(missing_ok=True)
    return metrics.means()


def _rendered_rows(scorer: Scorer, data: Source, reader: SourceReader) -> Iterator[ScoredRow]:
    """Yields the rows of a file. Raises UserError with the row that cannot be read."""
    rows = reader.rows()
    head = list(islice(rows, _FORMAT_ROWS))
    if not head:
        raise UserError(f"{data.path}: has no rows. Fix: give a file with rows")
    format, columns = data.format, data.columns
    if format == "auto":
        detected = detect_format([row for _, _, row in head], columns, _FORMATS[scorer.is_classifier])
        format, columns = detected.format, detected.columns
    for path, number, row in chain(head, rows):
        try:
            sample, label, kind = parse_row(row, format, columns), None, "text"
            if isinstance(sample, Labelled):
                sample, label = sample.sample, sample.label
            elif isinstance(sample, Preference | Ranked):
                kind = "pair" if isinstance(sample, Preference) else "ranked"
            answers = sample.answers if isinstance(sample, Ranked) else (sample,)
            sequences = []
            for drawn in map(scorer.renderer.draw, answers):
                if len(drawn) > 1:
                    raise BadRow(
                        "the chat template rewrites history, so this conversation is several texts. Fix: give its last "
                        "turn"
                    )
                sequences += drawn[0]
            yield ScoredRow((path, number), kind, tuple(sequences), label)
        except (BadRow, UserError) as error:
            raise UserError(f"{path}:{number}: {error}") from None


def _result(scorer: Scorer, row: ScoredRow, scores: NDArray[np.float32]) -> dict[str, Any]:
    """Returns the output for a row. scores: (sequences, N)."""
    if scorer.is_classifier:
        probabilities = np.exp(scores[0] - np.logaddexp.reduce(scores[0]))
        best = scorer.labels[int(scores[0].argmax())]
        result = {"label": best, "probabilities": dict(zip(scorer.labels, probabilities.tolist(), strict=True))}
        if row.label is None:
            return result
        given = scorer.labels[row.label] if isinstance(row.label, int) else row.label
        share = scorer.shares(scores[0])[scorer.labels.index(given)] if given in scorer.labels else 0.0
        return {**result, "given": given, "correct": share}
    values = scores[:, 0].tolist()
    if row.kind == "pair":
        chosen, rejected = values
        correct = scorer.shares(scores[:, 0])[0]
        return {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "correct": correct}
    return {"scores": values} if row.kind == "ranked" else {"score": values[0]}


class Metrics:
    """Means of the rows' numbers; shares of the labels."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._rows = 0

    def add(self, result: Mapping[str, Any]) -> None:
        self._rows += 1
        numbers = {name: value for name, value in result.items() if isinstance(value, bool | float)}
        if "correct" in numbers:
            numbers["accuracy"] = numbers.pop("correct")
        numbers |= {f"share of {name}": result["label"] == name for name in result.get("probabilities", ())}
        for name, value in numbers.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + float(value), count + 1)

    def means(self) -> dict[str, float]:
        return {"rows": self._rows, **{name: total / count for name, (total, count) in self._sums.items()}}


def show_metrics(console: Console, metrics: Mapping[str, float]) -> None:
    table = Table("metric", "mean")
    for name, value in metrics.items():
        table.add_row(name, f"{value:,}" if name == "rows" else f"{value:.4f}")
    console.print(table)
