"""Running a plan on torch: profile, split backward, transport, executor, worker, emulation.

Needs torch (``pip install "zbsolve[runtime]"``) and no solver: a node that runs needs only the plan file.
"""
