"""Re-deriving a plan's lower bound from the plan file alone.

Every argument of :mod:`zbsolve.bounds.catalogue` that applies to the instance is gone through anew, with the
evidence that the plan names where it needs some; a stated bound is either confirmed by it or refuted.
Lags, facts about few micro-batches that an exact model proved, are proven anew by CP-SAT before they count.
A bound that an exact model proved ("cpsat model") is confirmed only where an argument reaches it:
otherwise it rests on the word of the solver named, and that is said. A plan that costs less than what is
derived here breaks a rule, whatever it states. Whether the stated bound is above the plan's own cost is
:func:`zbsolve.plan.check.check_plan`'s question.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbsolve.bounds.argument import Evidence, Known, reach
from zbsolve.bounds.arguments.proven_lags import RefutedLagError, prove_again
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.catalogue import ARGUMENTS, bounds_from, highest
from zbsolve.bounds.waits import Lag, LagAnswer, LeastTime
from zbsolve.model.instance import Instance
from zbsolve.model.judge import Violation
from zbsolve.model.kinds import TaskKind
from zbsolve.model.serial import serial_orders
from zbsolve.model.tolerances import OPTIMAL_GAP, time_tolerance
from zbsolve.plan.plan import Plan

# Proving one lag anew takes a second or two where the solver proved it within its own limit.
SECONDS_FOR_LAGS = 60.0
SECONDS_FOR_REFUTATION = 60.0


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
    """Go through every argument for the plan's instance anew and judge the stated bound by them.

    The instance must be able to hold one micro-batch on each device: any plan whose schedule
    :func:`zbsolve.model.judge.check` accepts.
    """
    known = Known(plan.instance, plan.objective)
    try:
        derived, gone_through = _again(plan, known)
    except RefutedLagError as error:
        return _refuted(highest(bounds_from(known)), str(error))
    method, unit = plan.bound_proof.method, plan.instance.time_unit
    stated = plan.lower_bound
    cost = plan.schedule().cost(plan.objective)
    if derived.value > cost + time_tolerance(cost):
        return _refuted(
            derived,
            f"the programs give a {plan.objective} of {cost:.9g}, below {derived.value:.9g} {unit}, which no "
            f"schedule of this instance is below ({derived.method}): their times cannot be kept",
        )
    proven = plan.bound_proof.value
    if proven is not None and stated > reach(proven):
        return _refuted(
            derived, f"lower_bound is stated as {stated:.9g}, its own proof gives {proven:.9g} {unit}"
        )
    if stated <= reach(derived.value):
        place = "" if derived.device is None else f", device {derived.device}"
        higher = "" if stated >= derived.value * (1 - OPTIMAL_GAP) else f" gives {derived.value:.9g}"
        return Reverification(
            True, derived, f"bound re-verified: {stated:.9g} {unit} ({derived.method}{place}{higher})"
        )
    if gone_through:
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


def _again(plan: Plan, known: Known) -> tuple[Bound, bool]:
    """The highest bound that is proven anew, and whether the stated method gives none above it for certain.

    Raises
    ------
    RefutedLagError
        The proof names a lag that the instance does not have.
    """
    proof = plan.bound_proof
    lags = tuple(Lag(**lag.model_dump()) for lag in proof.lags)
    shaved = tuple(LeastTime(TaskKind(t.kind), t.stage, t.microbatch, t.value, t.after) for t in proof.shaved)
    applying = [argument for argument in ARGUMENTS if argument.applies(plan.instance)]
    without_use = bool(lags) and not any(argument.rests_on_lags for argument in applying)
    confirmed = _proven_again(plan.instance, lags) if lags and not without_use else ()
    all_proven = len(confirmed) == len(lags)
    evidence = Evidence(proof.method, plan.lower_bound, lags, shaved, all_proven, SECONDS_FOR_REFUTATION)
    known = known.with_lags(confirmed)
    replays = {argument.name: argument.replay(known, evidence) for argument in applying}
    derived = highest(bound for replay in replays.values() for bound in replay.bounds)
    if proof.method in replays:
        return derived, replays[proof.method].gone_through
    # Of an instance that it does not apply to an argument proves nothing.
    return derived, without_use or any(argument.name == proof.method for argument in ARGUMENTS)


def _proven_again(instance: Instance, lags: tuple[Lag, ...]) -> tuple[Lag, ...]:
    """:func:`zbsolve.bounds.arguments.proven_lags.prove_again` by CP-SAT, from the serial schedule on."""
    try:
        from zbsolve.formulations.cpsat_lags import prove_lag
    except ImportError:
        return ()  # no solver here: the bound stays unconfirmed

    def prover(instance: Instance, lag: Lag, seconds: float) -> LagAnswer | None:
        serial = serial_orders(instance)
        return prove_lag(instance, lag.stage, lag.distance, serial, to_end=lag.to_end, time_limit=seconds)

    return prove_again(instance, lags, prover, SECONDS_FOR_LAGS)


def _refuted(derived: Bound, sentence: str) -> Reverification:
    return Reverification(False, derived, sentence, Violation("bound", sentence))
