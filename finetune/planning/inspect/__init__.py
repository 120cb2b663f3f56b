"""`inspect`: what the model will see, in a terminal, as a page and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from finetune.data import to_json_lines
from finetune.data.chat.template import resolve_template
from finetune.data.dataset import build_dataset, template_notes
from finetune.data.token_text import Look
from finetune.errors import UserError
from finetune.models.tokenizer import load_tokenizer
from finetune.planning.inspect.choose import find_row, first_examples
from finetune.planning.inspect.page import write_page
from finetune.planning.inspect.terminal import print_examples, print_packed_rows, print_totals
from finetune.planning.inspect.totals import totals_of
from finetune.planning.inspect.view import View
from finetune.recipe import Recipe
from finetune.recipe.schema import Source

ROWS, PAGE_ROWS, PAGE_PACKED = 3, 20, 2  # what is shown unless asked for more


@dataclass(frozen=True)
class Asked:
    """The options of the command; each is named as it is typed."""

    rows: int | None = None  # examples
    row: tuple[str, ...] = ()  # certain ones, PATH:NUMBER
    packed: int | None = None  # packed rows
    eval: bool = False  # data.eval instead of data.train
    totals: bool = False  # nothing else
    tokens: bool = False  # borders and ids
    full: bool = False  # nothing left out of long examples
    html: Path | None = None
    json: bool = False


_EXAMPLES = {"rows", "row"}
_LOOKS = {"packed", "tokens", "full"}


def check_options(asked: Asked) -> None:
    """Raises UserError where an option would have no effect."""
    for one, others in (
        ("json", {"html", *_LOOKS}),
        ("totals", {"html", *_EXAMPLES, *_LOOKS}),
        ("row", {"rows"}),
    ):
        clash = [name for name in sorted(others) if getattr(asked, name)]
        if getattr(asked, one) and clash:
            raise UserError(f"--{clash[0]} has no effect beside --{one}: leave one of the two out")
    if asked.html and asked.html.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--html {asked.html}: expected the name of a page to write, such as inspect.html")


def inspect(recipe: Recipe, recipe_path: Path, asked: Asked, console: Console) -> None:
    """Show what `asked` wants of a recipe's data. Raises UserError."""
    check_options(asked)
    view = _view(recipe, recipe_path, asked)
    if asked.json:
        for line in _json_lines(view, asked):
            print(line)
        return
    chosen = [] if asked.totals else _chosen(view, asked, PAGE_ROWS if asked.html else ROWS)
    packed = min(len(view.data.rows), PAGE_PACKED * recipe.data.packing if asked.packed is None else asked.packed)
    if asked.html:
        write_page(asked.html, view, chosen, range(packed), borders=asked.tokens, full=asked.full)
        size = asked.html.stat().st_size / 1e3
        shown = f"{len(chosen)} examples, {packed} packed rows"
        console.print(f"wrote {asked.html}: {shown}, {size:,.0f} kB", markup=False, highlight=False, soft_wrap=True)
        return
    look = Look(colour=_has_colour(console), borders=asked.tokens, full=asked.full)
    print_examples(console, view, chosen, look)
    print_packed_rows(console, view, range(packed if asked.packed else 0), look)
    print_totals(console, view)


def _view(recipe: Recipe, recipe_path: Path, asked: Asked) -> View:
    tokenizer = load_tokenizer(recipe.model)
    notes = template_notes(recipe, tokenizer)
    template = resolve_template(recipe.model.chat_template, tokenizer, recipe.model.chat_template_arguments)
    sources = _sources(recipe, asked.eval)
    if recipe.data.streaming and not asked.eval:
        notes.append(f"data.streaming: the first {recipe.data.window:,} rows of each source stand for the stream")
    data = build_dataset(recipe, sources, tokenizer)
    split = "eval" if asked.eval else "train"
    name = template.name if template else "none"
    totals = totals_of(data, recipe.data, split, notes)
    return View(recipe, recipe_path, sources, tokenizer, name, data, totals)


def _sources(recipe: Recipe, of_eval: bool) -> tuple[Source, ...]:
    if of_eval:
        if not recipe.data.eval:
            raise UserError("--eval: the recipe has no data.eval; add a source there, or leave --eval out")
        return recipe.data.eval
    if not recipe.data.streaming:
        return recipe.data.train
    most = recipe.data.window  # a stream has no end that could be waited for
    return tuple(s.model_copy(update={"limit": min(s.limit or most, most)}) for s in recipe.data.train)


def _chosen(view: View, asked: Asked, rows: int) -> list[int]:
    """Numbers of the examples to show."""
    if asked.row:
        return [number for place in asked.row for number in find_row(view, place)]
    return first_examples(view.data.examples, asked.rows or rows)


def _json_lines(view: View, asked: Asked) -> Iterator[str]:
    """One object with all totals, or one per example, before packing."""
    if asked.totals:
        yield json.dumps(view.totals.as_dict(), ensure_ascii=False)
        return
    examples = view.data.examples
    chosen = _chosen(view, asked, ROWS) if asked.row else range(min(len(examples), asked.rows or ROWS))
    for line in to_json_lines(examples[number] for number in chosen):
        yield json.dumps(line, ensure_ascii=False)


def _has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color
