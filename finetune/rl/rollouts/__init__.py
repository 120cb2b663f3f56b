"""Rows that the model samples during the run: prompts, samples, rewards, and their record in the run's folder."""
