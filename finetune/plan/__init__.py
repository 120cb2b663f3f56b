"""Memory, speed and price of a run, calculated before it from shapes alone."""
