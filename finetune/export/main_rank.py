"""Rank 0 writes while every rank walks through the same collectives; a failure of rank 0 must reach all of them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from finetune.engine.base import Engine
from finetune.errors import RunFailure


class MainRank:
    """Remembers the first failure of rank 0 and leaves out what was to follow, so that no rank waits for it in vain."""

    def __init__(self, engine: Engine, folder: Path):
        self._engine, self._folder = engine, folder
        self._failure: str | None = None

    def do(self, work: Callable[..., object], *arguments: Any) -> None:
        """On rank 0, while nothing has failed. What the disk or a check refuses is kept for `settle`."""
        if not self._engine.is_main or self._failure is not None:
            return
        try:
            work(*arguments)
        except (OSError, SafetensorError) as error:
            self._failure = _not_written(self._folder, error)
        except RunFailure as error:
            self._failure = str(error)

    def settle(self) -> None:
        """Collective. Raises RunFailure on every rank if rank 0 failed since the beginning."""
        failure = self._engine.ranks.gather(self._failure)[0]
        if failure is not None:
            raise RunFailure(failure)


def _not_written(folder: Path, error: OSError | SafetensorError) -> str:
    # safetensors reports the operating system's errors as text
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or f"(os error {errno.ENOSPC})" in str(error)
    return (
        f"{folder} could not be written: {error}; an earlier one is untouched and the last checkpoint is intact; "
        f"{'free space' if full else 'mend this'} and start the same command again"
    )
