"""After training: the result folder, its card, generate, merge."""

from finetune.export.card import model_card
from finetune.export.result import save_result

__all__ = ["model_card", "save_result"]
