"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """A mistake in what the user gave us. Commands print it without a traceback and exit with status 2.

    The message says what is wrong, where (file and line, dataset row, or both) and what to do.
    """


class RunFailure(Exception):
    """A run that had to stop although recipe and data were in order. Printed without a traceback; exit status 1."""
