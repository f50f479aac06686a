"""The command line: the only place that prints and sets exit codes.

Exit codes: 0 done; 1 the answer is no (infeasible, a violated rule, gradients that differ) or none was found
in time; 2 bad usage or input; 3 the environment failed; 130 interrupted with nothing to keep. Results go to
stdout, everything else to stderr. Imports are lazy: a command loads only what it uses.
"""

from __future__ import annotations

import gc
import sys
from io import TextIOWrapper

# Importing a module registers its commands; this order is that of the help page.
from zbsolve.cli import (  # noqa: F401
    advising,
    benching,
    cataloguing,
    doctoring,
    exchanging,
    linking,
    listing,
    measuring,
    partitioning,
    planning,
    playing,
    running,
    showing,
    sweeping,
)
from zbsolve.cli.base import app


def main() -> None:
    """Run the command line; :mod:`zbsolve.__main__` says what Ctrl-C does around it."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without µ is no reason to fail
    # A big plan is millions of small objects that all stay: collecting young ones often finds nothing and
    # costs a fifth of the time.
    gc.set_threshold(200_000, 20, 20)
    app()
