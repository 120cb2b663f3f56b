"""(model, batch) -> summed loss over the batch's supervised tokens; one file each."""

from finetune.objectives.sft import supervised_losses

__all__ = ["supervised_losses"]
