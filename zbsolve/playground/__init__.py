"""A local page to try schedules: choose sizes and times or load an instance, see baselines, solve live.

``app`` is the web application, ``settings`` what the page's form says, ``jobs`` the solves that run beside
it, each in a process of its own (``worker``). It serves one person on this machine: nothing is stored, and
whoever can reach the port can use the processor. It does not run plans.
"""
