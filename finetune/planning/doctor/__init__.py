"""`doctor`: what a launch runs on, how fast its parts are, and what is worth changing before a long run."""
