"""The errors that users see. Each carries one line: what is wrong, where, and how to mend it.

The command line maps them to exit codes (1: the answer is no; 2: bad usage or input;
3: the environment failed); library users catch :class:`ZbsolveError`.
"""


class ZbsolveError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 2


class InputError(ZbsolveError):
    """A file, field or option is not usable as given."""

    exit_code = 2


class InfeasibleError(ZbsolveError):
    """The question was understood and the answer is no (a cap too small, a violated rule)."""

    exit_code = 1


class UndecidedError(ZbsolveError):
    """No answer was found in the steps or the time given, and none was proven impossible."""

    exit_code = 1


class EnvironmentFailedError(ZbsolveError):
    """Something outside the input failed: no torch, no solver, a dead rank."""

    exit_code = 3
