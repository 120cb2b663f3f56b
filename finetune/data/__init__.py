"""Data: sources -> formats -> chat rendering and masks -> length policy -> packing -> global order -> batches."""
