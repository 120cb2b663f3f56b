"""metrics.jsonl, trackers, meters.

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
from finetune.tracking.trackers import Trackers, check_trackers

__all__ = [
    "Status",
    "StepLog",
    "Totals",
    "Trackers",
    "check_trackers",
    "prepare_samples",
    "read_status",
    "read_steps",
    "sample_file",
    "write_status",
]
