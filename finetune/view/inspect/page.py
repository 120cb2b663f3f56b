"""The HTML page of `inspect`: a file that makes no requests and runs only its own script, for any data."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from finetune.data.samples import Example, Image
from finetune.data.samples import Sequence as TokenSequence
from finetune.data.token_text import image_note, left_out_note, shortened, tokens_of
from finetune.data.visible_text import Token, visible
from finetune.errors import UserError
from finetune.view.inspect.dataset_view import (
    LOSSES,
    DatasetStatistics,
    DatasetView,
    Histogram,
    numbers_of,
)
from finetune.view.inspect.terminal import COUNTS, epoch_facts, overlong, source_name, source_share
from finetune.view.token_html import sequence_names, tokens_html
from finetune.view.web_page import head

HERE = Path(__file__).parent
SHOWN_TOKENS = 1500  # per example
CHART_WIDTH, CHART_HEIGHT = 480, 150  # size of the bars, in SVG units


@dataclass(frozen=True)
class PageSequence:
    """Sequence of an example on the page."""

    path: str
    row: int
    name: str  # chosen, rejected, ...; empty for a single one
    tokens: int
    trained: int
    head: Markup
    left_out: str  # note on the part not shown
    tail: Markup


@dataclass(frozen=True)
class PageExample:
    """An example, its sequences next to each other."""

    sequences: list[PageSequence]
    shared: int  # leading tokens in common
    numbers: str  # label or margin


@dataclass(frozen=True)
class Bar:
    """Bin of a chart, in SVG units."""

    x: float
    y: float
    width: float
    height: float
    title: str
    is_over: bool = False  # longer than max_length: dropped or changed


@dataclass(frozen=True)
class Chart:
    """A histogram."""

    title: str
    summary: str  # in words
    bars: list[Bar]
    ticks: list[tuple[float, str, str]]  # x, anchor, text
    highest: str  # count of the highest bar


def write_page(
    path: Path,
    view: DatasetView,
    chosen: Sequence[int],
    packed: Iterable[int],
    *,
    borders: bool = False,
    full: bool = False,
) -> None:
    """Write the page with examples `chosen` and packed sequences `packed`. Raises UserError if it cannot be written."""
    text = render_page(view, chosen, packed, borders=borders, full=full)
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written: {error.strerror or error}") from None


def render_page(
    view: DatasetView, chosen: Sequence[int], packed: Iterable[int], *, borders: bool = False, full: bool = False
) -> str:
    """Returns the page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(visible=visible, count=lambda value: f"{value:,}", percent=lambda value: f"{value:.1%}")
    environment.filters["ticks"] = _format_code
    script = (HERE / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html.jinja").render(
        script=Markup(script),
        head=head(f"{visible(view.recipe.run.name)}: what the model sees", script=script),
        borders=borders,
        totals=view.totals,
        report=view.totals.report,
        **_summary(view),
        examples=[_page_example(view, view.data.examples[index], full) for index in chosen],
        rows=[_packed_row(view, number, full) for number in packed],
    )


