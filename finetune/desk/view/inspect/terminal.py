"""Examples, packed sequences and statistics in a terminal; without colors, supervised tokens are in [[ ]]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from rich.console import Console, Group
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from finetune.data.token_cache import SourceReport
from finetune.data.token_text import Look, render_rich, visible
from finetune.desk.view.inspect.dataset_view import (
    LOSSES,
    DatasetStatistics,
    DatasetView,
    Histogram,
    numbers_of,
)
from finetune.desk.view.token_html import sequence_names

COUNTS = {
    "rows": "rows read",
    "bad": "bad",
    "dropped_overlong": "dropped overlong",
    "truncated": "truncated",
    "split": "split",
    "no_supervised_token": "without a supervised token",
    "no_other_answer": "without another's answer",
    "unrolled": "unrolled",
    "duplicates": "duplicates",
    "examples": "examples",
    "taken": "sampled per epoch",
    "tokens": "tokens",
    "supervised_tokens": "supervised tokens",
}
WIDE = 100  # columns needed to show two texts side by side
SOURCES_PER_TABLE = 3  # so that no column is cut
BAR_WIDTH = 40
EIGHTHS = " ▏▎▍▌▋▊▉"


def print_examples(console: Console, view: DatasetView, chosen: Iterable[int], look: Look) -> None:
    """Prints a panel per example, and a legend."""
    shown = [view.data.examples[index] for index in chosen]
    for example in shown:
        tokens = f"{example.num_tokens:,} tokens, {example.num_targets:,} supervised"
        numbers = numbers_of(example, view.recipe.objective)
        title = visible("   ".join(filter(None, (f"{example.path}:{example.row}", tokens, numbers))))
        texts = [render_rich(one, view.renderer.tokenizer, look, example.shared_tokens) for one in example.sequences]
        named = zip(sequence_names(view.recipe.objective.name, len(texts)), example.sequences, strict=True)
        titles = [f"{name}, {len(one.input_ids):,} tokens, {example.shared_tokens:,} shared" for name, one in named]
        content: Text | Table | Group = texts[0]
        if len(texts) > 1 and console.width < WIDE:  # one sequence of a pair below the other
            rules = [Rule(Text(heading), align="left", style="cyan") for heading in titles]
            content = Group(*(part for pair in zip(rules, texts, strict=True) for part in pair))
        elif len(texts) > 1:
            content = Table(box=None, expand=True, padding=(0, 1), header_style="cyan")
            for heading in titles:
                content.add_column(heading, ratio=1, overflow="fold")
            content.add_row(*texts)
        console.print(Panel(content, title=Text(title), title_align="left"))
    marks = "  ⏎ newline, ⇥ tab, · trailing space in supervised text, ⟫ end of the tokens that a pair shares"
    words = (("supervised", "bold green"), "  ", ("context", "dim"), "  ", ("special token", "magenta"))
    if shown and look.colour:
        console.print(Text.assemble(*words).append(marks, style="dim"))
    elif shown:
        console.print(Text("[[supervised]]  context" + marks))


def print_packed_rows(console: Console, view: DatasetView, numbers: Iterable[int], look: Look) -> None:
    """Prints packed sequences as model inputs: documents end to end, positions and attention per document."""
    for number in numbers:
        examples = [view.data.examples[member] for member in view.data.rows[number].tolist()]
        documents = [(example, sequence) for example in examples for sequence in example.sequences]
        parts, start = [], 0
        for n, (example, sequence) in enumerate(documents, start=1):
            end = start + len(sequence.input_ids)
            label = f"document {n}  {example.path}:{example.row}  tokens {start:,} to {end - 1:,}, positions from 0"
            parts += [
                Rule(Text(visible(label)), align="left", style="cyan"),
                render_rich(sequence, view.renderer.tokenizer, look),
            ]
            start = end
        work = f"attention work {sum(len(sequence.input_ids) ** 2 for _, sequence in documents):,}"
        tokens = f"{start:,} of {view.totals.max_length:,} tokens"
        title = f"packed sequence {number}   {len(documents)} documents, {tokens}, {work}"
        console.print(Panel(Group(*parts), title=Text(title), title_align="left", border_style="cyan"))


def print_totals(console: Console, view: DatasetView) -> None:
    """Prints tables of rows by source, of an epoch, of lengths and of supervised shares; then bad rows and notes."""
    totals = view.totals
    sources = totals.report.sources
    lengths = [f"{int(low) + 1:,} to {int(high):,}" for low, high in pairwise(totals.lengths.edges)]
    epoch = Table(title="An epoch", show_header=False, title_justify="left")
    for name, value in epoch_facts(totals).items():
        epoch.add_row(name, value)
    shares = [f"to {n * 10} %" for n in range(1, 11)]
    for table in (
        *(_sources(totals, sources[i : i + SOURCES_PER_TABLE]) for i in range(0, len(sources), SOURCES_PER_TABLE)),
        epoch,
        _bars(totals.lengths, "Lengths (tokens)", lengths, totals),
        _bars(totals.supervised_share, "Supervised share of an example", shares, None),
    ):
        console.print()
        console.print(table)
    console.print()
    for source in sources:
        if bad := source.bad_rows:
            console.print(f"bad rows, the first {len(bad)} of {source.bad:,}:", markup=False, highlight=False)
        for line in source.bad_rows:
            console.print(Text(visible(f"  {line}")), soft_wrap=True)
    for key, (what, hint) in LOSSES.items():
        if count := totals.report.totals()[key]:
            console.print(Text(f"{count:,} {what}: {hint}"))
    for note in totals.notes:
        console.print(Text(visible(f"note: {note}")))


def _sources(totals: DatasetStatistics, sources: Sequence[SourceReport]) -> Table:
    """Returns a table with a column per source, and one for their sum if there are several."""
    table = Table("", title=f"Rows of data.{totals.split}", title_justify="left")
    several = len(totals.report.sources) > 1
    for source in sources:
        table.add_column(Text(visible(source_name(source))), justify="right", overflow="fold")
    if several:
        table.add_column("all", justify="right")
    sums = totals.report.totals()
    for key, name in COUNTS.items():
        cells = [getattr(source, key) for source in sources] + ([sums[key]] if several else [])
        table.add_row(name, *(f"{cell:,}" for cell in cells))
    shares = [source_share(source) for source in sources]
    overall = [sums["supervised_tokens"] / max(1, sums["tokens"])] if several else []
    table.add_row("supervised share", *(f"{share:.1%}" for share in shares + overall))
    table.add_row("format", *(source.format or "-" for source in sources))
    table.add_row("weight", *(f"{source.weight:g}" for source in sources))
    table.add_row("passes per epoch", *(f"{source.passes:.4g}" for source in sources))
    return table


def source_name(source: SourceReport) -> str:
    return f"{source.name} ({source.path})" if source.name and source.name != source.path else source.path


def source_share(source: SourceReport) -> float:
    """Returns supervised tokens over tokens."""
    return source.supervised_tokens / source.tokens if source.tokens else 0.0


def epoch_facts(totals: DatasetStatistics) -> dict[str, str]:
    """Returns the statistics of an epoch as text, by name."""
    packing, lengths = totals.packing, totals.percentiles
    documents, work = packing.documents_per_row, packing.attention_work_per_row
    facts = {
        "examples": f"{totals.examples:,}",
        "tokens": f"{totals.tokens:,}, {totals.supervised:.1%} supervised",
        "length": ", ".join(f"{name}\u00a0{value:,}" for name, value in lengths.items()),
        "packed sequences": f"{packing.rows:,} of up to {totals.max_length:,} tokens, {packing.efficiency:.1%} full",
        "documents per sequence": f"mean {documents['mean']:,.1f}, from {documents['min']:,} to {documents['max']:,}",
        "attention work per sequence": f"mean {work['mean']:,.0f} token pairs, from {work['min']:,} to {work['max']:,}",
    }
    if not packing.packed:
        del facts["packed sequences"], facts["documents per sequence"]
        facts |= {"sequences": f"{packing.rows:,}, one example each (data.packing is off)"}
    return facts


def _bars(histogram: Histogram, title: str, labels: Sequence[str], totals: DatasetStatistics | None) -> Table:
    """Returns a table with a line per bin; consecutive empty bins share one line."""
    table = Table("", "examples", "", title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.columns[0].justify = table.columns[1].justify = "right"
    highest = max(histogram.counts)
    for is_empty, bins in groupby(zip(labels, histogram.counts, strict=True), key=lambda line: line[1] == 0):
        lines = list(bins)
        if is_empty and len(lines) > 2:
            table.add_row("...", "0", Text(f"{len(lines)} empty bins", style="dim"))
            continue
        for label, count in lines:
            eighths = max(round(count / highest * BAR_WIDTH * 8), 1 if count else 0)  # eighths of a cell
            bar = "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
            table.add_row(label, f"{count:,}", Text(bar, style="green"))
    if totals:
        count, what = overlong(totals)
        table.add_row(f"over {totals.max_length:,}", f"{count:,}", Text("max_length" + (f"; {what}" if count else "")))
    return table


def overlong(totals: DatasetStatistics) -> tuple[int, str]:
    """Returns (rows longer than max_length, their treatment)."""
    key = {"drop": "dropped_overlong", "truncate": "truncated", "split": "split"}.get(totals.overlong, "")
    words = {"dropped_overlong": "dropped", "truncated": "truncated", "split": "split into pieces"}
    return totals.report.totals().get(key, 0), words.get(key, "")
