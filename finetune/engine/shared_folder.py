"""Whether all machines of a launch mean the same folder by its name."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

_APPEARS_S = 5.0  # for a file that another machine has made


def blind_hosts(gather: Callable[[Any], list[Any]], rank: int, folder: Path) -> list[str]:
    """Names of the machines that do not see in `folder` what rank 0 writes there. Collective; the folder exists."""
    mark = folder / f".shared-{gather(uuid.uuid4().hex)[0]}"  # a new name: NFS remembers what was not there
    if rank == 0:
        mark.touch()
    gather(None)  # now it is there
    blind = gather(None if _appears(mark) else socket.gethostname())
    if rank == 0:
        mark.unlink()
    return sorted({host for host in blind if host})


def _appears(path: Path) -> bool:
    give_up = time.monotonic() + _APPEARS_S
    while not path.exists():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.1)
    return True
