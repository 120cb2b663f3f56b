"""How long ranks wait for each other before they call one of them gone."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import distributed_c10d

from finetune.errors import UserError

VARIABLE = "FINETUNE_TIMEOUT_S"
_DEFAULT_S = 1800.0  # torch's own for gloo (torch/distributed/constants.py); with NCCL it would be 600


def collective_timeout() -> timedelta:
    """Of every collective; a link that is cut shows by nothing else. Raises UserError where the variable is no number.

    torch takes it from programs only, not from the environment, so the variable is ours.
    """
    text = os.environ.get(VARIABLE, str(_DEFAULT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise UserError(f"{VARIABLE}={text}: seconds that ranks wait for each other, a number above 0, such as 300")
    return timedelta(seconds=seconds)


def limit_groups(timeout: timedelta) -> None:
    """Of every process group that this rank is in.

    Device meshes and DeepSpeed make groups of their own and pass on no timeout, so these have torch's default.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)
