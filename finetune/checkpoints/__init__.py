"""The neutral checkpoint: written and read under any backend and world size; complete or absent; no pickle."""

from finetune.checkpoints.resume import Resumed, newest_good, resume, start_anew
from finetune.checkpoints.saver import Saver

__all__ = ["Resumed", "Saver", "newest_good", "resume", "start_anew"]
