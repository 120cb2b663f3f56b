"""What can be known without training: the plan, `check`, `inspect`."""
