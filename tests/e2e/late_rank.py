"""`python -m finetune` inside a launch, whose rank 0 is slower than the others."""

from __future__ import annotations

import os
import time

from finetune.cli import main

if os.environ["RANK"] == "0":
    time.sleep(4)
main()
