"""What a row of a dataset says: `converters.py` has the formats, `detect.py` tells which one rows are in."""
