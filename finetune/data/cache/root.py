"""Where everything that is made from data is kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """$FINETUNE_CACHE, or ~/.cache/finetune."""
    return Path(os.environ.get("FINETUNE_CACHE") or "~/.cache/finetune").expanduser()
