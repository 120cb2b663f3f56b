"""`check`."""
