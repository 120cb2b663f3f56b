"""The exceptions that a command turns into its exit status."""


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
