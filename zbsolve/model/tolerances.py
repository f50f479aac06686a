"""When two figures count as the same: the one policy that all of planning, proving and checking reads.

Every tolerance is a share of the largest amount in play, never an absolute number: in which unit times and
memory are given changes no answer. Amounts of memory are added up exactly (:mod:`zbsolve.model.memory`),
times are sums of float64.

Three sides, so that none contradicts another:

- The judge (:mod:`zbsolve.model.schedule`) and whoever asks what fits grant :func:`memory_limit` and
  :func:`time_tolerance`, no more and no less.
- What builds schedules stays within :func:`memory_room`, and hands them to the judge.
- What proves bounds reckons with :func:`proof_room`: whatever the judge accepts must have room there.
"""

from __future__ import annotations

# Caps such as `7 * mem_b` are computed in floats, or written with ten digits: what exceeds a cap by less than
# this share of it is within. No cap is known that well.
MEMORY_RTOL = 1e-9

# Times are sums of at most some hundred thousand float64 durations; this share of the makespan is far above
# their rounding and far below any duration that matters.
TIME_RTOL = 1e-9

# What sums of float64 lose by being added up in another order: costs closer than this are one.
ROUNDING = 1e-12

# By how much less than it says a combinatorial bound is taken to hold where a model must not be cut by it.
BOUND_ROUNDING = 1e-10

# "optimal" allows for the rounding inside the solvers that prove it, and for nothing else.
OPTIMAL_GAP = 1e-6

# A file may state its figures with seven digits.
FIGURE_RTOL = 1e-6

# A quotient of floats this close below or above a whole number is that number.
COUNT_ROUNDING = 1e-9

# CP-SAT's bound on a whole number of ticks, a float64, is this close to it.
TICK_ROUNDING = 1e-6

# What the dual bound of a MILP solver is trusted to, relative to the cost: it pivots in floating point.
DUAL_BOUND_RTOL = 4e-7

# Upper limits of variables lie so far above the incumbent's values: cutting it off would be an error.
UPPER_SLACK = 1e-7

# How far a MILP solver may miss a row whose largest coefficient is about one; within what proof_room adds.
ROW_FEASIBILITY = 1e-9

# An allocator rounds blocks up; below this share a difference of measured memory is no news.
MEASURED_MEMORY_RTOL = 0.02


def memory_limit(cap: float) -> float:
    """The most memory that counts as within a cap (infinite for none).

    What is held is never more than this without being over, so no larger amount is in play than the cap.
    """
    return cap + MEMORY_RTOL * cap


def memory_room(cap: float, static: float) -> float:
    """What a cap leaves for activations, for whoever builds a schedule."""
    return memory_limit(cap) - static


def proof_room(cap: float, static: float) -> float:
    """What a cap leaves for activations, for whoever proves that there is no room for more.

    Twice the tolerance: sums are rounded there, and what the judge accepts must have room.
    """
    return cap + 2 * MEMORY_RTOL * cap - static


def time_tolerance(makespan: float) -> float:
    """How far two times of a schedule of that makespan may be apart and count as one."""
    return TIME_RTOL * makespan


def is_closed(gap: float) -> bool:
    """Whether a gap between cost and bound, as a share of the cost, is mere rounding: the plan is optimal."""
    return gap <= OPTIMAL_GAP


def same_figure(stated: float, real: float) -> bool:
    """Whether a figure that a file states is the real one."""
    return abs(stated - real) <= FIGURE_RTOL * abs(real)
