"""The neutral checkpoint: written and read under any backend and world size; complete or absent; no pickle."""
