"""Heads and tails: hand-worked, never contradicted by a schedule, the same compiled or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from tests.strategies import small_instances
from zbsolve.benchmark.random_instances import random_instance
from zbsolve.bounds import forced_work
from zbsolve.bounds.catalogue import best_bound
from zbsolve.bounds.waits import back
from zbsolve.bounds.windows import windows
from zbsolve.errors import InfeasibleError
from zbsolve.formulations.cpsat import CpSatModel
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.kinds import BW, B, F, W
from zbsolve.model.schedule import Schedule
from zbsolve.model.serial import require_feasible, serial_orders
from zbsolve.model.simulator import simulate
from zbsolve.search.canonical import canonical
from zbsolve.search.list_scheduler import ListScheduler
from zbsolve.search.policies import presets

FloatArray = NDArray[np.float64]

KIND = {F: 0, B: 1, BW: 1, W: 2}


def two_stages_on_one_device() -> Instance:
    """Unit times, M_B = M_W = 1, room for the two stages of one micro-batch."""
    stages = [{"device": 0, "t_f": 1, "t_b": 1, "t_w": 1, "mem_b": 1, "mem_w": 1} for _ in range(2)]
    instance = make_instance(name="turn", num_devices=1, num_microbatches=2, stages=stages)
    return instance.with_changes(memory_cap=2.0)


def test_heads_count_the_work_that_frees_memory() -> None:
    """F0 F1 B1 W1 have run before the next F0 (4), all six tasks and that F0 before the next F1 (7).

    Two F0's leave no room for an F1, so B1 comes first, and beside its pending W there is no room either.
    Paths alone see F0 wait for B1: 3. Nothing but all other eleven tasks can follow the first F0.
    """
    found = windows(two_stages_on_one_device())
    whole = 1
    assert found.heads[0, 0, 1, whole] == 4.0
    assert found.heads[0, 1, 1, whole] == 7.0
    assert found.tails[0, 0, 0, whole] == 11.0


def test_waits_add_up_from_device_to_device() -> None:
    """One micro-batch at a time on 2 devices: F0 F1 B1 B0 W0 take 5, so micro-batch j starts at 5 j."""
    found = windows(equal_stages(2, 4, memory_cap=1))
    assert found.heads[0, 0, :, 2].tolist() == [0.0, 5.0, 10.0, 15.0]
    # After the last F0: F1 B1 B0 W0. After each one before it, 5 more.
    assert found.tails[0, 0, :, 2].tolist() == [19.0, 14.0, 9.0, 4.0]


def test_growth_needs_room_before_the_backward() -> None:
    """M_W = 2, M_B = 1 on stage 0: B0 grows beside its own M_B, so with cap 2 nothing of stage 1 is left.

    F0 F1 B1 W1 come before B0: 4, where paths alone say 3.
    """
    stages = [{"device": 0, "t_f": 1, "t_b": 1, "t_w": 1, "mem_b": 1, "mem_w": 2 - s} for s in range(2)]
    instance = make_instance(name="growth", num_devices=1, num_microbatches=1, stages=stages, memory_cap=2.0)
    assert windows(instance).heads[1, 0, 0, 1] == 4.0


def test_a_fused_backward_needs_no_room_for_growth() -> None:
    """Cap 2, M_B = 1, M_W = 3: two F's fit, for BW frees at once and adds nothing, B would grow to 4."""
    stage = {"device": 0, "t_f": 1, "t_b": 1, "t_w": 1, "mem_b": 1, "mem_w": 3}
    split = make_instance(name="fuse", num_devices=1, num_microbatches=2, stages=[stage], memory_cap=3.0)
    fused = split.with_changes(stages=[{**stage, "t_bw": 2}], memory_cap=2.0)
    assert windows(fused).heads[0, 0, 1, 1] == 1.0
    assert windows(split).heads[0, 0, 1, 1] == 3.0  # F B W, and only then room for M_B beside what is left


