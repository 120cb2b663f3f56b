"""Preparation of a run: a recipe that fits (`new`), tokens in the cache (`prepare`)."""
