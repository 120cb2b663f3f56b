"""The exceptions that a command turns into its exit status, and the message of an unforeseen error."""

from __future__ import annotations

import os
import re
import tempfile
import traceback
import uuid
from pathlib import Path


class UserError(Exception):
    """Error that the user can fix, printed without a traceback; exit status 2.

    The message begins with where (file and line, dataset row, or both) and what is wrong, in at most twelve words, and
    ends with `Fix: ` and what to do.
    """


class RunFailure(Exception):
    """Failure of a run with valid recipe and data, printed without a traceback; exit status 1."""


class Stopped(Exception):
    """Stop of a run by a signal, after saving; exit status 75. The same command resumes it."""


# EX_TEMPFAIL of BSD's sysexits.h: "try again later", as a scheduler should.
STOPPED_STATUS = 75


_SECRETS = (  # finetune/recipe/urls.py does so for the addresses of messages
    (re.compile(r"(://)[^\s/'\"@]+@"), r"\1***@"),  # of a URL of any scheme
    (re.compile(r"(://[^\s'\"<>?]+\?)[^\s'\"<>]*=[^\s'\"<>]*"), r"\1***"),
    (re.compile(r"(?<![\w.])[\w.+~-]+:[^\s:/@'\"]{4,}@(?=[\w.-])"), "***@"),  # user:password@, without its scheme
    # A repository's name that is an account with its password, of which a library repeats the first part alone.
    (re.compile(r"(?<=got ')[\w.+~-]+:[^'\s/]{4,}(?=')"), "***"),
    (re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|xox[bap]-|AKIA)[A-Za-z0-9_-]{12,}"), r"\1***"),
    (re.compile(r"(?i)\b(bearer|basic) +[A-Za-z0-9._~+/=-]{8,}"), r"\1 ***"),
)
_SECRET_NAME = re.compile(r"(?i)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL)")
_SHORTEST = 8  # characters of a variable's value that counts as a secret
_folder: Path | None = None


def log_errors_to(folder: Path) -> None:
    """Set the run's folder for tracebacks of unforeseen errors."""
    global _folder
    _folder = folder


def without_secrets(text: str) -> str:
    """Returns a text without passwords of URLs, tokens of common forms, and values of variables named as secrets."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET_NAME.search(name) and not os.path.exists(value):
            text = text.replace(value, "***")
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def unforeseen(error: BaseException) -> str:
    """Returns one line for an error that is not a UserError, and writes its traceback to a file that the line names.

    The file is in the run's folder, else in the system's temporary folder, readable by its owner only.
    """
    text = without_secrets("".join(traceback.format_exception(error)))
    location = f"the traceback could not be written:\n{text}"
    for folder in (_folder, Path(tempfile.gettempdir())):
        if folder is None or not folder.is_dir():
            continue
        path = folder / f"finetune-error-{os.getpid()}-{uuid.uuid4().hex[:8]}.log"
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", errors="replace") as file:
                file.write(text)
        except OSError:
            continue
        location = f"the traceback is in {path}"
        break
    reason = without_secrets(" ".join(str(error).split()))[:300]
    fault = "If no other process and no machine failed, this is a fault of finetune"
    return f"{type(error).__name__}: {reason or 'no reason given'}. {fault}; {location}"
