"""After training: the result folder, its card, merge, export and its gate."""
