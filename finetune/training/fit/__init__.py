"""`batch.rows_per_device: auto`: the most rows in one forward that memory holds, found by trial and kept."""

from finetune.training.fit.memory import memory_of
from finetune.training.fit.rows import FoundRows, find_rows

__all__ = ["FoundRows", "find_rows", "memory_of"]