def least_over_all_states(
    heads: FloatArray,
    lengths: FloatArray,
    memory: FloatArray,
    room: float,
    opening: float,
    chain: int,
    place: int,
    j: int,
    need: float,
    least_last: int,
    least_closed: int,
    rest_first: bool,
) -> float:
    """What :func:`zbsolve.bounds.forced_work.least_time_before` promises, by trying every state there is."""
    rows, m = 2 * chain, heads.shape[1]
    best = math.inf
    for ran in product(range(m + 1), repeat=rows):
        if any(after > before for before, after in pairwise(ran)):
            continue
        if ran[place] != j or any(count <= j for count in ran[:place]):
            continue
        if ran[rows - 1] < least_last or ran[chain] < least_closed:
            continue
        held = need + sum((ran[k] - ran[rows - 1 - k]) * memory[k] for k in range(chain))
        if rest_first:
            own = [[ran[k] + (place == k)] for k in range(chain)]
        else:
            own = [list(range(ran[rows - 1 - k] + 1)) for k in range(chain)]
        for rests in product(*own):
            pending = sum((ran[rows - 1 - k] - rests[k]) * memory[2 + k] for k in range(chain))
            if held + (0.0 if rest_first else pending) > room or max(rests) > m:
                continue
            counts = (*ran, *rests)
            end = -math.inf
            for head, row in sorted((heads[r, i], r) for r, count in enumerate(counts) for i in range(count)):
                if head > -math.inf:
                    end = max(end, head) + lengths[row]
            if ran[chain] > 0:
                work = [count * length for count, length in zip(counts, lengths, strict=True)]
                early = sum(work[:chain]) + (sum(work[rows:]) if rest_first else 0.0)
                end = max(end, heads[chain, 0] + sum(work) - min(early, opening))
            best = min(best, end)
    return best


@pytest.mark.parametrize("chain", [1, 2])
@pytest.mark.parametrize("rest_first", [False, True])
def test_least_time_is_the_least_over_all_states(chain: int, rest_first: bool) -> None:
    """No state is skipped that would allow an earlier start, and none invented: small whole numbers."""
    draw = np.random.default_rng(chain)
    m = 5 - chain
    for _ in range(1500):
        heads = np.sort(draw.integers(0, 6, (3 * chain, m)).astype(float))
        lengths = draw.integers(0, 5, 3 * chain).astype(float)
        memory = np.zeros(4)
        memory[:chain], memory[2 : 2 + chain] = draw.integers(0, 6, chain), draw.integers(0, 3, chain)
        if draw.random() < 0.2:
            heads[2 * chain :, : draw.integers(0, m)] = -math.inf
        place, j = int(draw.integers(0, 2 * chain)), int(draw.integers(0, m))
        least_last = int(draw.integers(0, j + 1)) if place < 2 * chain - 1 else 0
        least_closed = int(draw.integers(0, j + 1)) if chain == 2 and place < 2 else 0
        room, opening, need = (float(draw.integers(0, most)) for most in (12, 24, 4))
        state = (heads, lengths, memory, room, opening, chain, place, j, need, least_last, least_closed)
        expected = least_over_all_states(*state, rest_first)
        assert forced_work.least_time_before(*state, -math.inf, rest_first) == expected
        known = float(draw.integers(0, 30))
        assert max(known, forced_work.least_time_before(*state, known, rest_first)) == max(known, expected)


def some_schedules(instance: Instance) -> list[Schedule]:
    """The serial schedule and those of several list-scheduling policies."""
    scheduler = ListScheduler(instance)
    schedules = [simulate(instance, serial_orders(instance))]
    for policy in presets(instance, patiences=2):
        if np.isfinite(scheduler.run(policy)[0]):
            schedules.append(simulate(instance, canonical(instance, scheduler.orders())))
    return schedules


@settings(max_examples=150, derandomize=True, deadline=None)
@given(small_instances(max_passes=10, capped=True))
def test_no_schedule_contradicts_heads_and_tails(instance: Instance) -> None:
    """In every schedule each task starts no earlier than its head and has at least its tail to go."""
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    found = windows(instance)
    p, first = instance.num_devices, instance.stages[0].device
    for schedule in some_schedules(instance):
        end = {d: max(t.end for t in schedule if instance.stages[t.task.stage].device == d) for d in range(p)}
        for timed in schedule:
            kind, s, j = timed.task
            stage = instance.stages[s]
            fusible = stage.t_bw is not None
            if kind is W and fusible:
                continue  # stands in for the rest of its backward
            # Of a stage that can fuse, a tail counts from the earliest end of the gradient.
            left_at = timed.start + back(stage) if KIND[kind] == 1 and fusible else timed.end
            for observer, last in ((p, schedule.makespan), (first, end[first])):
                assert timed.start >= found.heads[KIND[kind], s, j, observer] - 1e-9
                assert last - left_at >= found.tails[KIND[kind], s, j, observer] - 1e-9


