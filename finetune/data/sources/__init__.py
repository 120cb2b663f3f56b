"""Rows of a recipe's source: local files, patterns and folders of them, files behind URLs, datasets of the hub.

A row is (file or dataset, number, object). Numbers start at 1: lines of the file for jsonl, csv, tsv and txt (the line
a csv record begins on, the header is line 1); items for a json array, rows for parquet, arrow and datasets. They are
those of the file, even if `split` takes a part of it.

`source.py` opens a source, `locations.py` says which files a path means; `readers.py` has a reader for each kind of
file, `files.py` gives it the bytes.
"""