def _format_code(text: str) -> Markup:
    """Turns text in backticks into <code>."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text)))


def _summary(view: DatasetView) -> dict[str, Any]:
    """Returns everything on the page but the examples."""
    totals, recipe = view.totals, view.recipe
    sums = totals.report.totals()
    model = recipe.model.name or f"{(recipe.model.config or {})['model_type']}, from scratch"
    return {
        "name": recipe.run.name,
        "settings": {
            "recipe": str(view.recipe_path),
            "data": f"data.{totals.split}",
            "model": model,
            "tokenizer": recipe.model.tokenizer or model,
            "template": view.template,
            "max_length": f"{totals.max_length:,} tokens",
            "overlong": totals.overlong,
            "packing": "on" if recipe.data.packing else "off",
            "trained on": recipe.objective.train_on,
        },
        "cards": _cards(totals),
        "epoch": epoch_facts(totals),
        "charts": [_length_chart(totals), _share_chart(totals)],
        "columns": {key: name for key, name in COUNTS.items() if sums[key]},
        "absent": [name for key, name in COUNTS.items() if not sums[key]],
        "sums": sums,
        "source_name": source_name,
        "source_share": source_share,
        "losses": _losses(totals),
    }


def _cards(totals: DatasetStatistics) -> list[tuple[str, str, str]]:
    """Returns (name, number, detail) of each card."""
    sums, packing, lengths = totals.report.totals(), totals.packing, totals.percentiles
    lost = sums["bad"] + sums["dropped_overlong"] + sums["no_supervised_token"]
    documents = packing.documents_per_row["mean"]
    full = f"{packing.efficiency:.1%} full, {documents:,.1f} documents each" if packing.packed else "one example each"
    return [
        ("examples", f"{totals.examples:,}", f"per epoch, from {sums['rows']:,} rows read"),
        ("tokens", f"{totals.tokens:,}", f"{totals.supervised_tokens:,} supervised"),
        ("supervised", f"{totals.supervised:.1%}", "of all tokens"),
        ("median length", f"{lengths['median']:,}", f"99 % up to {lengths['p99']:,}, longest {lengths['max']:,}"),
        ("packed sequences" if packing.packed else "sequences", f"{packing.rows:,}", full),
        ("dropped", f"{lost:,}", "rows and pieces, see below" if lost else "none"),
    ]


def _losses(totals: DatasetStatistics) -> list[tuple[str, str, list[tuple[str, int]]]]:
    """Returns (event, advice, [(source, count)]) of every event."""
    sources = totals.report.sources
    counted = [
        (what, hint, [(source_name(s), count) for s in sources if (count := getattr(s, key))])
        for key, (what, hint) in LOSSES.items()
    ]
    return [entry for entry in counted if entry[2]]


# --- charts


def _length_chart(totals: DatasetStatistics) -> Chart:
    edges = [int(edge) for edge in totals.lengths.edges]
    names = [f"{low + 1:,} to {high:,} tokens" for low, high in pairwise(edges)]
    spacing = max(1, len(names) // 5)  # bins between labels, so that they fit
    labels = {b: f"{edges[b]:,}" for b in range(0, len(edges) - 1, spacing) if len(edges) - 1 - b > spacing / 2}
    labels[len(edges) - 1] = f"{edges[-1]:,}"
    lengths = totals.percentiles
    count, what = overlong(totals)
    end = "the last bar ends at max_length" if edges[-1] == totals.max_length else f"max_length {totals.max_length:,}"
    over = f"; {count:,} longer rows {what}" if count else ""
    summary = f"median {lengths['median']:,}, 90 % up to {lengths['p90']:,}, longest {lengths['max']:,}; {end}{over}"
    title = f"over max_length ({totals.max_length:,}): {count:,} rows {what}"
    return _chart("Length of an example, in tokens", summary, totals.lengths, names, labels, (count, title))


def _share_chart(totals: DatasetStatistics) -> Chart:
    names = [f"{n * 10} to {n * 10 + 10} % supervised" for n in range(10)]
    labels = {b: f"{b * 10} %" for b in range(0, 11, 2)}
    summary = f"{totals.supervised:.1%} of all tokens are supervised"
    return _chart("Supervised share of an example", summary, totals.supervised_share, names, labels, (0, ""))


def _chart(
    title: str,
    summary: str,
    histogram: Histogram,
    names: Sequence[str],
    labels: dict[int, str],
    over: tuple[int, str],
) -> Chart:
    """Returns a chart. names: of the bins. labels: by index of the edge. over: (count, title) of a last bar beyond the
    bins, if any."""
    highest = max(*histogram.counts, over[0])
    step = CHART_WIDTH / (len(names) + (1.5 if over[0] else 0))  # a gap before the last bar
    counted = zip(histogram.counts, names, strict=True)
    bars = [
        _bar(n * step, step, count / highest, f"{name}: {count:,} examples") for n, (count, name) in enumerate(counted)
    ]
    ends = {0: "start"} if over[0] else {0: "start", len(names): "end"}
    ticks = [(round(b * step, 2), ends.get(b, "middle"), text) for b, text in labels.items()]
    if over[0]:
        bars.append(_bar(CHART_WIDTH - step, step, over[0] / highest, over[1], is_over=True))
        ticks.append((CHART_WIDTH, "end", "over"))
    return Chart(title, summary, bars, ticks, f"{highest:,}")


def _bar(x: float, step: float, share: float, title: str, is_over: bool = False) -> Bar:
    """Returns a bar. share: of the highest bar; if not 0, the bar is visible."""
    height = round(max(2.0, CHART_HEIGHT * share) if share else 0.0, 2)
    return Bar(round(x + 1, 2), CHART_HEIGHT - height, round(step - 2, 2), height, title, is_over)


# --- examples


def _page_example(view: DatasetView, example: Example, full: bool) -> PageExample:
    names = sequence_names(view.recipe.objective.name, len(example.sequences))
    shared = example.shared_tokens
    sequences = [
        _page_sequence(view, example, sequence, name, shared, full)
        for sequence, name in zip(example.sequences, names, strict=True)
    ]
    return PageExample(sequences, shared, numbers_of(example, view.recipe.objective))


def _page_sequence(
    view: DatasetView, example: Example, sequence: TokenSequence, name: str, shared: int, full: bool
) -> PageSequence:
    tokens = tokens_of(sequence, view.tokenizer)
    if sequence.images:
        seen = _with_pictures(tokens, sequence)
        return PageSequence(example.path, example.row, name, len(tokens), sequence.num_targets, seen, "", Markup())
    (head, tail), left_out = shortened(tokens, None if full else SHOWN_TOKENS)
    begin = Markup('<span class="p">{}</span>').format(tokens_html(head[:shared])) if shared else Markup()
    return PageSequence(
        path=example.path,
        row=example.row,
        name=name,
        tokens=len(tokens),
        trained=sequence.num_targets,
        head=begin + tokens_html(head[shared:], shared),
        left_out=left_out_note(left_out) if left_out else "",
        tail=tokens_html(tail, len(tokens) - len(tail)),
    )


def _with_pictures(tokens: Sequence[Token], sequence: TokenSequence) -> Markup:
    """Returns the text of a sequence with its pictures at their tokens, small and inline."""
    pieces, last = [], 0
    for number, image in enumerate(sequence.images, start=1):
        pieces += [tokens_html(tokens[last : image.begin], last), _picture(image, number)]
        last = image.end
    return Markup().join([*pieces, tokens_html(tokens[last:], last)])


def _picture(image: Image, number: int) -> Markup:
    from finetune.data.images.image_files import BROKEN, thumbnails

    note = image_note(image, number)
    try:
        source = base64.b64encode(thumbnails([image.source])).decode()
    except BROKEN as error:
        return Markup("<span>[{}: {}]</span>").format(note, visible(str(error)))
    return Markup('<img src="data:image/png;base64,{}" alt="{}" title="{}">').format(source, note, note)


def _packed_row(view: DatasetView, number: int, full: bool) -> dict[str, Any]:
    """Returns a packed sequence: its documents with their first token's offset, tokens used, attention work."""
    documents, start = [], 0
    for member in view.data.rows[number].tolist():
        for shown in _page_example(view, view.data.examples[member], full).sequences:
            documents.append((start, shown))
            start += shown.tokens
    return {
        "number": number,
        "documents": documents,
        "used": start,
        "work": sum(shown.tokens**2 for _, shown in documents),
    }
