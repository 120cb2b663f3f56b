"""Rows of a recipe's source: local files, patterns and folders of them, files behind URLs, datasets of the hub.

A row is (file or dataset, number, object). Numbers start at 1: lines of the file for jsonl, csv, tsv and txt (the line
a csv record begins on, the header is line 1); items for a json array, rows for parquet, arrow and datasets. They are
those of the file, whatever part of it `split` takes.

`opened.py` finds out what a path means and asks `local.py`, `remote.py` or `hub.py`; `readers.py` says who reads which
kind of file, `file.py` hands the reader the bytes.
"""

from finetune.data.sources.opened import OnBadRow, Opened, raise_bad_row, read_rows
from finetune.recipe.urls import without_credentials

__all__ = ["OnBadRow", "Opened", "raise_bad_row", "read_rows", "without_credentials"]
