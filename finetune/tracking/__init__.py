"""metrics.jsonl, trackers, meters."""
