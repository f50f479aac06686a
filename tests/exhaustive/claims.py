"""What the product says of an instance that is not so, by the exhaustive search's word."""

from __future__ import annotations

import contextlib
import json
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Literal

from tests.exhaustive.enumeration import Orders, least_span, memory, timed
from tests.exhaustive.judging import Programs, drawn, mutated, placed, valid
from tests.exhaustive.problem import Data, Problem, read
from tests.exhaustive.search import Optimum, named, search
from zbsolve.bounds.argument import Known
from zbsolve.bounds.arguments.work_and_way import work_bounds
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.catalogue import all_bounds, best_bound, bounds_from_lags
from zbsolve.bounds.refutation import Refutation, refuted_bounds, shaved_bounds
from zbsolve.errors import InfeasibleError, InputError
from zbsolve.formulations.common import FormulationResult, Status
from zbsolve.formulations.cpsat import solve_cpsat
from zbsolve.formulations.cpsat_lags import prove_lag
from zbsolve.formulations.milp import solve_milp
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, parse_instance
from zbsolve.model.judge import check
from zbsolve.model.kinds import TaskKind
from zbsolve.model.options import is_extended
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.model.serial import require_feasible, serial_orders
from zbsolve.model.simulator import simulate_for
from zbsolve.search.canonical import canonical
from zbsolve.solver.portfolio import solve
from zbsolve.solver.verify import reverify

Objective = Literal["makespan", "span"]
OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")
BACKENDS: tuple[Literal["highs", "cbc"], ...] = ("highs", "cbc")
TOLERANCE = 1e-9
MUTATIONS = 3

Claim = Callable[[Data], Iterator[str]]


@lru_cache(maxsize=8)
def _searched(data: str, objective: str) -> Optimum | None:
    return search(_read(data), objective)


@lru_cache(maxsize=8)
def _read(data: str) -> Problem:
    return read(json.loads(data))


def _best(data: Data, objective: str) -> Optimum | None:
    """The optimum; the claims about one instance share the search."""
    return _searched(json.dumps(data), objective)


def _above(value: float, cost: Fraction) -> bool:
    return value > float(cost) * (1 + TOLERANCE)


def _same(value: float, cost: Fraction) -> bool:
    return math.isclose(value, float(cost), rel_tol=TOLERANCE)


def _is_feasible(instance: Instance) -> bool:
    try:
        require_feasible(instance)
    except InfeasibleError:
        return False
    return True


def false_claims(claim: Claim, data: Data) -> list[str]:
    """What a kind of claim says wrongly of an instance; an unforeseen error counts."""
    try:
        return list(claim(data))
    except Exception as error:  # noqa: BLE001 - whatever is raised is a finding
        place = traceback.extract_tb(error.__traceback__)[-1]
        return [f"{type(error).__name__} in {Path(place.filename).name}, {place.name}: {error}"]


def of_bounds(data: Data) -> Iterator[str]:
    """Feasibility, combinatorial bounds, and what the judge says of optimal schedules and of changed ones."""
    instance = parse_instance(data, "case")
    for objective in OBJECTIVES:
        best = _best(data, objective)
        if _is_feasible(instance) != (best is not None):
            yield f"require_feasible says {_is_feasible(instance)}, exhaustive search {best is not None}"
            return
        if best is None:
            return
        simple = work_bounds(instance, objective)
        for bound in (*all_bounds(instance, objective), *simple):
            if _above(bound.value, best.cost):
                yield f"{bound.method} bound {bound.value:g} above {objective} {float(best.cost):g}"
        yield from _of_optimum(data, instance, objective, best)


def _of_optimum(data: Data, instance: Instance, objective: Objective, best: Optimum) -> Iterator[str]:
    orders = tuple(named(order) for order in best.orders)
    ours, pairs = _translated(orders)
    schedule = simulate_for(instance, ours, objective, pairs)
    if not _same(schedule.cost(objective), best.cost):
        said = schedule.cost(objective)
        yield f"simulate_for gives {objective} {said:g}, these orders have {float(best.cost):g}"
    for violation in check(instance, schedule):
        yield f"check refuses an optimal schedule of {objective}: {violation}"
    yield from _of_changes(_read(json.dumps(data)), instance, orders)


