"""metrics.jsonl, trackers, progress."""

from finetune.tracking.metrics_log import MetricsLog, read_metrics
from finetune.tracking.progress import TrainingProgress
from finetune.tracking.trackers import Trackers, check_trackers

__all__ = ["MetricsLog", "Trackers", "TrainingProgress", "check_trackers", "read_metrics"]
