"""The exceptions that a command turns into its exit status."""


class UserError(Exception):
    """A mistake in what the user gave us. Commands print it without a traceback and exit with status 2.

    The message says what is wrong, where (file and line, dataset row, or both) and what to do.
    """


class RunFailure(Exception):
    """A run that had to stop although recipe and data were in order. Printed without a traceback; exit status 1."""


class Stopped(Exception):
    """A run that was asked to stop, and saved. The same command goes on; exit status 75."""


# EX_TEMPFAIL of BSD's sysexits.h: "try again later", which is what a scheduler should do with it.
STOPPED_STATUS = 75
