"""Fine-tune language models: the recipe fixes the maths, the accelerate config only decides where it runs."""

__version__ = "0.1.0"
