"""After training: merge, export and its gate."""
