"""Rows that the model samples during the run: prompts, decoding, rewards, and their record in the run's folder."""
