"""The joint decision: its certificate against exhaustive search, and cases worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.brute_force import brute_force
from tests.joint_oracle import (
    cheaper_decision,
    every_decision,
    has_schedule_below,
    least_cost,
    random_problem,
)
from zbsolve.errors import InfeasibleError, InputError, UndecidedError
from zbsolve.model.instance import Instance
from zbsolve.model.serial import require_feasible
from zbsolve.partition.cluster import (
    Cluster,
    DeviceGroup,
    Host,
    Link,
    device_classes,
    equal_cluster,
    load_cluster,
)
from zbsolve.partition.decisions import count_decisions
from zbsolve.partition.layers import Keep, Layer, LayerProfile, load_layers
from zbsolve.partition.outcome import better_of, even_decision, even_plan
from zbsolve.partition.problem import CHUNKS, Decision, DecisionProblem, Placement
from zbsolve.partition.relaxation import Relaxation
from zbsolve.partition.search import JointResult, JointSearch, decide
from zbsolve.partition.settled import settled_bound
from zbsolve.plan.check import check_plan
from zbsolve.solver.verify import reverify

TIMES = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0])
MEMORY = st.sampled_from([0.0, 0.5, 1.0, 2.0])


def exhaustive(problem: DecisionProblem) -> float:
    """Least cost over every decision and every order (infinite where nothing fits)."""
    best = math.inf
    for decision in every_decision(problem):
        best = min(best, least_cost(problem.instance(decision), problem.objective, best - 1e-6))
    return best


@st.composite
def problems(draw: st.DrawFn) -> DecisionProblem:
    """Unequal layers on unlike devices, at most 4 (stage, micro-batch) pairs."""
    p, placement, m = draw(
        st.sampled_from([(1, "linear", 3), (2, "linear", 2), (3, "linear", 1), (2, "v", 1), (2, "loop", 1)])
    )
    spare = draw(st.integers(0, 1))
    stages = CHUNKS[placement] * p
    fusible = draw(st.booleans())
    layers = tuple(
        Layer(
            t_f=draw(TIMES),
            t_b=draw(TIMES),
            t_w=draw(st.sampled_from([0.0, 1.0, 2.0])),
            t_bw=draw(st.sampled_from([1.5, 4.0])) if fusible else None,
            mem_b=draw(MEMORY),
            mem_w=draw(MEMORY),
            static_mem=draw(MEMORY),
            mem_out=draw(st.sampled_from([0.0, 0.5])),
        )
        for _ in range(stages + spare)
    )
    groups = tuple(
        DeviceGroup(
            speed=draw(st.sampled_from([1.0, 1.0, 2.0])),
            memory=draw(st.sampled_from([None, 3.0, 4.0, 6.0, 9.0])),
            node=d % 2,
        )
        for d in range(p)
    )
    cluster = Cluster(
        devices=groups,
        same_node=Link(
            latency=draw(st.sampled_from([0.0, 0.5])), bandwidth=draw(st.sampled_from([None, 1.0]))
        ),
        other_node=draw(st.sampled_from([None, Link(latency=1.0)])),
        host=Host(bandwidth=2.0, overlap=0.5),
    )
    keeps = draw(st.sampled_from([(Keep.plain,), (Keep.plain,), (Keep.plain, Keep.recompute), tuple(Keep)]))
    return DecisionProblem(
        LayerProfile(layers=layers),
        cluster,
        p,
        m,
        objective=draw(st.sampled_from(["makespan", "span"])),
        placements=(placement,),
        keeps=keeps if stages * m <= 2 else keeps[:1] if spare else keeps[:2],
    )


@settings(max_examples=25, derandomize=True, deadline=None)
@given(problems())
def test_joint_certificate_agrees_with_exhaustive_search(problem: DecisionProblem) -> None:
    """The plan is never below the least cost of all decisions, the joint bound never above, and both meet.

    Where R's may run anywhere they need not meet: no exact model knows R.
    """
    best = exhaustive(problem)
    if math.isinf(best):
        with pytest.raises(InfeasibleError, match="infeasible: no split"):
            decide(problem, time_limit=10)
        return
    recomputes = Keep.recompute in problem.keeps
    result = decide(problem, time_limit=0.3 if recomputes else 10)
    assert result.lower_bound - 1e-5 <= best <= result.plan.cost + 1e-5
    if not recomputes:
        assert result.plan.cost == pytest.approx(best, abs=1e-5)
        assert result.lower_bound == pytest.approx(best, abs=1e-5)
    assert not check_plan(result.plan)


def assert_holds(problem: DecisionProblem, time_limit: float) -> None:
    """No schedule of any decision beats the joint bound, the plan written least of all."""
    try:
        result = decide(problem, time_limit=time_limit)
    except InfeasibleError:
        assert cheaper_decision(problem, 1e6) is None
        return
    assert cheaper_decision(problem, result.lower_bound) is None
    assert result.gap >= 0
    assert result.plan.instance == problem.instance(result.decision)
    assert not check_plan(result.plan)
    assert reverify(result.plan).violation is None
    kept = better_of(result, even_plan(problem, time_limit))
    assert kept.gap >= 0
    assert set(kept.decision.keep) <= set(problem.keeps)


def test_no_schedule_of_any_decision_beats_the_joint_bound() -> None:
    """Random tiny problems, every split, placement, keep and order by a search that knows no bound."""
    for seed in range(25):
        assert_holds(random_problem(seed), 0.1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(16))
def test_no_schedule_of_any_decision_beats_the_joint_bound_thousands(part: int) -> None:
    """The same on 4,000 problems."""
    for seed in range(250 * part, 250 * (part + 1)):
        assert_holds(random_problem(seed), 0.3)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(problems(), st.integers(0, 1_000_000))
def test_the_search_that_judges_agrees_with_brute_force(problem: DecisionProblem, number: int) -> None:
    """On one plain decision of each problem: the least cost of all orders, counted out."""
    decisions = list(every_decision(replace(problem, keeps=(Keep.plain,))))
    instance = problem.instance(decisions[number % len(decisions)])
    expected = getattr(brute_force(instance), problem.objective)
    assert least_cost(instance, problem.objective) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_a_recomputation_may_run_before_the_gradient_arrives(
    objective: Literal["makespan", "span"],
) -> None:
    """Two layers on two devices that hold one activation: 38, R hidden behind the other device's work."""
    layers = tuple(Layer(t_f=t, t_b=t, t_w=1, mem_b=1, mem_w=1) for t in (1, 4))
    cluster = Cluster(devices=(DeviceGroup(count=2, memory=1.0),))
    both = (Keep.plain, Keep.recompute)
    result = decide(
        DecisionProblem(LayerProfile(layers=layers), cluster, 2, 4, objective=objective, keeps=both),
        time_limit=10,
    )
    # Device 1 works 4 (4 + 4 + 1) = 36 behind an F of 1. Recomputing, device 0 has its F's out in time; R's
    # fit between them. After the last B of device 1 come B 1 and W 1 of device 0, beside the last W of 1:
    # 1 + 36 - 1 + 2 = 38. Device 0 begins with the step and ends it: its window is as long. (With R as part
    # of B, at the end of the way back, 39.)
    assert result.decision.keep[0] is Keep.recompute
    assert result.plan.cost == pytest.approx(38)
    assert result.lower_bound == pytest.approx(38)
    assert any(action.op == "R" for program in result.plan.programs for action in program.actions)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(problems())
