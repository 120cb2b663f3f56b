"""Tokenizer and weights, quantization, adapters, attention for packed rows."""
