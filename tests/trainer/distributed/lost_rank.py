"""A rank of a launch in which one rank stands still, or dies, before a collective."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from finetune.engine.launch import collective_timeout
from finetune.engine.lost_ranks import note_host
from finetune.engine.start import abort_on_crash
from finetune.training.signals import listening


def main(victim: int, name: str) -> None:
    dist.init_process_group("gloo", timeout=collective_timeout())
    note_host()
    with listening() as stop, abort_on_crash():
        stop.steps_begun = True  # the launcher's SIGTERM, when another rank has ended, ends none
        dist.all_reduce(torch.ones(8))
        if dist.get_rank() == victim:
            os.kill(os.getpid(), getattr(signal, name))
        dist.all_reduce(torch.ones(8))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
