"""Tokenizer and weights, quantisation, adapters, attention for packed rows."""