def test_no_family_bound_is_above_its_best_member(problem: DecisionProblem) -> None:
    """The bound before anything is settled holds for every single decision."""
    best = exhaustive(problem)
    (placement,) = problem.placements
    relaxation = Relaxation(problem, placement, math.inf)
    for bound in (relaxation.to_go, relaxation.to_go_after):
        if bound == relaxation.to_go_after and problem.objective == "span":
            continue
        assert min(map(bound, relaxation.starts())) <= best + 1e-5
    for effort in (0.0, 3.0):
        hurried = Relaxation(problem, placement, math.inf, effort)
        assert min(map(hurried.to_go, hurried.starts())) <= best + 1e-5


@settings(max_examples=40, derandomize=True, deadline=None)
@given(problems())
def test_settled_devices_bound_every_decision_that_begins_with_them(problem: DecisionProblem) -> None:
    """For each first device: the bound of it alone in the pipeline is not above its best member."""
    members: dict[tuple[int, ...], list[Instance]] = {}
    for decision in every_decision(problem):
        members.setdefault(_first_device(problem, decision), []).append(problem.instance(decision))
    (placement,) = problem.placements
    relaxation = Relaxation(problem, placement, math.inf)
    for start in relaxation.starts():
        for option in relaxation.options(start):
            if sum(option.after.used) == problem.num_devices:
                continue
            for keep in relaxation.keeps():
                if math.isinf(relaxation.alone(option, keep, 0.0, 0.0)):
                    continue
                key = (
                    option.cls,
                    start.middle,
                    *(x for s in option.segments for x in s),
                    *map(KEEPS.index, keep),
                )
                limit = settled_bound(relaxation, ((option, keep),)) - 1e-6
                for instance in members.get(key, []):
                    assert not has_schedule_below(instance, problem.objective, limit)


