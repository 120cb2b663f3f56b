"""What a run needs, before it runs: memory from shapes alone."""
