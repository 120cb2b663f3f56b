"""Checkpoints: independent of backend and world size, written atomically, without pickle."""
