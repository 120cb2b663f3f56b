"""The same as one page for a browser: no request leaves it, no script but its own runs, whatever the data holds.

An example is a sequence of runs, tokens that are alike: <mark> where trained, <span> where not; each special token is a
run by itself. A run keeps its tokens in attributes, and the page's script takes it apart where someone looks closer:

    <mark data-p="7" data-i="284 220 19" data-n="2 1 1"> = 4</mark>
        position of the first token, ids, lengths of their texts in UTF-16 units (those of JavaScript)
    data-b="1 ⟨E2⟩|2 ⟨80⟩"    bytes of tokens (numbers within the run) that are parts of a character
    <s data-c="202e" ...>     a character that cannot be seen, or not be written in HTML; other <s> are marks before one
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from finetune.data import Example
from finetune.data import Sequence as TokenSequence
from finetune.data.token_text import INVISIBLE, Token, left_out_note, shortened, tokens_of, visible
from finetune.errors import UserError
from finetune.planning.inspect.terminal import COUNTS, epoch_facts, overlong, source_name, source_share
from finetune.planning.inspect.totals import LOSSES, Histogram, Totals
from finetune.planning.inspect.view import SEQUENCES, View

HERE = Path(__file__).parent
SHOWN_TOKENS = 1500  # of one example
CHART_WIDTH, CHART_HEIGHT = 480, 150  # of the bars, in units of the drawing


@dataclass(frozen=True)
class Shown:
    """One sequence of an example as the page shows it."""

    path: str  # with `, chosen` or `, rejected` after it, of a preference
    row: int
    tokens: int
    trained: int
    head: Markup
    left_out: str  # what is not shown of it
    tail: Markup


@dataclass(frozen=True)
class Bar:
    """One bin of a chart, in units of its drawing."""

    x: float
    y: float
    width: float
    height: float
    title: str
    is_over: bool = False  # what is longer than max_length: not an example as it was


@dataclass(frozen=True)
class Chart:
    """A histogram: bars, and labels below them as (x, anchor, text)."""

    title: str
    about: str  # the same in words
    bars: list[Bar]
    ticks: list[tuple[float, str, str]]
    most: str  # what the highest bar counts


def write_page(
    path: Path, view: View, chosen: Sequence[int], packed: Iterable[int], *, borders: bool = False, full: bool = False
) -> None:
    """Write the page with examples `chosen` and rows `packed`. Raises UserError where it cannot be written."""
    text = render_page(view, chosen, packed, borders=borders, full=full)
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written: {error.strerror or error}") from None


def render_page(
    view: View, chosen: Sequence[int], packed: Iterable[int], *, borders: bool = False, full: bool = False
) -> str:
    """The page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(visible=visible, count=lambda value: f"{value:,}", percent=lambda value: f"{value:.1%}")
    environment.filters["ticks"] = _code_in_ticks
    script, style = _file("page.js"), _file("page.css")
    return environment.get_template("page.html.jinja").render(
        script=Markup(script),
        script_hash=_hash(script),
        style=Markup(style),
        style_hash=_hash(style),
        borders=borders,
        totals=view.totals,
        report=view.totals.report,
        **_facts(view),
        examples=[shown for number in chosen for shown in _sequences(view, view.data.examples[number], full)],
        rows=[_packed_row(view, number, full) for number in packed],
    )


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """For the page's content security policy (https://www.w3.org/TR/CSP3/#match-element-to-source-list)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _code_in_ticks(text: str) -> Markup:
    """`name` as the page writes names."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text)))