KEEPS = tuple(Keep)


def _first_device(problem: DecisionProblem, decision: Decision) -> tuple[int, ...]:
    """The class, the layers and the keeps of the pipeline's first device, as the search would settle them."""
    ends = [0]
    for size in decision.split:
        ends.append(ends[-1] + size)
    p, n = problem.num_devices, len(problem.profile.layers)
    chunks = [0] if decision.placement == "linear" else [0, p if decision.placement == "loop" else 2 * p - 1]
    cls = next(c for c, k in enumerate(problem.classes) if decision.devices[0] in k.members)
    middle = ends[p] if decision.placement == "loop" else n
    segments = [x for s in chunks for x in (ends[s], ends[s + 1])]
    return (cls, middle, *segments, *(KEEPS.index(decision.keep[s]) for s in chunks))


# --- least bottleneck -------------------------------------------------------------------------------


def busiest(problem: DecisionProblem, decision: Decision) -> float:
    """The work of the busiest device, infinite where a device cannot hold one micro-batch."""
    instance = problem.instance(decision)
    try:
        require_feasible(instance)
    except InfeasibleError:
        return math.inf
    return max(map(instance.device_work, range(instance.num_devices)))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(0, 100_000))
def test_the_least_bottleneck_is_that_of_the_best_decision(seed: int) -> None:
    """Counted over all decisions: exact for one chunk a device, never above it for two."""
    problem = random_problem(seed)
    (placement,) = problem.placements
    expected = min(busiest(problem, decision) for decision in every_decision(problem))
    relaxation = Relaxation(problem, placement, math.inf, 0.0)
    found = min(map(relaxation.to_go, relaxation.starts()))
    if CHUNKS[placement] == 1:
        assert found == pytest.approx(expected)
    else:
        assert found <= expected * (1 + 1e-9)


@pytest.mark.parametrize("placement", ["linear", "v", "loop"])
def test_some_device_holds_whole_layers(placement: Placement) -> None:
    """61 equal layers, a tiny one and one of 1.5 on 16 devices: one has 4, whatever the time limit."""
    layers = tuple(Layer(t_f=t, t_b=t, t_w=t) for t in (0.05, *61 * (1.0,), 1.5))
    problem = DecisionProblem(LayerProfile(layers=layers), equal_cluster(16), 16, 32, placements=(placement,))
    # With at most 3 of the 61 each, 16 devices hold 48 and the two others 1.5: one works 4 layers' F, B, W.
    for effort in (0.0, 300.0):
        relaxation = Relaxation(problem, placement, math.inf, effort)
        assert min(map(relaxation.to_go, relaxation.starts())) >= 32 * 4 * 3 * (1 - 1e-9)
    assert decide(problem, time_limit=0.5).lower_bound >= 32 * 4 * 3 * (1 - 1e-9)


