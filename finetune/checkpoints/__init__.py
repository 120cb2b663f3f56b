"""The neutral checkpoint: written and read under any backend and world size; complete or absent; no pickle."""

from finetune.checkpoints.checkpoint import newest_good, resume, save_checkpoint

__all__ = ["newest_good", "resume", "save_checkpoint"]
