"""Every rule of a plan file: its schedule, its messages, its stated figures."""

from __future__ import annotations

from collections.abc import Sequence

from zbsolve.errors import InfeasibleError
from zbsolve.model.judge import Violation, check
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import simulate_for
from zbsolve.model.tolerances import is_closed, same_figure, time_tolerance
from zbsolve.plan.actions import Action, Program
from zbsolve.plan.certificate import relative_gap
from zbsolve.plan.lowering import dry_run, lower
from zbsolve.plan.make import peaks_of
from zbsolve.plan.plan import Plan
from zbsolve.plan.queues import Transfer, time_on_queues

# --- judging a plan ----------------------------------------------------------------------------


def check_plan(plan: Plan) -> list[Violation]:
    """Every rule that a plan breaks: the schedule's, the messages', and the figures it states."""
    schedule = plan.schedule()
    violations = check(plan.instance, schedule)
    if violations:
        return violations
    violations += _check_messages(plan, schedule)
    stuck = dry_run(plan.instance, plan.programs)
    if stuck is not None:
        violations.append(Violation("deadlock", str(stuck)))
    violations += _check_figures(plan, schedule)
    return violations


def _check_messages(plan: Plan, schedule: Schedule) -> list[Violation]:
    expected = {
        (a.op, a.stage, a.microbatch): (d, a) for d, a in _message_actions(lower(plan.instance, schedule))
    }
    queued: dict[int, Transfer] = {}
    if plan.queue != "unlimited":
        try:
            timing = time_on_queues(plan.instance, plan.programs, plan.queue)
        except InfeasibleError as error:
            return [Violation("messages", str(error))]
        queued = {transfer.number: transfer for transfer in timing.transfers}
    found: set[tuple[str, int, int]] = set()
    violations = []
    tolerance = time_tolerance(schedule.makespan)
    for device, action in _message_actions(plan.programs):
        key = (action.op, action.stage, action.microbatch)
        home, unhindered = expected.get(key, (None, action))
        due = unhindered if action.message is None else queued.get(action.message, unhindered)
        if key in found:
            violations.append(Violation("messages", f"device {device}: {action} appears twice"))
        elif home != device:
            violations.append(Violation("messages", f"device {device}: {action} is not needed there"))
        elif max(abs(action.start - due.start), abs(action.end - due.end)) > tolerance:
            violations.append(
                Violation(
                    "messages",
                    f"device {device}: {action} is stated from {action.start:g} to {action.end:g}, "
                    f"its data leave at {due.start:g} and arrive at {due.end:g}",
                )
            )
        found.add(key)
    for op, stage, microbatch in sorted(expected.keys() - found):
        violations.append(Violation("messages", f"{op}{stage}.{microbatch} is missing"))
    return violations


def _message_actions(programs: Sequence[Program]) -> list[tuple[int, Action]]:
    return [(p.device, action) for p in programs for action in p.actions if not action.is_compute]


def _check_figures(plan: Plan, schedule: Schedule) -> list[Violation]:
    """Stated makespan, span, peak memory, gap and status against what the programs really give."""
    peaks = peaks_of(plan.instance, schedule)
    cost = schedule.cost(plan.objective)
    gap = relative_gap(cost, plan.lower_bound)
    rows = [
        ("makespan", plan.makespan, schedule.makespan),
        ("span", plan.span, schedule.span),
        *((f"peak_memory[{d}]", plan.peak_memory[d], peak) for d, peak in enumerate(peaks)),
    ]
    found = [
        f"{name} is stated as {stated:.10g}, the programs give {real:.10g}"
        for name, stated, real in rows
        if not same_figure(stated, real)
    ]
    if not same_figure(1.0 - plan.gap, 1.0 - gap) or plan.gap < 0:
        found.append(f"gap is stated as {plan.gap:.10g}, the programs and lower_bound give {gap:.10g}")
    if plan.lower_bound > cost + time_tolerance(cost):
        found.append(f"lower_bound {plan.lower_bound:.10g} is above the plan's own cost {cost:.10g}")
    if plan.status == "optimal" and not is_closed(gap):
        found.append(f"status is optimal but the gap is {100 * gap:.4g}%: not proven")
    # Each single time may be off by the tolerance; all of a path together may not gain by it.
    least = simulate_for(plan.instance, schedule.orders, plan.objective, schedule.pairs).cost(plan.objective)
    if cost < least - time_tolerance(least):
        found.append(f"{plan.objective} {cost:.10g} is below {least:.10g}, the least that these orders take")
    return [Violation("figures", sentence) for sentence in found]
