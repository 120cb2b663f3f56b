"""metrics.jsonl, trackers, progress."""

from finetune.tracking.progress import TrainingProgress
from finetune.tracking.step_log import StepLog, prepare_samples, read_steps, sample_file
from finetune.tracking.trackers import Trackers, check_trackers

__all__ = [
    "StepLog",
    "Trackers",
    "TrainingProgress",
    "check_trackers",
    "prepare_samples",
    "read_steps",
    "sample_file",
]