def _facts(view: View) -> dict[str, Any]:
    """Everything on the page but the examples."""
    totals, recipe = view.totals, view.recipe
    every = totals.report.totals()
    model = recipe.model.name or f"{(recipe.model.config or {})['model_type']}, from scratch"
    return {
        "name": recipe.run.name,
        "about": {
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
        "columns": {key: name for key, name in COUNTS.items() if every[key]},
        "absent": [name for key, name in COUNTS.items() if not every[key]],
        "every": every,
        "source_name": source_name,
        "source_share": source_share,
        "losses": _losses(totals),
    }


def _cards(totals: Totals) -> list[tuple[str, str, str]]:
    """(what, number, more of it)."""
    every, packing, lengths = totals.report.totals(), totals.packing, totals.percentiles
    lost = every["bad"] + every["dropped_overlong"] + every["no_supervised_token"]
    documents = packing.documents_per_row["mean"]
    full = f"{packing.efficiency:.1%} full, {documents:,.1f} documents each" if packing.packed else "one example each"
    return [
        ("examples", f"{totals.examples:,}", f"in an epoch, from {every['rows']:,} rows read"),
        ("tokens", f"{totals.tokens:,}", f"{totals.supervised_tokens:,} of them trained"),
        ("supervised", f"{totals.supervised:.1%}", "of all tokens"),
        ("median length", f"{lengths['median']:,}", f"99 % up to {lengths['p99']:,}, longest {lengths['max']:,}"),
        ("packed rows" if packing.packed else "rows", f"{packing.rows:,}", full),
        ("dropped", f"{lost:,}", "rows and pieces, see below" if lost else "nothing"),
    ]


def _losses(totals: Totals) -> list[tuple[str, str, list[tuple[str, int]]]]:
    """(what happened, what to do, [(source, count)]) of everything that happened at all."""
    sources = totals.report.sources
    found = ((what, hint, [(source_name(s), getattr(s, key)) for s in sources]) for key, (what, hint) in LOSSES.items())
    return [
        (what, hint, [pair for pair in pairs if pair[1]]) for what, hint, pairs in found if any(n for _, n in pairs)
    ]


# --- charts


def _length_chart(totals: Totals) -> Chart:
    edges = [int(edge) for edge in totals.lengths.edges]
    names = [f"{low + 1:,} to {high:,} tokens" for low, high in pairwise(edges)]
    every = max(1, len(names) // 5)  # labels that have room
    labels = {b: f"{edges[b]:,}" for b in range(0, len(edges) - 1, every) if len(edges) - 1 - b > every / 2}
    labels[len(edges) - 1] = f"{edges[-1]:,}"
    lengths = totals.percentiles
    count, what = overlong(totals)
    end = "the last bar ends at max_length" if edges[-1] == totals.max_length else f"max_length {totals.max_length:,}"
    over = f"; {count:,} longer rows {what}" if count else ""
    about = f"median {lengths['median']:,}, 90 % up to {lengths['p90']:,}, longest {lengths['max']:,}; {end}{over}"
    title = f"over max_length ({totals.max_length:,}): {count:,} rows {what}"
    return _chart("Length of an example, in tokens", about, totals.lengths, names, labels, (count, title))


def _share_chart(totals: Totals) -> Chart:
    names = [f"{n * 10} to {n * 10 + 10} % trained" for n in range(10)]
    labels = {b: f"{b * 10} %" for b in range(0, 11, 2)}
    about = f"{totals.supervised:.1%} of all tokens are trained"
    return _chart("Supervised share of an example", about, totals.supervised_share, names, labels, (0, ""))


def _chart(
    title: str,
    about: str,
    histogram: Histogram,
    names: Sequence[str],
    labels: dict[int, str],
    over: tuple[int, str],
) -> Chart:
    """names: of every bin. labels: below an edge, by its number. over: (count, title) of what lies beyond, if any."""
    most = max(*histogram.counts, over[0])
    step = CHART_WIDTH / (len(names) + (1.5 if over[0] else 0))  # a gap before what lies beyond
    counted = zip(histogram.counts, names, strict=True)
    bars = [
        _bar(n * step, step, count / most, f"{name}: {count:,} examples") for n, (count, name) in enumerate(counted)
    ]
    ends = {0: "start"} if over[0] else {0: "start", len(names): "end"}
    ticks = [(round(b * step, 2), ends.get(b, "middle"), text) for b, text in labels.items()]
    if over[0]:
        bars.append(_bar(CHART_WIDTH - step, step, over[0] / most, over[1], is_over=True))
        ticks.append((CHART_WIDTH, "end", "over"))
    return Chart(title, about, bars, ticks, f"{most:,}")


def _bar(x: float, step: float, share: float, title: str, is_over: bool = False) -> Bar:
    """share: of the highest bar; what is not empty can be seen."""
    height = round(max(2.0, CHART_HEIGHT * share) if share else 0.0, 2)
    return Bar(round(x + 1, 2), CHART_HEIGHT - height, round(step - 2, 2), height, title, is_over)


# --- examples


def _sequences(view: View, example: Example, full: bool) -> list[Shown]:
    names = [f", {name}" for name in SEQUENCES] if len(example.sequences) > 1 else [""]
    return [_shown(view, example, *pair, full) for pair in zip(example.sequences, names, strict=True)]


def _shown(view: View, example: Example, sequence: TokenSequence, name: str, full: bool) -> Shown:
    tokens = tokens_of(sequence, view.tokenizer)
    (head, tail), left_out = shortened(tokens, None if full else SHOWN_TOKENS)
    return Shown(
        path=example.path + name,
        row=example.row,
        tokens=len(tokens),
        trained=sequence.num_targets,
        head=tokens_html(head),
        left_out=left_out_note(left_out) if left_out else "",
        tail=tokens_html(tail, len(tokens) - len(tail)),
    )


def _packed_row(view: View, number: int, full: bool) -> dict[str, Any]:
    """A row: its number, its documents with the place that each begins at, and what is left of it."""
    documents, place = [], 0
    for member in view.data.rows[number].tolist():
        for shown in _sequences(view, view.data.examples[member], full):
            documents.append((place, shown))
            place += shown.tokens
    return {
        "number": number,
        "documents": documents,
        "used": place,
        "work": sum(shown.tokens**2 for _, shown in documents),
    }


def tokens_html(tokens: Sequence[Token], first: int = 0) -> Markup:
    """Runs of tokens, see the module; first: position of tokens[0]."""
    found, at = [], first
    for run in _runs(tokens):
        found.append(_run_html(run, at))
        at += len(run)
    return Markup("").join(found)


def _runs(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Tokens alike; a special one is alone."""
    alike = groupby(enumerate(tokens), key=lambda one: (one[1].trained, one[0] if one[1].special else -1))
    return ([token for _, token in run] for _, run in alike)


def _run_html(run: Sequence[Token], at: int) -> Markup:
    name = "mark" if run[0].trained else "span"
    attributes = f' data-p="{at}" data-i="{" ".join(str(token.id) for token in run)}"'
    if len(run) > 1:
        attributes += f' data-n="{" ".join(str(_utf16(token.text)) for token in run)}"'
    if parts := "|".join(f"{n} {visible(token.part)}" for n, token in enumerate(run) if token.part):
        attributes += f' data-b="{html.escape(parts)}"'
    if run[0].special:
        attributes += ' class="x"'
    return Markup(f"<{name}{attributes}>{_text_html(''.join(token.text for token in run))}</{name}>")


def _utf16(text: str) -> int:
    """Length as JavaScript counts it."""
    return len(text) + sum(letter > "\uffff" for letter in text)


_MARKED = re.compile(rf"(\n|\t| +(?=\n|\Z)|{INVISIBLE.pattern})")


def _text_html(text: str) -> str:
    """Escaped, with marks before newlines, tabs and spaces that end a line, in place of what cannot be seen."""
    pieces = _MARKED.split(text)
    return "".join(_mark(piece) if n % 2 else html.escape(piece, quote=False) for n, piece in enumerate(pieces))


def _mark(piece: str) -> str:
    if piece == "\n":
        return "<s></s>\n"
    if piece == "\t":
        return '<s class="t"></s>\t'
    if piece[0] == " ":
        return '<s class="d"></s> ' * len(piece)
    return f'<s data-c="{ord(piece):x}" data-v="U+{ord(piece):04X}"></s>'
