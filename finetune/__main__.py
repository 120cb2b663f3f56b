"""`python -m finetune`, and the command `finetune`."""

from __future__ import annotations

import sys

from finetune.training.signals import end_while_starting


def main() -> None:
    """Runs the command line. Its imports take a second or more, in which Ctrl-C leaves no traceback."""
    words = sys.argv[1:]
    command = next((word for word in words if not word.startswith("-")), "")
    is_job = any(word.partition("=")[0] == "--on" for word in words)  # written, not run
    end_while_starting(trains=command in ("launch", "train", "reference") and not is_job)
    from finetune.desk.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
