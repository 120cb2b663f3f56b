"""The LM head and the cross entropy as one: losses leave the head, never all logits at once."""

from finetune.models.head.attach import LossHead, attach_head, loss_module
from finetune.models.head.choice import CrossEntropyChoice
from finetune.models.head.formula import Formula, TokenLosses

__all__ = ["CrossEntropyChoice", "Formula", "LossHead", "TokenLosses", "attach_head", "loss_module"]
