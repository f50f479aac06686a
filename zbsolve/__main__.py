"""``python -m zbsolve`` is the ``zbsolve`` command."""

from zbsolve.cli import main

main()
