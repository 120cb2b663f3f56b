"""What is done with a finished run: export, verify, generate, serve, evaluate."""
