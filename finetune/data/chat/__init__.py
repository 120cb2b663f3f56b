"""Chat rendering: from a sample to text, from text to token ids and an exact mask, under any template."""
