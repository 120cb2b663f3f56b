"""Checkpoints, independent of backend and world size, and the result folder; written atomically, without pickle."""
