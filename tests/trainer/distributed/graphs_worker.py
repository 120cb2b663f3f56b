"""Inside a launch: a run by graphs as far as a CPU goes, and the run without (tests/support/graphed.py).

    accelerate launch --config_file ... tests/trainer/distributed/graphs_worker.py RECIPE FOLDER [key=value ...]

FOLDER gets graphs.pt and without.pt of rank 0: its losses, norms and weights, and the share of replays.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(recipe_file: str, folder: str, *overrides: str) -> None:
    import graphed
    import torch

    from finetune.models.attention import kernels

    kernels.varlen_attn, kernels._TAKES_GROUPS = graphed.varlen_attn, False  # torch's is for GPUs
    for name in ("graphs", "without"):
        result = graphed.trained(recipe_file, list(overrides), graphed=name == "graphs")
        if os.environ["RANK"] == "0":
            torch.save(result._asdict(), Path(folder) / f"{name}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
