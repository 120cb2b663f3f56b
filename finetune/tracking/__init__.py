"""metrics.jsonl, trackers, progress, meters.

`meters.py` is imported from its file: it needs the engine, which commands that do not train do without.
"""

from finetune.tracking.clock import StepClock
from finetune.tracking.progress import TrainingProgress
from finetune.tracking.status import Status, read_status, write_status
from finetune.tracking.step_log import StepLog, prepare_samples, read_steps, sample_file
from finetune.tracking.totals import Totals
from finetune.tracking.trackers import Trackers, check_trackers

__all__ = [
    "Status",
    "StepClock",
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