@pytest.mark.parametrize(("placement", "layers"), [("linear", 5), ("v", 9), ("loop", 9)])
def test_the_least_bottleneck_knows_speeds_and_what_memory_forces(placement: Placement, layers: int) -> None:
    """2 devices of speed 1 and 2 that must checkpoint: F twice, 4 a layer and micro-batch at speed 1."""
    each = (Layer(t_f=1, t_b=1, t_w=1, mem_b=4, mem_out=1),) * layers
    cluster = Cluster(devices=(DeviceGroup(memory=3.0 + layers), DeviceGroup(speed=2.0, memory=3.0 + layers)))
    free, forced = (
        DecisionProblem(LayerProfile(layers=each), at, 2, 1, placements=(placement,), keeps=keeps)
        for at, keeps in (
            (cluster.with_memory(100.0), (Keep.plain, Keep.checkpoint)),
            (cluster, (Keep.plain, Keep.checkpoint)),
        )
    )
    bounds = []
    for problem in (free, forced):
        relaxation = Relaxation(problem, placement, math.inf, 0.0)
        expected = min(busiest(problem, decision) for decision in every_decision(problem))
        bounds.append(min(map(relaxation.to_go, relaxation.starts())))
        assert bounds[-1] <= expected * (1 + 1e-9)
    # A third for the slow device, in whole layers, at 3 each: 5 layers 2 + 3, 9 layers 3 + 6.
    assert bounds[0] == pytest.approx({5: 6.0, 9: 9.0}[layers])
    # One chunk of 5: at most 2 fit plain (8 of 8), so the other 3 are made anew, 4 each, on the fast device.
    if placement == "linear":
        assert bounds[1] == pytest.approx(6.0)


def equal_layers(blocks: int, head: float, **extra: float) -> LayerProfile:
    """Blocks of F = B = W = 1 and memory 1, then a head worth ``head`` of them."""
    block = Layer(t_f=1, t_b=1, t_w=1, mem_b=1, mem_w=1, **extra)
    last = Layer(t_f=head, t_b=head, t_w=head, mem_b=1, mem_w=1, **extra)
    return LayerProfile(layers=(block,) * blocks + (last,))


def test_twelve_layers_and_a_head_worth_three() -> None:
    """p=4, m=8: 104, provably, by 4 4 4 and the head alone."""
    result = decide(DecisionProblem(equal_layers(12, 3.0), equal_cluster(4), 4, 8), time_limit=20)
    # 15 layers' worth over 4 devices: one has at least 4, so works 8 * 12 = 96. The least head before one
    # with 4 or more: were only the first two that busy, the others would have 3 each, 12 + 3 = 15 > 14. So
    # the third has 4 as well, or something has 5: 8 * 15 = 120. Before the third run at least 4 + 4 F's
    # (4 4 4 3): 96 + 8 = 104.
    assert result.decision.split == (4, 4, 4, 1)
    assert result.plan.makespan == pytest.approx(104)
    assert result.lower_bound == pytest.approx(104)
    assert result.status == "optimal"
    assert result.decisions == math.comb(12, 3)


def test_the_slow_device_gets_less_and_comes_where_it_hurts_least() -> None:
    """6 equal layers, speeds 1 and 2, m=4, W=0: 4 layers on the fast device, in either order 4 * 4 + head."""
    layer = Layer(t_f=1, t_b=1, t_w=0, mem_b=1, mem_w=0)
    cluster = Cluster(devices=(DeviceGroup(speed=1.0), DeviceGroup(speed=2.0)))
    result = decide(DecisionProblem(LayerProfile(layers=(layer,) * 6), cluster, 2, 4), time_limit=20)
    # 2 layers at speed 1: F 2, B 2; 4 layers at speed 2: F 2, B 2. Equal stages of 4 a micro-batch: 16 of
    # work, F of the first stage before and its B after: 2 + 16 + 2 = 20. Every other split has a device with
    # at least 3 layers at speed 1 (24 of work) or 5 at speed 2 (4 * 5 = 20, F and B of the other one
    # before and after: 1 + 20 + 1).
    assert sorted(result.decision.split) == [2, 4]
    assert result.decision.split[result.decision.devices.index(1)] == 4
    assert result.plan.makespan == pytest.approx(20)
    assert result.lower_bound == pytest.approx(20)