@dataclass
class OneTask(CpSatModel):
    """The least time before (or after) one task, by the plain rules: nothing of what is tested helps."""

    target: tuple[int, int, int] = (0, 0, 0)  # kind as in KIND, stage, micro-batch
    after: bool = False

    def add_cost(self) -> None:
        self.cost = self.model.new_int_var(0, self.upper * self.ticks.fine + self.ticks.zeros, "least")

    def add_objective(self) -> None:
        kind, s, j = self.target
        backward = self.backward[s, j]
        start = (self.forward[s, j], backward.start, backward.w_start)[kind]
        self.model.minimize(self.cost)
        if not self.after:
            self.model.add(start <= self.cost)
            return
        clock = self.ticks.instance.stages[s]
        left_at = start + int((clock.t_f, back(clock), clock.t_w)[kind])
        for (q, _), each in self.backward.items():
            if (
                self.objective == "makespan"
                or self.instance.stages[q].device == self.instance.stages[0].device
            ):
                self.model.add(each.released - left_at <= self.cost)

    def add_redundant_bounds(self) -> None: ...

    def add_windows(self) -> None: ...

    def _add_memory_precedences(self) -> None: ...

    def _precedences_suffice(self, stages: tuple[int, ...]) -> bool:
        return False


@settings(max_examples=100, derandomize=True, deadline=None)
@given(small_instances(max_passes=9, capped=True), st.data())
def test_heads_and_tails_against_exact_least_times(instance: Instance, data: st.DataObject) -> None:
    """On the solver's clock, no head is above the earliest start of its task, no tail above the least rest.

    Both in the whole step and in the window of stage 0's device, with the minimum proven by an exact model.
    """
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    objective = data.draw(st.sampled_from(["makespan", "span"]))
    observer = instance.num_devices if objective == "makespan" else instance.stages[0].device
    s = data.draw(st.integers(0, instance.num_stages - 1))
    j = data.draw(st.integers(0, instance.num_microbatches - 1))
    kind = data.draw(st.integers(0, 1 if instance.stages[s].t_bw is not None else 2))
    after = data.draw(st.booleans())
    built = OneTask(instance, objective, target=(kind, s, j), after=after)
    found = windows(built.ticks.instance)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(built.model) == cp_model.OPTIMAL
    assert (found.tails if after else found.heads)[kind, s, j, observer] <= solver.objective_value + 1e-6


def test_next_to_no_memory_and_too_little_of_it() -> None:
    """A mem_w beyond any ratio is like none; static memory over the cap is for others to refuse."""
    stages = [
        {"device": 0, "t_f": 1, "t_b": 1, "t_w": 1, "mem_b": 1, "mem_w": mem_w} for mem_w in (1.0, 1e-320)
    ]
    instance = make_instance(name="tiny", num_devices=1, num_microbatches=4, stages=stages, memory_cap=2.0)
    # One device, never idle: 4 * 2 * 3 of work.
    assert best_bound(instance, "makespan").value == 24.0
    without = instance.with_changes(memory_cap=1.0, static_mem=[2.0])
    assert best_bound(without, "makespan").value >= 24.0


@pytest.mark.parametrize("seed", [25, 38, 58])
def test_machine_code_finds_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain Python and machine code give equal windows: V, linear and loop placements under tight caps."""
    instance = random_instance(seed).with_changes(num_microbatches=5)
    found = []
    for worth in (np.inf, 0):
        monkeypatch.setattr(forced_work, "STEPS_WORTH_COMPILING", worth)
        found.append(windows(instance))
    np.testing.assert_array_equal(found[0].heads, found[1].heads)
    np.testing.assert_array_equal(found[0].tails, found[1].tails)
