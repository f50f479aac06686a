"""Making a plan from a schedule and a bound."""

from __future__ import annotations

from zbsolve.errors import InfeasibleError
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.judge import check
from zbsolve.model.memory import peak_memory
from zbsolve.model.objective import Objective
from zbsolve.model.schedule import Schedule
from zbsolve.model.tolerances import is_closed
from zbsolve.plan.actions import Action, task_of
from zbsolve.plan.certificate import Proof, SolverInfo, relative_gap
from zbsolve.plan.lowering import lower
from zbsolve.plan.plan import Plan
from zbsolve.plan.queues import Queue, time_on_queues


def peaks_of(instance: Instance, schedule: Schedule) -> tuple[float, ...]:
    """Peak memory of each device under a schedule, static memory included."""
    return tuple(peak_memory(instance, d, order, schedule.pairs) for d, order in enumerate(schedule.orders))


def make_plan(
    instance: Instance,
    schedule: Schedule,
    *,
    objective: Objective,
    lower_bound: float,
    proof: Proof,
    solver: SolverInfo,
    judged: bool = False,
) -> Plan:
    """Lower a schedule and state its figures; raises ``InfeasibleError`` when it breaks a rule.

    A bound within float64 rounding of the cost is stated as the cost itself. ``judged``: the schedule has
    passed :func:`zbsolve.model.judge.check` already.
    """
    violations = [] if judged else check(instance, schedule)
    if violations:
        raise InfeasibleError(f"the schedule is not valid: {violations[0]}")
    cost = schedule.cost(objective)
    bound = min(lower_bound, cost)
    gap = relative_gap(cost, bound)
    return Plan(
        instance=instance,
        objective=objective,
        status="optimal" if is_closed(gap) else "feasible",
        makespan=schedule.makespan,
        span=schedule.span,
        lower_bound=bound,
        gap=gap,
        bound_proof=proof,
        solver=solver,
        peak_memory=peaks_of(instance, schedule),
        programs=lower(instance, schedule),
    )


def assume_queue(plan: Plan, queue: Queue) -> Plan:
    """The same programs, timed with the waits of a queue model: the plan then says that it assumes it.

    The lower bound stays one: queues only add waits.
    """
    timing = time_on_queues(plan.instance, plan.programs, queue)
    times: dict[Task | int, tuple[float, float]] = {t.task: (t.start, t.end) for t in timing.schedule}
    times |= {transfer.number: (transfer.start, transfer.end) for transfer in timing.transfers}

    def timed(action: Action) -> Action:
        place = action.message
        key = task_of(action) if place is None else place
        start, end = times[key]
        return action.model_copy(update={"start": start, "end": end})

    programs = tuple(
        program.model_copy(update={"actions": tuple(map(timed, program.actions))})
        for program in plan.programs
    )
    gap = relative_gap(timing.schedule.cost(plan.objective), plan.lower_bound)
    changes = {
        "programs": programs,
        "queue": queue,
        "makespan": timing.schedule.makespan,
        "span": timing.schedule.span,
        "gap": gap,
        "status": "optimal" if is_closed(gap) else "feasible",
    }
    return plan.model_copy(update=changes)
