"""Examples, packed rows and totals in a terminal; without colours what is trained stands in [[ ]]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from rich.console import Console, Group
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from finetune.data import SourceReport, render_rich
from finetune.data.token_text import Look, visible
from finetune.planning.inspect.totals import LOSSES, Histogram, Totals
from finetune.planning.inspect.view import SEQUENCES, View

COUNTS = {
    "rows": "rows read",
    "bad": "bad",
    "dropped_overlong": "dropped overlong",
    "truncated": "truncated",
    "split": "split",
    "no_supervised_token": "without a trained token",
    "unrolled": "unrolled",
    "duplicates": "duplicates",
    "examples": "examples",
    "taken": "taken in an epoch",
    "tokens": "tokens",
    "supervised_tokens": "supervised tokens",
}
SOURCES_IN_A_TABLE = 3  # more are another table: none is cut
BAR_WIDTH = 40
EIGHTHS = " ▏▎▍▌▋▊▉"


def print_examples(console: Console, view: View, chosen: Iterable[int], look: Look) -> None:
    """A panel for each, and what the colours say."""
    shown = [view.data.examples[number] for number in chosen]
    for example in shown:
        tokens = f"{example.num_tokens:,} tokens, {example.num_targets:,} trained"
        title = Text(visible(f"{example.path}:{example.row}   {tokens}"))
        parts: list[Text | Rule] = []
        for name, sequence in zip(SEQUENCES, example.sequences, strict=False):
            if len(example.sequences) > 1:
                parts.append(Rule(Text(f"{name}, {len(sequence.input_ids):,} tokens"), align="left", style="cyan"))
            parts.append(render_rich(sequence, view.tokenizer, look))
        console.print(Panel(Group(*parts), title=title, title_align="left"))
    if shown:
        console.print(_legend(look))


def _legend(look: Look) -> Text:
    if not look.colour:
        return Text("[[trained]]  context  ⏎ newline, ⇥ tab, · space that is trained and ends a line")
    legend = Text.assemble(("trained", "bold green"), "  ", ("context", "dim"), "  ", ("special token", "magenta"))
    return legend.append("  ⏎ newline, ⇥ tab, · space that is trained and ends a line", style="dim")


def print_packed_rows(console: Console, view: View, numbers: Iterable[int], look: Look) -> None:
    """Rows as the model sees them: documents end to end, each from position 0, attention within it only."""
    most = view.totals.max_length
    for number in numbers:
        examples = [view.data.examples[member] for member in view.data.rows[number].tolist()]
        documents = [(example, sequence) for example in examples for sequence in example.sequences]
        parts, place = [], 0
        for n, (example, sequence) in enumerate(documents, start=1):
            end = place + len(sequence.input_ids)
            label = f"document {n}  {example.path}:{example.row}  places {place:,} to {end - 1:,}, positions from 0"
            parts += [
                Rule(Text(visible(label)), align="left", style="cyan"),
                render_rich(sequence, view.tokenizer, look),
            ]
            place = end
        work = f"attention work {sum(len(sequence.input_ids) ** 2 for _, sequence in documents):,}"
        title = f"row {number}   {len(documents)} documents, {place:,} of {most:,} tokens, {work}"
        console.print(Panel(Group(*parts), title=Text(title), title_align="left", border_style="cyan"))


def print_totals(console: Console, view: View) -> None:
    """Tables of what was read, dropped and kept, of lengths and of rows; then bad rows and notes."""
    totals = view.totals
    sources = totals.report.sources
    for begin in range(0, len(sources), SOURCES_IN_A_TABLE):
        console.print()
        console.print(_sources(totals, sources[begin : begin + SOURCES_IN_A_TABLE]))
    for table in (
        _tokens(totals),
        _bars(totals.lengths, "Lengths (tokens)", _length_labels(totals), totals),
        _bars(totals.supervised_share, "Supervised share of an example", _share_labels(), None),
    ):
        console.print()
        console.print(table)
    console.print()
    for source in sources:
        _print_bad_rows(console, source)
    for key, (what, hint) in LOSSES.items():
        if count := totals.report.totals()[key]:
            console.print(Text(f"{count:,} {what}: {hint}"))
    for note in totals.notes:
        console.print(Text(visible(f"note: {note}")))


def _sources(totals: Totals, sources: Sequence[SourceReport]) -> Table:
    """A column for each source, and one for all of them where there are several."""
    table = Table("", title=f"Rows of data.{totals.split}", title_justify="left")
    several = len(totals.report.sources) > 1
    for source in sources:
        table.add_column(Text(visible(source_name(source))), justify="right", overflow="fold")
    if several:
        table.add_column("all", justify="right")
    every = totals.report.totals()
    for key, name in COUNTS.items():
        cells = [getattr(source, key) for source in sources] + ([every[key]] if several else [])
        table.add_row(name, *(f"{cell:,}" for cell in cells))
    shares = [source_share(source) for source in sources]
    overall = [every["supervised_tokens"] / max(1, every["tokens"])] if several else []
    table.add_row("supervised share", *(f"{share:.1%}" for share in shares + overall))
    table.add_row("format", *(source.format or "-" for source in sources))
    table.add_row("weight", *(f"{source.weight:g}" for source in sources))
    table.add_row("passes in an epoch", *(f"{source.passes:.4g}" for source in sources))
    return table


def source_name(source: SourceReport) -> str:
    return f"{source.name} ({source.path})" if source.name and source.name != source.path else source.path


def source_share(source: SourceReport) -> float:
    """Supervised tokens over tokens."""
    return source.supervised_tokens / source.tokens if source.tokens else 0.0


def _tokens(totals: Totals) -> Table:
    table = Table(title="An epoch", show_header=False, title_justify="left")
    for name, value in epoch_facts(totals).items():
        table.add_row(name, value)
    return table


def epoch_facts(totals: Totals) -> dict[str, str]:
    """What an epoch consists of, in words."""
    packing, lengths = totals.packing, totals.percentiles
    documents, work = packing.documents_per_row, packing.attention_work_per_row
    facts = {
        "examples": f"{totals.examples:,}",
        "tokens": f"{totals.tokens:,}, {totals.supervised:.1%} supervised",
        "length": ", ".join(f"{name}\u00a0{value:,}" for name, value in lengths.items()),
        "rows": f"{packing.rows:,} of {totals.max_length:,} tokens, {packing.efficiency:.1%} full",
        "documents per row": f"mean {documents['mean']:,.1f}, from {documents['min']:,} to {documents['max']:,}",
        "attention work per row": f"mean {work['mean']:,.0f} token pairs, from {work['min']:,} to {work['max']:,}",
    }
    if not packing.packed:
        facts |= {"rows": f"{packing.rows:,}, one example each (data.packing is off)"}
        del facts["documents per row"]
    return facts


def _bars(histogram: Histogram, title: str, labels: Sequence[str], totals: Totals | None) -> Table:
    """A line for each bin; bins that stay empty for long are one line that says so."""
    table = Table("", "examples", "", title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.columns[0].justify = table.columns[1].justify = "right"
    most = max(histogram.counts)
    for is_empty, bins in groupby(zip(labels, histogram.counts, strict=True), key=lambda found: found[1] == 0):
        lines = list(bins)
        if is_empty and len(lines) > 2:
            table.add_row("...", "0", Text(f"{len(lines)} empty bins", style="dim"))
            continue
        for label, count in lines:
            table.add_row(label, f"{count:,}", Text(_bar(count / most), style="green"))
    if totals:
        table.add_row(*_over(totals))
    return table


def _over(totals: Totals) -> tuple[str, str, Text]:
    """The line of what is longer than max_length."""
    count, what = overlong(totals)
    return f"over {totals.max_length:,}", f"{count:,}", Text(f"max_length; {what}" if count else "max_length")


def overlong(totals: Totals) -> tuple[int, str]:
    """(rows longer than max_length, what became of them)."""
    every = totals.report.totals()
    key = {"drop": "dropped_overlong", "truncate": "truncated", "split": "split"}.get(totals.overlong, "")
    words = {"dropped_overlong": "dropped", "truncated": "cut off there", "split": "cut into pieces"}
    return every.get(key, 0), words.get(key, "")


def _bar(share: float) -> str:
    """As many eighths of a cell as there are; what is not empty has one."""
    eighths = max(round(share * BAR_WIDTH * 8), 1 if share else 0)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _length_labels(totals: Totals) -> list[str]:
    edges = [int(edge) for edge in totals.lengths.edges]
    return [f"{low + 1:,} to {high:,}" for low, high in pairwise(edges)]


def _share_labels() -> list[str]:
    return [f"to {n * 10} %" for n in range(1, 11)]


def _print_bad_rows(console: Console, source: SourceReport) -> None:
    if source.bad_rows:
        console.print(f"bad rows, the first {len(source.bad_rows)} of {source.bad:,}:", markup=False, highlight=False)
        for line in source.bad_rows:
            console.print(Text(visible(f"  {line}")), soft_wrap=True)
