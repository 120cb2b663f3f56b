"""After training: the result folder, its card, generate, merge."""
