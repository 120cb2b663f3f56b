"""metrics.jsonl, trackers, progress, meters.

`meters.py` is imported from its file: it needs the engine, which commands that do not train do without.
"""

from finetune.tracking.metrics import (
    Status,
    StepLog,
    Totals,
    prepare_samples,
    read_status,
    read_steps,
    sample_file,
    write_status,
)
from finetune.tracking.progress import TrainingProgress
from finetune.tracking.trackers import Trackers, check_trackers

__all__ = [
    "Status",
    "StepLog",
    "Totals",
    "Trackers",
    "TrainingProgress",
    "check_trackers",
    "prepare_samples",
    "read_status",
    "read_steps",
    "sample_file",
    "write_status",
]
