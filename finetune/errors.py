"""The exceptions that a command turns into its exit status, and the message of an unforeseen error."""

from __future__ import annotations

import os
import tempfile
import traceback
from pathlib import Path


class UserError(Exception):
    """An error the user can fix, printed without a traceback; exit status 2.

    The message says what is wrong, where (file and line, dataset row, or both) and what to do.
    """


class RunFailure(Exception):
    """A failed run although recipe and data are valid, printed without a traceback; exit status 1."""


class Stopped(Exception):
    """A run that was stopped by a signal and saved; exit status 75. The same command resumes it."""


# EX_TEMPFAIL of BSD's sysexits.h: "try again later", which is what a scheduler should do.
STOPPED_STATUS = 75


def unforeseen(error: BaseException) -> str:
    """Returns one line for an error that is no UserError, and writes its traceback to a file that the line names."""
    text = "".join(traceback.format_exception(error))
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        path = folder / f"finetune-error-{os.getpid()}.log"
        try:
            path.write_text(text, encoding="utf-8", errors="replace")
            where = f"the traceback is in {path}"
            break
        except OSError:
            where = f"the traceback could not be written:\n{text}"
    reason = " ".join(str(error).split())[:300]
    fault = "If no other process and no machine failed, this is a fault of finetune"
    return f"{type(error).__name__}: {reason or 'no reason given'}. {fault}; {where}"