def test_memory_decides_the_device_order() -> None:
    """The device that holds more takes the front, where more micro-batches are in flight."""
    cluster = Cluster(devices=(DeviceGroup(memory=2.0), DeviceGroup(memory=8.0)))
    result = decide(DecisionProblem(equal_layers(3, 1.0), cluster, 2, 6), time_limit=20)
    # 2 layers each: F 2, B 2, W 2, memory 2. The last device frees at once: one micro-batch is enough for it.
    # On the front one would wait for its B all the time. An F of 2 before the last device's six times F B W,
    # all but the last W; then the front's last B and W: 2 + 6 * 6 - 2 + 4 = 40.
    assert result.decision.devices == (1, 0)
    assert result.plan.makespan == pytest.approx(40)
    assert result.lower_bound == pytest.approx(40)


@pytest.mark.parametrize(
    ("layers", "p", "placement"), [(30, 4, "linear"), (5, 4, "linear"), (42, 16, "linear")]
)
def test_every_layer_exactly_once(layers: int, p: int, placement: Placement) -> None:
    """No layer lost, none twice, no empty stage."""
    problem = DecisionProblem(equal_layers(layers - 1, 1.0), equal_cluster(p), p, 4, placements=(placement,))
    result = decide(problem, time_limit=5)
    named = [stage.name for stage in result.plan.instance.stages]
    ends = [0]
    for size in result.decision.split:
        ends.append(ends[-1] + size)
    assert named == [f"layers {a}-{b - 1}" for a, b in pairwise(ends)]
    assert ends[-1] == layers
    assert min(result.decision.split) >= 1
    assert result.plan.instance.device_work(0) > 0


def test_fewer_layers_than_stages_is_an_error_that_says_so() -> None:
    """3 layers, 4 devices; and 5 layers in two chunks on each of 4."""
    for count, placement in ((3, "linear"), (5, "v")):
        with pytest.raises(InputError, match=f"{count} layers cannot fill"):
            DecisionProblem(
                equal_layers(count - 1, 1.0),
                equal_cluster(4),
                4,
                4,
                placements=(placement,),  # type: ignore[arg-type]
            )


# --- out of time, out of steps, interrupted ----------------------------------------------------------


def uneven_memory() -> DecisionProblem:
    """Ten layers of memory 1, the first of 6, on devices of 9: of the 9 splits of p = 2 only 1 to 3 fit.

    Neither the even split (5, 5) nor the balanced one does: the first plan comes by dividing.
    """
    layers = (
        Layer(t_f=1, t_b=1, t_w=1, mem_b=6, mem_w=0),
        *(Layer(t_f=1, t_b=1, t_w=1, mem_b=1, mem_w=0),) * 9,
    )
    return DecisionProblem(LayerProfile(layers=layers), equal_cluster(2, memory=9.0), 2, 4)


def test_running_out_is_told_apart_from_infeasible() -> None:
    """No step and no time prove nothing; enough steps find the plan; a memory of 5 is too little for any."""
    problem = uneven_memory()
    with pytest.raises(UndecidedError, match=r"no plan found within 0 steps.*raise the number of steps"):
        decide(problem, time_limit=1e9, steps=0)
    with pytest.raises(UndecidedError, match=r"no plan found within 1e-09 s.*raise the time limit"):
        decide(problem, time_limit=1e-9)
    assert decide(problem, time_limit=1e9, steps=100).plan.cost > 0
    with pytest.raises(InfeasibleError, match="infeasible: no split"):
        decide(replace(problem, cluster=equal_cluster(2, memory=5.0)), time_limit=1e9, steps=100)


