"""Pipeline-parallel schedules: solved, certified, run, and compared with what was measured.

The path of the data is one way::

    Instance -> TaskGraph -> formulation -> Schedule (re-checked) -> Plan -> runtime -> Trace -> report

This package plans with neither torch nor a solver library imported; those live in
``zbsolve.runtime`` and ``zbsolve.formulations`` and are loaded when they are needed.
"""

__version__ = "0.1.0"
