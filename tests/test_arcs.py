"""Arcs: each holds in every canonical order, no edge of the graph is missing, and paths can follow them."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings

from tests.brute_force import all_orders, length
from tests.extended_strategies import Pair, earliest_ends, extended_instances, programs
from tests.strategies import small_instances
from zbsolve.bounds.arcs import Arc, Job, Reason, arcs, dependencies, order_arcs, pass_arcs, pass_order
from zbsolve.bounds.waits import Lag
from zbsolve.model.graph import Edge, Task, TaskGraph
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.kinds import BW, B, F, R, TaskKind, W


@settings(max_examples=60, derandomize=True, deadline=None)
@given(small_instances())
def test_every_arc_holds_in_every_order(instance: Instance) -> None:
    """Exhaustively, within the caps: the second task starts at least the lag after the first ends."""
    m = instance.num_microbatches
    for _, starts in all_orders(instance):
        begun = {Task(TaskKind(kind), s, j): at for (kind, s, j), at in starts.items()}
        ended = {task: at + length(instance, (str(task.kind), *task[1:])) for task, at in begun.items()}
        _assert_kept(arcs(instance), begun, ended, m)
        _assert_kept(pass_arcs(instance), _as_passes(begun), _as_passes(ended), m)


def _as_passes(times: dict[Task, float]) -> dict[Task, float]:
    """A BW under the name of B."""
    return {task._replace(kind=B if task.kind is BW else task.kind): at for task, at in times.items()}


def _assert_kept(found: Iterable[Arc], begun: dict[Task, float], ended: dict[Task, float], m: int) -> None:
    for arc in found:
        for before, after in arc.tasks(m):
            if before in ended and after in begun:
                assert begun[after] >= ended[before] + arc.lag - 1e-9, arc


@settings(max_examples=60, derandomize=True, deadline=None)
@given(programs())
def test_dependencies_hold_with_every_option(
    program: tuple[Instance, tuple[tuple[Task, ...], ...], frozenset[Pair]],
) -> None:
    """With R's, pairs, replicas: no task that runs by itself starts before what it waits for has ended."""
    instance, orders, pairs = program
    ended = earliest_ends(instance, orders, pairs)
    alone = {task for order in orders for task in order} - {task for pair in pairs for task in pair}
    begun = {task: ended[task] - _length(instance, task) for task in alone}
    _assert_kept(dependencies(instance), begun, ended, instance.num_microbatches)


def _length(instance: Instance, task: Task) -> float:
    stage = instance.stages[task.stage]
    return {F: stage.t_f, R: stage.t_r, B: stage.t_b, W: stage.t_w, BW: stage.t_bw}[task.kind] or 0.0


@settings(max_examples=60, derandomize=True, deadline=None)
@given(extended_instances())
def test_dependencies_are_the_edges_of_the_graph(instance: Instance) -> None:
    """Neither more nor fewer, micro-batch by micro-batch."""
    m = instance.num_microbatches
    found = [Edge(a, b, arc.lag) for arc in dependencies(instance) for a, b in arc.tasks(m)]
    assert sorted(found) == sorted(TaskGraph(instance).edges)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(extended_instances())
def test_a_path_meets_the_passes_of_a_micro_batch_in_order(instance: Instance) -> None:
    """Every arc leads forward in :func:`pass_order`, or comes from an earlier micro-batch."""
    place = {job: number for number, job in enumerate(pass_order(instance))}
    assert len(place) == 3 * instance.num_stages
    for arc in pass_arcs(instance, (Lag(0, 1, 2.0),)):
        assert arc.distance > 0 or place[arc.before] < place[arc.after], arc


def test_a_recomputation_lies_between_its_forward_and_backward() -> None:
    """F, R of 3, then B or BW: passes have no R, and the backward starts 3 after F ends."""
    stage = {"device": 0, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_bw": 1.5, "t_r": 3.0, "mem_b": 1.0}
    instance = make_instance(num_devices=1, num_microbatches=2, stages=[stage])
    own = [arc for arc in pass_arcs(instance) if arc.distance == 0]
    f, b, w = Job(F, 0), Job(B, 0), Job(W, 0)
    assert own == [Arc(f, b, 0, 3.0, Reason.DEPENDENCY), Arc(b, w, 0, 0.0, Reason.DEPENDENCY)]
    assert Arc(Job(B, 0), Job(BW, 0), 1, 0.0, Reason.ORDER) in order_arcs(instance)


def test_a_lag_counts_from_the_start() -> None:
    """F's of 2 start 7 apart, so end 7 apart; a dependency of lag 1 is 2 + 1 from start to start."""
    instance = equal_stages(2, 4, 2.0, 5.0, 1.0, 1.0)
    found = {arc.reason: arc for arc in pass_arcs(instance, (Lag(1, 2, 7.0), Lag(1, 1, 9.0, to_end=True)))}
    assert found[Reason.LAG][:3] == (Job(F, 1), Job(F, 1), 2)
    assert found[Reason.LAG].between_starts(2.0) == found[Reason.LAG].between_ends(2.0, 2.0) == 7.0
    (hop,) = (arc for arc in dependencies(instance) if arc.after == Job(F, 1))
    assert (hop.between_starts(2.0), hop.between_ends(2.0, 5.0)) == (3.0, 6.0)


def test_memory_forces_nothing_that_is_not_proven() -> None:
    """A cap of one micro-batch puts its backward before the next F, but not with pairs or replicas."""
    stage = {"device": 0, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_bw": 2.0, "mem_b": 1.0}
    for replicas, changes, forced in ((1, {}, {B, BW}), (1, {"t_fb": 2.5}, set()), (2, {}, set())):
        instance = make_instance(
            num_devices=1,
            num_microbatches=3,
            replicas=replicas,
            stages=[{**stage, **changes}] * replicas,
            memory_cap=1.0 * replicas,
        )
        memory = {arc.before.kind for arc in arcs(instance) if arc.reason is Reason.MEMORY}
        assert memory == forced