@pytest.mark.parametrize("after", [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144])
def test_an_interrupt_at_any_moment_leaves_a_bound_that_holds(
    monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Ctrl-C at the n-th look at the clock, often amid changes to the queues: what is said then is true."""
    problem = DecisionProblem(equal_layers(6, 1.0), equal_cluster(3), 3, 4)
    optimum = decide(problem, time_limit=20)
    assert optimum.gap <= 1e-6
    looks = 0
    over = JointSearch._over

    def interrupted(self: JointSearch) -> bool:
        nonlocal looks
        looks += 1
        if looks == after:
            raise KeyboardInterrupt
        return over(self)

    monkeypatch.setattr(JointSearch, "_over", interrupted)
    try:
        result = decide(problem, time_limit=20)
    except KeyboardInterrupt:
        return  # before there was any plan
    assert result.interrupted or looks < after
    assert not check_plan(result.plan)
    assert result.lower_bound <= optimum.plan.cost + 1e-9


# --- recompute and offload -------------------------------------------------------------------------


def cheapest(memory: float, keeps: tuple[Keep, ...], host: Host | None = None) -> JointResult:
    """4 layers of memory 4 (1 handed on), p=2, m=4, on devices of ``memory``."""
    layer = Layer(t_f=1, t_b=1, t_w=1, mem_b=4, mem_w=1, mem_out=1)
    cluster = Cluster(devices=(DeviceGroup(count=2, memory=memory),), host=host)
    problem = DecisionProblem(LayerProfile(layers=(layer,) * 4), cluster, 2, 4, keeps=keeps)
    return decide(problem, time_limit=3)


def test_recomputing_where_it_is_needed_is_cheaper_than_everywhere() -> None:
    """Under a cap of one plain micro-batch: the choice is at most all-recompute, and below it."""
    everything = cheapest(9.0, (Keep.recompute,))
    chosen = cheapest(9.0, (Keep.plain, Keep.recompute))
    plain = cheapest(9.0, (Keep.plain,))
    assert chosen.plan.cost <= min(everything.plan.cost, plain.plan.cost)
    assert chosen.gap <= 0.01
    # Stage of 2 layers: F 2, B 2, W 2; the second device frees at once and need not recompute.
    assert chosen.decision.keep[-1] is Keep.plain
    assert Keep.recompute in chosen.decision.keep


def test_the_plan_has_each_recomputation_as_an_op() -> None:
    """R of each recomputing stage and micro-batch is in the plan, which keeps every rule of its instance."""
    result = cheapest(9.0, (Keep.plain, Keep.recompute))
    recomputing = result.decision.keep.count(Keep.recompute)
    ops = [action.op for program in result.plan.programs for action in program.actions]
    assert ops.count("R") == 4 * recomputing > 0
    assert not check_plan(result.plan)


def test_where_no_plain_plan_fits_checkpointing_does() -> None:
    """Devices of 7: two plain layers hold 8; made anew one by one, at most 4, an input and a W's 1."""
    with pytest.raises(InfeasibleError, match="allow checkpoint, recompute or offload"):
        cheapest(7.0, (Keep.plain,))
    chosen, everything = (
        cheapest(7.0, keeps) for keeps in ((Keep.plain, Keep.checkpoint), (Keep.checkpoint,))
    )
    assert chosen.plan.cost <= everything.plan.cost
    assert chosen.gap <= 0.01
    assert max(chosen.plan.peak_memory) <= 7
    with pytest.raises(InfeasibleError):  # one layer's 4 beside the other's input, 1
        cheapest(4.5, (Keep.plain, Keep.checkpoint))


def test_offloading_costs_the_transfers() -> None:
    """Bandwidth 4, a stage's 8 take 2 each way: F 4, B 4 when nothing hides; F 2, B 2 when all is hidden."""
    hidden = cheapest(20.0, (Keep.offload,), Host(bandwidth=4.0, overlap=1.0))
    # As plain stages without memory limits: 4 * 6 of work behind one F of 2.
    assert hidden.plan.makespan == pytest.approx(26)
    bare = cheapest(20.0, (Keep.offload,), Host(bandwidth=4.0))
    # 4 * (4 + 4 + 2) behind one F of 4.
    assert bare.plan.makespan == pytest.approx(44)


# --- device classes ---------------------------------------------------------------------------------


def test_devices_that_can_change_places_are_one_class() -> None:
    """Two nodes of two: exchanging within a node changes nothing, across nodes it changes the links."""
    cluster = Cluster(
        devices=(DeviceGroup(count=2, node=0), DeviceGroup(count=2, node=1)), other_node=Link(latency=1.0)
    )
    assert [cls.members for cls in device_classes(cluster)] == [(0, 1), (2, 3)]
    assert [cls.members for cls in device_classes(equal_cluster(4))] == [(0, 1, 2, 3)]
    unlike = Cluster(devices=(DeviceGroup(), DeviceGroup(memory=1.0), DeviceGroup(speed=2.0), DeviceGroup()))
    assert [cls.members for cls in device_classes(unlike)] == [(0, 3), (1,), (2,)]


def test_decisions_are_counted() -> None:
    """4 layers in 2 stages: 3 cuts; devices of two kinds: 2 orders, equal ones: 1; two keeps: 2^2."""
    layers = equal_layers(3, 1.0)
    assert count_decisions(DecisionProblem(layers, equal_cluster(2), 2, 1)) == 3
    unlike = Cluster(devices=(DeviceGroup(), DeviceGroup(speed=2.0)))
    assert count_decisions(DecisionProblem(layers, unlike, 2, 1)) == 6
    assert count_decisions(DecisionProblem(layers, unlike, 2, 1, keeps=(Keep.plain, Keep.recompute))) == 24


# --- shipped models and clusters ----------------------------------------------------------------------

# Model, cluster, micro-batches: two to eight devices, equal and unequal, one node and two.
SHIPPED = (
    ("llama-8b-128k", "8xA100-80G", 32),
    ("llama-8b-128k", "2x4xA100-80G", 32),
    ("llama-8b-128k", "8-unequal", 32),
    ("llama-7b", "8-unequal", 32),
    ("llama-7b", "8xA100-80G", 16),
    ("gemma-2b", "4xA100-40G", 16),
    ("qwen-14b", "8xA100-80G", 32),
    ("small-1b", "4-workstation", 16),
    ("small-1b", "2-mixed", 16),
    ("gemma-2b", "8-unequal", 24),
)


def shipped_problem(model: str, cluster: str, m: int) -> DecisionProblem:
    """A shipped model on all devices of a shipped cluster, linear."""
    folder = Path(str(resources.files("zbsolve.instances")))
    machines = load_cluster(folder / f"cluster-{cluster}.json")
    profile = load_layers(folder / f"model-{model}.json")
    return DecisionProblem(profile, machines, machines.num_devices, m)


def test_an_even_split_that_does_better_is_taken() -> None:
    """4 equal layers on 2 devices: a worse decision gives way to the even split, unless its own is fixed."""
    layers = tuple(Layer(t_f=1.0, t_b=1.0, t_w=1.0) for _ in range(4))
    free = DecisionProblem(LayerProfile(layers=layers), equal_cluster(2), 2, 4)
    fixed = replace(free, split=(3, 1))
    worse = decide(fixed, time_limit=5)
    even = even_plan(free)
    assert even is not None
    assert even.cost < worse.plan.cost
    assert better_of(worse, even) is worse
    taken = better_of(replace(worse, problem=free), even)
    assert (taken.decision, taken.plan) == (even_decision(free), even)
    best = decide(free, time_limit=5)
    assert better_of(best, even) is best  # no gain, no change


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("model", "cluster", "m"), SHIPPED)
def test_joint_gap_on_shipped_models(model: str, cluster: str, m: int) -> None:
    """At most 1 % between the plan and the bound on every decision, in 120 s."""
    result = decide(shipped_problem(model, cluster, m), time_limit=120, gap=1e-4)
    even = even_plan(result.problem)
    gain = "does not fit" if even is None else f"{1 - result.plan.cost / even.cost:.2%}"
    print(
        f"| {model} | {cluster} | {m} | {','.join(map(str, result.decision.split))} | {result.plan.cost:.1f} "
        f"| {result.lower_bound:.1f} | {result.gap:.3%} | {result.seconds:.0f} s | {gain} |"
    )
    assert result.gap <= 0.01
    assert not check_plan(result.plan)


@pytest.mark.parametrize(("model", "cluster", "m"), [SHIPPED[4], SHIPPED[7], SHIPPED[8]])
def test_joint_optimum_on_shipped_models(model: str, cluster: str, m: int) -> None:
    """Three that are proven optimal within seconds."""
    result = decide(shipped_problem(model, cluster, m), time_limit=30)
    assert result.status == "optimal"
