"""The HTML page of `inspect`: a file that makes no requests and runs only its own script, for any data."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from finetune.data.samples import Clip, Example, Medium, Video
from finetune.data.samples import Sequence as TokenSequence
from finetune.data.token_text import left_out_note, media_note, shortened, tokens_of
from finetune.data.visible_text import Token, visible
from finetune.desk.view.inspect.dataset_view import (
    LOSSES,
    DatasetStatistics,
    DatasetView,
    Histogram,
    numbers_of,
)
from finetune.desk.view.inspect.terminal import COUNTS, epoch_facts, overlong, source_name, source_share
from finetune.desk.view.token_html import sequence_names, tokens_html
from finetune.desk.view.web_page import render
from finetune.errors import UserError

if TYPE_CHECKING:
    from finetune.data.media.expansion import RowMedia

HERE = Path(__file__).parent
SHOWN_TOKENS = 1500  # per example
CHART_WIDTH, CHART_HEIGHT = 480, 150  # size of the bars, in SVG units


def write_page(
    path: Path,
    view: DatasetView,
    chosen: Sequence[int],
    packed: Iterable[int],
    *,
    borders: bool = False,
    full: bool = False,
) -> None:
    """Writes the page with examples `chosen` and packed sequences `packed`. Raises UserError if it cannot."""
    rows: list[dict[str, Any]] = []
    for number in packed:
        documents, start = [], 0  # with the place of their first token
        for member in view.data.rows[number].tolist():
            for shown in _page_example(view, view.data.examples[member], full)["sequences"]:
                documents.append((start, shown))
                start += shown["tokens"]
        work = sum(shown["tokens"] ** 2 for _, shown in documents)  # of attention
        rows.append({"number": number, "documents": documents, "used": start, "work": work})
    page = render(
        "inspect/page.html.jinja",
        f"{visible(view.recipe.run.name)}: what the model sees",
        script=(HERE / "page.js").read_text(encoding="utf-8"),
        borders=borders,
        totals=view.totals,
        report=view.totals.report,
        **_summary(view),
        examples=[_page_example(view, view.data.examples[index], full) for index in chosen],
        rows=rows,
    )
    try:
        path.write_text(page, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(
            f"--html {path}: cannot be written: {error.strerror or error}. Fix: make room or give another path"
        ) from None


def _summary(view: DatasetView) -> dict[str, Any]:
    """Returns everything on the page but the examples."""
    totals, recipe = view.totals, view.recipe
    sums, packing, lengths = totals.report.totals(), totals.packing, totals.percentiles
    model = recipe.model.name or f"{(recipe.model.config or {})['model_type']}, from scratch"
    lost = sums["bad"] + sums["dropped_overlong"] + sums["no_supervised_token"]
    documents = f"{packing.documents_per_row['mean']:,.1f} documents each"
    losses = [  # (event, advice, [(source, count)])
        (what, hint, [(source_name(s), count) for s in totals.report.sources if (count := getattr(s, key))])
        for key, (what, hint) in LOSSES.items()
    ]
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
        "cards": [  # name, number, detail
            ("examples", f"{totals.examples:,}", f"per epoch, from {sums['rows']:,} rows read"),
            ("tokens", f"{totals.tokens:,}", f"{totals.supervised_tokens:,} supervised"),
            ("supervised", f"{totals.supervised:.1%}", "of all tokens"),
            ("median length", f"{lengths['median']:,}", f"99 % up to {lengths['p99']:,}, longest {lengths['max']:,}"),
            (
                "packed sequences" if packing.packed else "sequences",
                f"{packing.rows:,}",
                f"{packing.efficiency:.1%} full, {documents}" if packing.packed else "one example each",
            ),
            ("dropped", f"{lost:,}", "rows and pieces, see below" if lost else "none"),
        ],
        "epoch": epoch_facts(totals),
        "charts": _charts(totals),
        "columns": {key: name for key, name in COUNTS.items() if sums[key]},
        "absent": [name for key, name in COUNTS.items() if not sums[key]],
        "sums": sums,
        "source_name": source_name,
        "source_share": source_share,
        "losses": [entry for entry in losses if entry[2]],
    }


# --- charts


def _charts(totals: DatasetStatistics) -> list[dict[str, Any]]:
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
    beyond = (count, f"over max_length ({totals.max_length:,}): {count:,} rows {what}")
    shares = [f"{n * 10} to {n * 10 + 10} % supervised" for n in range(10)]
    share, at = f"{totals.supervised:.1%} of all tokens are supervised", {b: f"{b * 10} %" for b in range(0, 11, 2)}
    return [
        _chart("Length of an example, in tokens", summary, totals.lengths, names, labels, beyond),
        _chart("Supervised share of an example", share, totals.supervised_share, shares, at, (0, "")),
    ]


def _chart(
    title: str,
    summary: str,
    histogram: Histogram,
    names: Sequence[str],
    labels: dict[int, str],
    over: tuple[int, str],
) -> dict[str, Any]:
    """Returns a chart, in SVG units. names: of the bins. labels: by index of the edge. over: (count, title) of a last
    bar beyond the bins, if any."""
    highest = max(*histogram.counts, over[0])
    step = CHART_WIDTH / (len(names) + (1.5 if over[0] else 0))  # a gap before the last bar

    def bar(x: float, count: int, title: str, is_over: bool = False) -> dict[str, Any]:
        height = round(max(2.0, CHART_HEIGHT * count / highest) if count else 0.0, 2)  # visible if not 0
        sizes = {"x": round(x + 1, 2), "y": CHART_HEIGHT - height, "width": round(step - 2, 2), "height": height}
        return {**sizes, "title": title, "is_over": is_over}

    counted = enumerate(zip(histogram.counts, names, strict=True))
    bars = [bar(n * step, count, f"{name}: {count:,} examples") for n, (count, name) in counted]
    ends = {0: "start"} if over[0] else {0: "start", len(names): "end"}
    ticks = [(round(b * step, 2), ends.get(b, "middle"), text) for b, text in labels.items()]
    if over[0]:
        bars.append(bar(CHART_WIDTH - step, *over, is_over=True))
        ticks.append((CHART_WIDTH, "end", "over"))
    return {"title": title, "summary": summary, "bars": bars, "ticks": ticks, "highest": f"{highest:,}"}


# --- examples


def _page_example(view: DatasetView, example: Example, full: bool) -> dict[str, Any]:
    names = sequence_names(view.recipe.objective.name, len(example.sequences))
    shared, sequences = example.shared_tokens, []
    for sequence, name in zip(example.sequences, names, strict=True):
        tokens, note, tail = tokens_of(sequence, view.renderer.tokenizer), "", Markup()
        if sequence.media:
            begin = with_pictures(tokens, sequence, view.renderer.media)
        else:
            (first, last), left_out = shortened(tokens, None if full else SHOWN_TOKENS)
            common = Markup('<span class="p">{}</span>').format(tokens_html(first[:shared])) if shared else Markup()
            begin, tail = common + tokens_html(first[shared:], shared), tokens_html(last, len(tokens) - len(last))
            note = left_out_note(left_out) if left_out else ""
        shown = {"path": example.path, "row": example.row, "name": name, "head": begin, "left_out": note, "tail": tail}
        sequences.append({**shown, "tokens": len(tokens), "trained": sequence.num_targets})
    return {"sequences": sequences, "shared": shared, "numbers": numbers_of(example, view.recipe.objective)}


def with_pictures(tokens: Sequence[Token], sequence: TokenSequence, media: RowMedia | None = None) -> Markup:
    """Returns the text of a sequence with its pictures at their tokens, small and inline, its clips to play, and frames
    of its videos. media: that which read the row, of which videos need the frames that are seen."""
    if not sequence.media:
        return tokens_html(tokens)
    pieces, last = [], 0
    for number, medium in enumerate(sequence.media, start=1):
        pieces += [tokens_html(tokens[last : medium.begin], last), _shown(medium, media_note(medium, number), media)]
        last = medium.end
    return Markup().join([*pieces, tokens_html(tokens[last:], last)])


def _shown(medium: Medium, note: str, media: RowMedia | None) -> Markup:
    """Returns a small picture, or a clip to play, with its note; the reason in its place if it cannot be read."""
    if isinstance(medium, Video):
        return _film(medium, note, media)
    if isinstance(medium, Clip):
        from finetune.data.media.audio_files import broken, playable

        unreadable = broken()
    else:
        from finetune.data.media.image_files import BROKEN as unreadable
        from finetune.data.media.image_files import thumbnails
    try:
        if isinstance(medium, Clip):
            source = base64.b64encode(playable(medium)).decode()
            return Markup('<audio controls src="data:audio/wav;base64,{}" title="{}"></audio>').format(source, note)
        source = base64.b64encode(thumbnails([medium.source])).decode()
        return Markup('<img src="data:image/png;base64,{}" alt="{}" title="{}">').format(source, note, note)
    except unreadable as error:
        return Markup("<span>[{}: {}]</span>").format(note, visible(str(error)))


def _film(video: Video, note: str, media: RowMedia | None) -> Markup:
    """Returns some of the frames that are seen of a video, side by side, with its note."""
    from finetune.data.media.video_files import broken, film

    family: Any = media and media.families["video"]
    try:
        source = base64.b64encode(film(video, family.frames_of(video))).decode()
    except broken() as error:
        return Markup("<span>[{}: {}]</span>").format(note, visible(str(error)))
    return Markup('<img class="film" src="data:image/png;base64,{}" alt="{}" title="{}">').format(source, note, note)
