"""Re-deriving a plan's lower bound from the plan file alone.

The combinatorial bounds are functions of the instance, so a stated bound is either confirmed here or refuted.
Lags, facts about few micro-batches that an exact model proved, are proven anew by CP-SAT before they count.
Costs that the devices' orders refuted (:mod:`zbsolve.bounds.refutation`) are refuted anew.
A bound that an exact model proved ("cpsat model") is confirmed only where a combinatorial one reaches it:
otherwise it rests on the word of the solver named, and that is said. A plan that costs less than what is
derived here breaks a rule, whatever it states. Whether the stated bound is above the plan's own cost is
:func:`zbsolve.plan.check.check_plan`'s question.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from zbsolve.bounds.bound import Bound
from zbsolve.bounds.catalogue import all_bounds, window_bounds
from zbsolve.bounds.refutation import DEVICE_ORDERS, LEAST_MOVE, Refutation
from zbsolve.bounds.waits import Lag, LeastTime
from zbsolve.model.judge import Violation
from zbsolve.model.kinds import TaskKind
from zbsolve.model.options import is_extended
from zbsolve.model.serial import serial_orders
from zbsolve.model.tolerances import OPTIMAL_GAP, time_tolerance
from zbsolve.plan.plan import Plan

# Proving one lag anew takes a second or two where the solver proved it within its own limit.
SECONDS_FOR_LAGS = 60.0
SECONDS_FOR_REFUTATION = 60.0
# Methods whose bound must come out again; an instance may have more (all_bounds), never fewer.
COMBINATORIAL = frozenset(
    ("two windows", "one machine", "memory area", "last forward", "work and way", "unpaired windows")
)


@dataclass(frozen=True, slots=True)
class Reverification:
    """What became of a stated bound.

    Attributes
    ----------
    confirmed : bool
        A combinatorial bound of the instance reaches the stated one (within 1e-6 of it).
    derived : Bound
        The highest combinatorial bound.
    sentence : str
        The outcome in words.
    violation : Violation, optional
        The stated bound contradicts what its own method gives, or the plan costs less than ``derived``.
    """

    confirmed: bool
    derived: Bound
    sentence: str
    violation: Violation | None = None


def reverify(plan: Plan) -> Reverification:
    """Compute the combinatorial bounds of the plan's instance and judge the stated one by them.

    The instance must be able to hold one micro-batch on each device: any plan whose schedule
    :func:`zbsolve.model.judge.check` accepts.
    """
    bounds = list(all_bounds(plan.instance, plan.objective))
    method, unit = plan.bound_proof.method, plan.instance.time_unit
    stated = plan.lower_bound
    lags: tuple[Lag, ...] = ()
    all_proven = False
    stands = False  # the method was gone through in full, and does not give the bound
    if is_extended(plan.instance):
        stands = method == DEVICE_ORDERS or bool(plan.bound_proof.lags)  # neither is proven of these
    else:
        try:
            lags, all_proven = _proven_again(plan)
        except _RefutedLagError as error:
            return _refuted(max(bounds, key=lambda bound: bound.value), str(error))
    if lags:
        bounds += window_bounds(plan.instance, plan.objective, lags)
    if method == DEVICE_ORDERS and all_proven:
        anew, stands = _refute_again(plan, lags)
        if anew is not None:
            bounds.append(anew)
    derived = max(bounds, key=lambda bound: bound.value)
    cost = plan.schedule().cost(plan.objective)
    if derived.value > cost + time_tolerance(cost):
        return _refuted(
            derived,
            f"the programs give a {plan.objective} of {cost:.9g}, below {derived.value:.9g} {unit}, which no "
            f"schedule of this instance is below ({derived.method}): their times cannot be kept",
        )
    reach = _reach(derived.value)
    proven = plan.bound_proof.value
    if proven is not None and stated > _reach(proven):
        return _refuted(
            derived, f"lower_bound is stated as {stated:.9g}, its own proof gives {proven:.9g} {unit}"
        )
    if stated <= reach:
        place = "" if derived.device is None else f", device {derived.device}"
        higher = "" if stated >= derived.value * (1 - OPTIMAL_GAP) else f" gives {derived.value:.9g}"
        return Reverification(
            True, derived, f"bound re-verified: {stated:.9g} {unit} ({derived.method}{place}{higher})"
        )
    if method in COMBINATORIAL or stands or (all_proven and any(bound.method == method for bound in bounds)):
        return _refuted(
            derived,
            f"lower_bound is stated as {stated:.9g} by {method}, which this instance does not give: "
            f"the combinatorial bound is {derived.value:.9g} {unit} ({derived.method})",
        )
    return Reverification(
        False,
        derived,
        f"bound not re-derived here: {stated:.9g} {unit} stated by {method}; "
        f"the combinatorial bound gives {derived.value:.9g} ({derived.method})",
    )


def _refute_again(plan: Plan, lags: tuple[Lag, ...]) -> tuple[Bound | None, bool]:
    """The stated bound if it is refuted anew as a cost, and whether it certainly cannot be."""
    until = time.monotonic() + SECONDS_FOR_REFUTATION
    refutation = Refutation(plan.instance, plan.objective, lags=lags, enough=lambda: time.monotonic() > until)
    cost = plan.lower_bound - 0.5 * OPTIMAL_GAP * abs(plan.lower_bound)  # well within _reach
    steps = [
        LeastTime(TaskKind(t.kind), t.stage, t.microbatch, t.value, t.after) for t in plan.bound_proof.shaved
    ]
    S, m = plan.instance.num_stages, plan.instance.num_microbatches
    if any(step.stage >= S or step.microbatch >= m for step in steps):
        return None, True
    # The solver came to it from other costs and followed other moves: all of them, before a plan is accused.
    for least_move in (LEAST_MOVE, 0.0):
        outcome = _replay(refutation, steps, cost, least_move)
        if outcome is not False:
            break
    return refutation.bound(cost) if outcome else None, outcome is False and refutation.complete


def _replay(refutation: Refutation, steps: list[LeastTime], cost: float, least_move: float) -> bool | None:
    """Whether the cost is refuted, each step shown anew before it counts; None when time is up.

    False as soon as a step is not shown. What was learnt until then is dropped.
    """
    start = refutation.known()
    outcome = refutation.refutes(cost, least_move)
    for step in steps:
        if outcome is not False:
            break
        shown = refutation.shows(step, cost, least_move=least_move)
        if not shown:
            outcome = shown
            break
        outcome = refutation.take(step, cost, least_move)
    if outcome is False:
        refutation.restore(start)
    return outcome


def _proven_again(plan: Plan) -> tuple[tuple[Lag, ...], bool]:
    """The lags that the proof names as far as they are proven anew, and whether all of them are.

    Raises
    ------
    _RefutedLagError
        A lag names no such tasks, or some schedule of these micro-batches has a shorter one.
    """
    stated = plan.bound_proof.lags
    if not stated:
        return (), True
    try:
        from zbsolve.formulations.cpsat_lags import prove_lag
    except ImportError:
        return (), False  # no solver here: the bound stays unconfirmed
    instance, until = plan.instance, time.monotonic() + SECONDS_FOR_LAGS
    confirmed: list[Lag] = []
    for lag in stated:
        where = f"bound_proof: lag of stage {lag.stage} over {lag.distance}"
        number = lag.distance + (0 if lag.to_end else 1)
        if lag.stage >= instance.num_stages or number > instance.num_microbatches:
            raise _RefutedLagError(f"{where}: the instance has no such tasks")
        answer = prove_lag(
            instance,
            lag.stage,
            lag.distance,
            serial_orders(instance),
            to_end=lag.to_end,
            time_limit=max(0.1, until - time.monotonic()),
        )
        reached = answer is not None and lag.value <= _reach(answer.lag.value)
        if answer is not None and answer.exact and not reached:
            raise _RefutedLagError(
                f"{where}: is stated as {lag.value:.9g}, the least is {answer.lag.value:.9g}"
            )
        if answer is not None and reached:
            confirmed.append(answer.lag._replace(value=min(lag.value, answer.lag.value)))
    return tuple(confirmed), len(confirmed) == len(stated)


class _RefutedLagError(Exception):
    """A lag that the instance does not have, in words."""


def _reach(value: float) -> float:
    """The highest stated value that float64 rounding lets pass for ``value``."""
    return value + OPTIMAL_GAP * abs(value)


def _refuted(derived: Bound, sentence: str) -> Reverification:
    return Reverification(False, derived, sentence, Violation("bound", sentence))
