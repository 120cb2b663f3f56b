"""Formats of a dataset's rows: `converters.py` has the formats, `detect.py` detects them."""
