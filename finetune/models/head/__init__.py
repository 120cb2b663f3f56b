"""The LM head and the cross entropy as one: losses of the targets, never all logits at once."""

from finetune.models.head.token_loss import TargetLoss, TokenLoss

__all__ = ["TargetLoss", "TokenLoss"]
