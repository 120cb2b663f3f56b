"""Rules for `combinations.py`, a file for each way of dividing the work."""
