"""`python -m finetune train`, `reference` and `launch` of a checkout without wings: scripts/without_wings.sh puts this
file where the composition of the trainer with its wings was."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from finetune.errors import STOPPED_STATUS, RunFailure, Stopped, UserError, without_secrets
from finetune.recipe import load_recipe
from finetune.startup import growing_segments, large_pages, quiet_libraries, sleep_at_barriers
from finetune.training.signals import listening


def main(words: list[str]) -> int:
    command, *words = words
    config = None
    if "--config-file" in words:
        at = words.index("--config-file")
        config, words = words[at + 1], words[:at] + words[at + 2 :]
    if command == "launch":
        from finetune.training.launcher import launch

        return launch(words, Path(config) if config else None)
    if command not in ("train", "reference"):
        raise UserError(f"{command}: a command of a wing, which this checkout does not have")
    _run(command, words[0], words[1:], config)
    return 0


def _run(command: str, path: str, overrides: list[str], config: str | None) -> None:
    with listening() as stop:
        loaded = load_recipe(path, overrides)
        quiet_libraries()
        sleep_at_barriers()
        large_pages()
        growing_segments()
        from rich.console import Console

        from finetune.data.sources.hub import check_hub
        from finetune.engine.start import abort_on_crash, leave_group
        from finetune.training.run import compute_reference, train

        check_hub(loaded)
        work: Callable[..., object] = train if command == "train" else compute_reference
        with abort_on_crash():
            work(loaded, path, stop, Console(), config)
        leave_group()


def exit_status(words: list[str]) -> int:
    """As the desk's: 2 for what the user can fix, 1 for a failed run, 75 for one that was stopped and has saved."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        return main(words)
    except Stopped as stopped:
        if rank == 0:
            print(stopped, file=sys.stderr, flush=True)
        return STOPPED_STATUS
    except (UserError, RunFailure) as error:
        prefix = f"[rank {rank}] " if rank else ""
        print(f"{prefix}error: {without_secrets(str(error))}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1


if __name__ == "__main__":
    raise SystemExit(exit_status(sys.argv[1:]))
