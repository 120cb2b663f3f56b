"""`inspect`: what the model will see, for people and for programs."""

from __future__ import annotations

import json
from itertools import islice

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from finetune.data import Dataset, build_dataset, render_rich, template_notes, to_json_lines
from finetune.models import load_tokenizer
from finetune.recipe import Recipe


def print_json_lines(recipe: Recipe, rows: int) -> None:
    """One JSON object per example, before packing."""
    tokenizer = load_tokenizer(recipe.model)
    template_notes(recipe, tokenizer)
    for line in to_json_lines(iter(build_dataset(recipe, recipe.data.train, tokenizer).examples), rows):
        print(json.dumps(line, ensure_ascii=False))


def print_examples(recipe: Recipe, rows: int) -> None:
    """Examples with what is trained in green and special tokens visible, then where every row went."""
    console = Console()
    tokenizer = load_tokenizer(recipe.model)
    notes = template_notes(recipe, tokenizer)
    data = build_dataset(recipe, recipe.data.train, tokenizer)
    for example in islice(data.examples, rows):
        trained = int((example.labels != -100).sum())
        title = f"{example.path}:{example.row}   {len(example.input_ids)} tokens, {trained} trained"
        console.print(Panel(render_rich(example, tokenizer), title=title, title_align="left"))
    console.print("[bold green]trained[/bold green]  [dim]context[/dim]  [magenta]special token[/magenta]")
    console.print(_sources(data))
    console.print(_totals(data, recipe.data.max_length))
    for note in notes:
        console.print(f"note: {note}")


def _sources(data: Dataset) -> Table:
    columns = ("rows", "bad", "dropped_overlong", "truncated", "split", "no_supervised_token", "taken")
    table = Table("source", *(name.replace("_", " ") for name in columns), title="Rows", title_justify="left")
    for source in data.examples.report.as_dict()["sources"]:
        table.add_row(source["path"], *(f"{source[name]:,}" for name in columns))
    return table


def _totals(data: Dataset, max_length: int) -> Table:
    lengths = sorted(data.examples.lengths.tolist())
    middle, long = lengths[len(lengths) // 2], lengths[int(len(lengths) * 0.99)]
    table = Table(title="Tokens", show_header=False, title_justify="left")
    for name, value in (
        ("examples", f"{len(data.examples):,}"),
        ("tokens", f"{data.tokens:,}, {data.supervised_tokens / data.tokens:.1%} supervised"),
        ("length", f"median {middle:,}, 99 % under {long + 1:,}, longest {lengths[-1]:,}"),
        ("rows", f"{len(data.rows):,} of {max_length:,} tokens, {data.efficiency(max_length):.1%} full"),
    ):
        table.add_row(name, value)
    return table
