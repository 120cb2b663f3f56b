"""Data: sources -> formats -> chat rendering and masks -> length policy -> packing -> global order -> batches."""

from finetune.data.batch import Batch, Loader, OrderedRows, RunRows, collate, deal, shifted_targets, target_sources
from finetune.data.chat import UNTRAINED, Renderer, render, renderer
from finetune.data.chat_template import Template, built_in_templates, resolve_template
from finetune.data.dataset import Dataset, Stream, build_dataset, build_training, template_notes
from finetune.data.examples import Example, Examples, cache_root, prepare_examples
from finetune.data.formats import FORMATS, parse_row
from finetune.data.mixture import source_names
from finetune.data.order import RowOrder, group_rows
from finetune.data.packing import Rows, one_per_row, pack, row_work
from finetune.data.report import Report, SourceReport
from finetune.data.samples import BadRow, Conversation, Message, PromptCompletion, Text
from finetune.data.show import render_rich, to_json_lines
from finetune.data.sources import read_rows
from finetune.data.template_check import check_template

__all__ = [
    "FORMATS",
    "UNTRAINED",
    "BadRow",
    "Batch",
    "Conversation",
    "Dataset",
    "Example",
    "Examples",
    "Loader",
    "Message",
    "OrderedRows",
    "PromptCompletion",
    "Renderer",
    "Report",
    "RowOrder",
    "Rows",
    "RunRows",
    "SourceReport",
    "Stream",
    "Template",
    "Text",
    "build_dataset",
    "build_training",
    "built_in_templates",
    "cache_root",
    "check_template",
    "collate",
    "deal",
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
    "shifted_targets",
    "source_names",
    "target_sources",
    "template_notes",
    "to_json_lines",
]
