"""What fits, how fast, at what price: before a run, from shapes alone."""
