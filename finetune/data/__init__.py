"""Data: sources -> formats -> chat rendering and masks -> length policy -> packing -> global order -> batches.

What needs torch is not imported here, for the processes that tokenise do without: `batch.py`, `dataset.py`.
"""

from finetune.data.chat.renderer import UNTRAINED, Renderer, render, renderer
from finetune.data.chat.template import Template, built_in_templates, resolve_template
from finetune.data.chat.template_check import check_template
from finetune.data.examples import Examples, prepare_examples
from finetune.data.formats import FORMATS, parse_row
from finetune.data.mixture import source_names
from finetune.data.order import RowOrder, group_rows
from finetune.data.packing import Rows, one_per_row, pack, row_work
from finetune.data.samples import BadRow, Conversation, Example, Message, PromptCompletion, Sequence, Text
from finetune.data.sources import read_rows
from finetune.data.sources.files import cache_root
from finetune.data.token_cache import DataReport, SourceReport
from finetune.data.token_text import render_rich, to_json_lines

__all__ = [
    "FORMATS",
    "UNTRAINED",
    "BadRow",
    "Conversation",
    "DataReport",
    "Example",
    "Examples",
    "Message",
    "PromptCompletion",
    "Renderer",
    "RowOrder",
    "Rows",
    "Sequence",
    "SourceReport",
    "Template",
    "Text",
    "built_in_templates",
    "cache_root",
    "check_template",
    "group_rows",
    "one_per_row",
    "pack",
    "parse_row",
    "prepare_examples",
    "read_rows",
    "render",
    "render_rich",
    "renderer",
    "resolve_template",
    "row_work",
    "source_names",
    "to_json_lines",
]
