"""`inspect`: shows examples, packed sequences and statistics in a terminal, as an HTML page or as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from finetune.data.chat.template_choice import template_of
from finetune.data.dataset import build_dataset, template_notes
from finetune.data.token_text import Look, to_json_lines
from finetune.desk.view.inspect.dataset_view import DatasetView, dataset_statistics, find_row, first_examples
from finetune.desk.view.inspect.page import write_page
from finetune.desk.view.inspect.terminal import print_examples, print_packed_rows, print_totals
from finetune.errors import UserError
from finetune.models.base_model import Base
from finetune.recipe import Recipe
from finetune.recipe.schema import HeldOut

ROWS, PAGE_ROWS, PAGE_PACKED = 3, 20, 2  # shown by default


@dataclass(frozen=True)
class InspectOptions:
    """Options of the command, named as on the command line."""

    rows: int | None = None  # examples
    row: tuple[str, ...] = ()  # single examples, PATH:NUMBER
    packed: int | None = None  # packed sequences
    eval: bool = False  # data.eval instead of data.train
    totals: bool = False  # statistics only
    tokens: bool = False  # borders and ids
    full: bool = False  # no truncation of long examples
    html: Path | None = None
    json: bool = False


def check_options(options: InspectOptions) -> None:
    """Raises UserError if an option would have no effect."""
    for name, others in (
        ("json", ("full", "html", "packed", "tokens")),
        ("totals", ("full", "html", "packed", "row", "rows", "tokens")),
        ("row", ("rows",)),
    ):
        unused = [other for other in others if getattr(options, other)]
        if getattr(options, name) and unused:
            raise UserError(f"--{unused[0]} has no effect with --{name}. Fix: remove one of the two")
    if options.html and options.html.suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"--html {options.html}: not the name of a page to write. Fix: end it with .html, such as inspect.html"
        )


def inspect(recipe: Recipe, recipe_path: Path, options: InspectOptions, console: Console) -> None:
    """Shows a recipe's data. Raises UserError."""
    check_options(options)
    # The data is built alone, without a launch: `inspect` also shows data that `train` would refuse.
    base = Base.of(recipe)
    tokenizer, notes = base.tokenizer, template_notes(recipe, base.tokenizer)
    template, sources = template_of(recipe.model, tokenizer), recipe.data.train
    if options.eval:
        if not recipe.data.eval:
            raise UserError("--eval: the recipe has no data.eval. Fix: add a source there, or remove --eval")
        sources = recipe.data.eval_sources
    elif recipe.data.streaming:
        window = recipe.data.window  # a stream may be endless
        sources = tuple(s.model_copy(update={"limit": min(s.limit or window, window)}) for s in sources)
        notes.append(f"data.streaming: only the first {window:,} rows of each source are inspected")
    held_out = options.eval and isinstance(recipe.data.eval, HeldOut)
    renderer = base.renderer(recipe.objective)
    data = build_dataset(recipe, sources, renderer, held_out=held_out)
    totals = dataset_statistics(data, recipe.data, "eval" if options.eval else "train", notes)
    view = DatasetView(recipe, recipe_path, sources, renderer, template.name if template else "none", data, totals)
    examples = view.data.examples
    if options.json and options.totals:
        print(json.dumps(view.totals.as_dict(), ensure_ascii=False))
        return
    if options.json:
        first = range(min(len(examples), options.rows or ROWS))
        for line in to_json_lines(examples[i] for i in (_chosen(view, options, ROWS) if options.row else first)):
            print(json.dumps(line, ensure_ascii=False))
        return
    chosen = [] if options.totals else _chosen(view, options, PAGE_ROWS if options.html else ROWS)
    packed = min(len(view.data.rows), PAGE_PACKED * recipe.data.packing if options.packed is None else options.packed)
    if options.html:
        write_page(options.html, view, chosen, range(packed), borders=options.tokens, full=options.full)
        size = options.html.stat().st_size / 1e3
        shown = f"{len(chosen)} examples, {packed} packed sequences"
        console.print(f"wrote {options.html}: {shown}, {size:,.0f} kB", markup=False, highlight=False, soft_wrap=True)
        return
    has_colour = console.color_system is not None and not console.no_color
    look = Look(colour=has_colour, borders=options.tokens, full=options.full)
    print_examples(console, view, chosen, look)
    print_packed_rows(console, view, range(packed if options.packed else 0), look)
    print_totals(console, view)


def _chosen(view: DatasetView, options: InspectOptions, rows: int) -> list[int]:
    """Returns the indices of the examples to show."""
    if options.row:
        return [index for address in options.row for index in find_row(view, address)]
    return first_examples(view.data.examples, options.rows or rows)