def of_orders(data: Data) -> Iterator[str]:
    """Times, least span and validity of random orders."""
    instance, problem, draw = parse_instance(data, "case"), _read(json.dumps(data)), Random(1)
    means = math.lcm(*range(1, problem.devices + 1))
    for _ in range(2):
        orders = drawn(problem, draw)
        ours, pairs = _translated(orders)
        times, span = timed(problem, orders), least_span(problem, orders, means)
        assert times is not None
        assert span is not None
        unit = problem.time_unit
        for objective, cost in zip(
            OBJECTIVES, (max(times[1].values()) * unit, span * unit / means), strict=True
        ):
            said = simulate_for(instance, ours, objective, pairs).cost(objective)
            if not _same(said, cost):
                yield f"simulate_for gives {objective} {said:g}, these orders have {float(cost):g}: {orders}"
        yield from _of_changes(problem, instance, orders)


def _of_changes(problem: Problem, instance: Instance, orders: Orders) -> Iterator[str]:
    """What the judge says of a schedule, of changed ones, and under caps at its very peaks."""
    draw = Random(0)
    programs = placed(problem, orders)
    unqueued = placed(replace(problem, contended=False, hop=_whole_hops(problem)), orders)
    assert programs is not None
    assert unqueued is not None
    for changed in (programs, unqueued, *(mutated(problem, programs, draw) for _ in range(MUTATIONS))):
        violations = check(instance, _schedule(problem, changed))
        if bool(violations) == valid(problem, changed):
            yield f"check says {violations or 'valid'} of {_shown(changed)}"
    peaks = [max(memory(problem, order), default=0) for order in orders]
    for device, peak in enumerate(peaks):
        for short in (0, 1) if peak else (0,):
            caps = [static + p for static, p in zip(problem.static, peaks, strict=True)]
            caps[device] -= short * max(1, peak // 1000)
            tight = [float(cap * problem.memory_unit) for cap in caps]
            violations = check(instance.with_changes(memory_cap=tight), _schedule(problem, programs))
            if bool(violations) != bool(short):
                yield f"check says {violations or 'valid'} under caps of {tight} of {_shown(programs)}"


def _whole_hops(problem: Problem) -> tuple[int, ...]:
    """Latency and transfer, where no transfer waits for another."""
    return tuple(map(sum, zip(problem.hop, problem.transfer, strict=True)))


def of_refutation(data: Data) -> Iterator[str]:
    """Costs that the devices' orders refute, with and without trials."""
    instance = parse_instance(data, "case")
    if is_extended(instance) or not _is_feasible(instance):
        return
    for objective in OBJECTIVES:
        best = _best(data, objective)
        if best is None:
            return
        cost = float(best.cost)
        if cost == 0.0:
            continue
        refutation = Refutation(instance, objective)
        for tried in (2 * cost, 1.1 * cost, cost):
            if refutation.refutes(tried):
                yield f"device orders refute {objective} {tried:g}, exhaustive search has {cost:g}"
                return
        refutation = Refutation(instance, objective)
        found = best_bound(instance, objective).value
        for of in (refuted_bounds, _some_shaved):
            for bound in of(refutation, found, 1.3 * cost):
                found = max(found, bound.value)
                if _above(bound.value, best.cost):
                    yield f"{of.__name__}: {bound.value:g} above {objective} {cost:g}"


def _some_shaved(refutation: Refutation, bound: float, cost: float) -> Iterator[Bound]:
    until = refutation.work + 300_000
    refutation.enough = lambda: refutation.work > until
    yield from shaved_bounds(refutation, bound, cost)


def of_lags(data: Data) -> Iterator[str]:
    """What follows from least distances between micro-batches that CP-SAT proves of few of them."""
    instance = parse_instance(data, "case")
    if is_extended(instance) or instance.num_microbatches == 1 or not _is_feasible(instance):
        return
    incumbent = canonical(instance, serial_orders(instance))
    lags = []
    for s, distance, to_end in product((0, instance.num_stages - 1), (1, 2), (False, True)):
        if distance + (0 if to_end else 1) <= instance.num_microbatches:
            answer = prove_lag(instance, s, distance, incumbent, to_end=to_end, time_limit=5.0)
            lags += [] if answer is None else [answer.lag]
    for objective in OBJECTIVES:
        best = _best(data, objective)
        assert best is not None
        for bound in bounds_from_lags(Known(instance, objective, lags=tuple(lags))):
            if _above(bound.value, best.cost):
                yield f"{bound.value:g} above {objective} {float(best.cost):g}: {bound.statement}"
        if best.cost > 0 and Refutation(instance, objective, lags=tuple(lags)).refutes(float(best.cost)):
            yield f"device orders with lags {lags} refute {objective} {float(best.cost):g}"


def of_cpsat(data: Data) -> Iterator[str]:
    """CP-SAT's status, bound and orders."""
    yield from _of_model(data, "cpsat", partial(solve_cpsat, time_limit=10.0))


def of_milp(data: Data) -> Iterator[str]:
    """The MILP's status, bound and orders."""
    for backend in BACKENDS:
        yield from _of_model(data, backend, partial(solve_milp, backend=backend, time_limit=10.0))


def _of_model(data: Data, who: str, run: Callable[[Instance, Objective], FormulationResult]) -> Iterator[str]:
    instance = parse_instance(data, "case")
    if is_extended(instance):
        return
    for objective in OBJECTIVES:
        best, result = _best(data, objective), run(instance, objective)
        said = f"{who} says {result.status} ({result.native_status}), bound {result.bound}, of {objective}"
        if best is None:
            if result.status in (Status.OPTIMAL, Status.FEASIBLE):
                yield f"{said}, where nothing fits"
            continue
        if result.status is Status.INFEASIBLE:
            yield f"{said} {float(best.cost):g}"
        if result.bound is not None and _above(result.bound, best.cost):
            yield f"{said} {float(best.cost):g}"
        if result.orders is not None:
            cost = simulate_for(instance, result.orders, objective).cost(objective)
            if cost < float(best.cost) * (1 - TOLERANCE):
                yield f"{said}: its orders cost {cost:g}, exhaustive search {float(best.cost):g}"
            if result.status is Status.OPTIMAL and not math.isclose(cost, float(best.cost), rel_tol=2e-6):
                yield f"{said}: its orders cost {cost:g}, exhaustive search {float(best.cost):g}"


def of_heuristic(data: Data) -> Iterator[str]:
    """Plan, status and gap of the constructive part."""
    yield from _of_solve(data, "heuristic", 1.0)


def of_exact_solve(data: Data) -> Iterator[str]:
    """The same of the exact model that starts from the heuristic's plan and bound."""
    with contextlib.suppress(InputError):  # an option that it does not model is refused by name
        yield from _of_solve(data, "cpsat", 10.0)


def of_solve(data: Data) -> Iterator[str]:
    """Plan, status and gap of the portfolio, and what its verification says."""
    yield from _of_solve(data, "auto", 0.2)


def _of_solve(data: Data, solver: str, time_limit: float) -> Iterator[str]:
    instance = parse_instance(data, "case")
    for objective in OBJECTIVES:
        best = _best(data, objective)
        try:
            plan = solve(instance, objective=objective, solver=solver, time_limit=time_limit).plan
        except InfeasibleError as error:
            if best is not None:
                yield f"{solver}: {error}, exhaustive search has {objective} {float(best.cost):g}"
            return
        said = f"{solver} says {plan.status} with {objective} {plan.cost:g}, bound {plan.lower_bound:g}"
        if best is None:
            yield f"{said} where nothing fits"
            return
        optimal = math.isclose(plan.cost, float(best.cost), rel_tol=2e-6)
        if (
            _above(plan.lower_bound, best.cost)
            or plan.cost < float(best.cost) * (1 - TOLERANCE)
            or (plan.status == "optimal" and not optimal)
        ):
            yield f"{said}, exhaustive search has {float(best.cost):g}"
        if plan.status == "optimal" and plan.gap > 1e-6:
            yield f"{said}: and a gap of {plan.gap:g}"
        if solver == "auto":
            again = reverify(plan)
            if again.violation is not None:
                yield f"{said}: {again.violation}"


def _translated(orders: Orders) -> tuple[tuple[tuple[Task, ...], ...], set[tuple[Task, Task]]]:
    """Orders as the product takes them, and their pairs."""
    pairs = {(_task(step[0]), _task(step[1])) for order in orders for step in order if len(step) == 2}
    return tuple(tuple(_task(task) for step in order for task in step) for order in orders), pairs


def _task(task: tuple[str, int, int]) -> Task:
    return Task(TaskKind(task[0]), task[1], task[2])


def _schedule(problem: Problem, programs: Programs) -> Schedule:
    unit = problem.time_unit
    return Schedule(
        tuple(
            tuple(TimedTask(_task(t), float(start * unit), float(end * unit)) for t, start, end in program)
            for program in programs
        )
    )


def _shown(programs: Programs) -> str:
    return "; ".join(
        " ".join(f"{t[0]}{t[1]}.{t[2]}[{start},{end}]" for t, start, end in program) for program in programs
    )


# Each kind of claim, and of every how many instances it is asked: what takes longer of fewer.
CLAIMS: tuple[tuple[Claim, int], ...] = (
    (of_bounds, 1),
    (of_orders, 10),
    (of_heuristic, 10),
    (of_refutation, 10),
    (of_cpsat, 10),
    (of_exact_solve, 50),
    (of_lags, 50),
    (of_milp, 100),
    (of_solve, 100),
)
