"""Memory of a program, and the least with which a device can run at all."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import small_instances
from zbsolve.errors import InfeasibleError
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.judge import _memory_by_definition
from zbsolve.model.kinds import BW, B, F, TaskKind, W
from zbsolve.model.memory import NO_PAIRS, effect, memory_curve, peak_memory
from zbsolve.model.schedule import TimedTask
from zbsolve.model.serial import require_feasible, serial_program


def one_stage(**fields: float) -> Instance:
    stage = {"device": 0, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, **fields}
    return make_instance(num_devices=1, num_microbatches=2, stages=[stage], static_mem=[10.0])


def order(text: str) -> list[Task]:
    """``F0 B0 W0`` of stage 0."""
    return [Task(TaskKind(word[:-1]), 0, int(word[-1])) for word in text.split()]


def test_curve_where_b_frees_by_hand() -> None:
    """mem_b 3, mem_w 1, static 10: F +3, B -2, W -1."""
    curve = memory_curve(one_stage(mem_b=3.0, mem_w=1.0), 0, order("F0 F1 B0 B1 W0 W1"))
    assert [p.during for p in curve] == [13, 16, 16, 14, 12, 11]
    assert [p.after for p in curve] == [13, 16, 14, 12, 11, 10]
    assert [p.before for p in curve] == [10, 13, 16, 14, 12, 11]


def test_curve_where_b_grows_by_hand() -> None:
    """mem_b 3, mem_w 5 (as torch's generic split keeps more behind B): the 2 count from the start of B."""
    curve = memory_curve(one_stage(mem_b=3.0, mem_w=5.0), 0, order("F0 B0 F1 W0 B1 W1"))
    assert [p.during for p in curve] == [13, 15, 18, 18, 15, 15]
    assert curve[-1].after == 10


def test_transients_by_hand() -> None:
    """Peaks 0.5, 1, 2 count only while F, B, W run; BW takes the larger of its halves, 2, or its own 4."""
    peaks = {"mem_b": 3.0, "mem_w": 1.0, "peak_f": 0.5, "peak_b": 1.0, "peak_w": 2.0, "t_bw": 1.5}
    curve = memory_curve(one_stage(**peaks), 0, order("F0 B0 W0 F1 BW1"))
    assert [p.during for p in curve] == [13.5, 14, 13, 13.5, 15]
    assert [p.after for p in curve] == [13, 11, 10, 13, 10]
    own = memory_curve(one_stage(**peaks, peak_bw=4.0), 0, order("F0 BW0"))
    assert own[1].during == 17


def test_effects_sum_to_nothing() -> None:
    """F, B, W, and F, BW, leave memory as it was, whichever of mem_b and mem_w is larger."""
    for mem_b, mem_w in ((3.0, 1.0), (3.0, 5.0), (0.0, 2.0)):
        stage = one_stage(mem_b=mem_b, mem_w=mem_w, t_bw=2.0).stages[0]
        assert sum(effect(stage, kind).net for kind in (F, B, W)) == 0
        assert sum(effect(stage, kind).net for kind in (F, BW)) == 0


@st.composite
def programs(draw: st.DrawFn) -> tuple[Instance, int, list[Task]]:
    """A random instance and a random order of one device's tasks that keeps F, B, W of each in order."""
    instance = draw(small_instances(max_passes=6))
    device = draw(st.integers(0, instance.num_devices - 1))
    chains = []
    for s in instance.stages_on(device):
        for j in range(instance.num_microbatches):
            fuse = instance.stages[s].t_bw is not None and draw(st.booleans())
            chains.append([Task(kind, s, j) for kind in ((F, BW) if fuse else (F, B, W))])
    result = []
    while chains:
        chain = draw(st.sampled_from(chains))
        result.append(chain.pop(0))
        chains = [c for c in chains if c]
    return instance, device, result


@settings(derandomize=True, deadline=None, max_examples=100)
@given(programs())
def test_curve_equals_the_definition(program: tuple[Instance, int, list[Task]]) -> None:
    """The running level equals the sum of what each micro-batch holds at that task, as the checker does."""
    instance, device, tasks = program
    timed = [TimedTask(task, float(i), float(i + 1)) for i, task in enumerate(tasks)]
    curve = memory_curve(instance, device, tasks)
    assert [p.during for p in curve] == pytest.approx(
        list(_memory_by_definition(instance, device, timed, NO_PAIRS)), abs=1e-12
    )
    assert peak_memory(instance, device, tasks) == max(p.during for p in curve)
    assert curve[-1].after == pytest.approx(instance.static(device), abs=1e-12)


def test_peak_of_an_empty_program_is_static() -> None:
    """A device that runs nothing holds its static memory."""
    assert peak_memory(one_stage(), 0, []) == 10.0


def exhaustive_least_peak(instance: Instance, device: int) -> float:
    """Least peak over every order of one micro-batch's tasks on a device, by trying all permutations.

    F's in stage order before any backward, backwards in reverse stage order, W behind its B.
    """
    stages = instance.stages_on(device)
    least = math.inf
    for choice in range(2 ** len(stages)):
        fused = {s for i, s in enumerate(stages) if choice >> i & 1}
        if any(instance.stages[s].t_bw is None for s in fused):
            continue
        backward = [Task(BW if s in fused else B, s, 0) for s in reversed(stages)]
        weights = [Task(W, s, 0) for s in stages if s not in fused]
        for tail in permutations(backward + weights):
            place = {task: i for i, task in enumerate(tail)}
            in_order = [place[task] for task in backward] == sorted(place[task] for task in backward)
            if in_order and all(place[w] > place[Task(B, w.stage, 0)] for w in weights):
                forward = [Task(F, s, 0) for s in stages]
                least = min(least, peak_memory(instance, device, [*forward, *tail]))
    return least


@settings(derandomize=True, deadline=None, max_examples=60)
@given(small_instances(max_passes=4))
def test_least_peak_equals_exhaustive_search(instance: Instance) -> None:
    """serial_program's peak is the least of all orders, and its own order has that peak."""
    for device in range(instance.num_devices):
        peak, program = serial_program(instance, device)
        assert peak == pytest.approx(exhaustive_least_peak(instance, device), abs=1e-12)
        tasks = [Task(kind, s, 0) for kind, s in program]
        assert peak_memory(instance, device, tasks) == pytest.approx(peak, abs=1e-12)


def test_least_peak_of_a_v_by_hand() -> None:
    """Device 0 of a V holds stages 0 and 3: F0 F3 (2), then B3 W3 B0 W0 never above: 2. With mem_w = 2, 3."""
    assert serial_program(equal_stages(2, 4, placement="v"), 0)[0] == 2.0
    grown = equal_stages(2, 4, mem_w=2.0, placement="v")
    peak, program = serial_program(grown, 0)
    assert peak == 3.0
    assert [f"{kind}{s}" for kind, s in program] == ["F0", "F3", "B3", "W3", "B0", "W0"]


def test_what_cannot_run_is_named() -> None:
    """p = 4, cap 0: every device needs 1 and has 0; static memory counts."""
    with pytest.raises(InfeasibleError, match=r"devices 0-3 need 1 MiB each, have 0: raise") as caught:
        require_feasible(equal_stages(4, 3, memory_cap=0.0))
    assert caught.value.exit_code == 1
    capped = equal_stages(2, 3, memory_cap=[9.0, 3.0]).with_changes(static_mem=[1.0, 2.5])
    with pytest.raises(InfeasibleError, match=r"device 1 needs 3\.5 MiB, has 3: raise memory_cap"):
        require_feasible(capped)
    require_feasible(capped.with_changes(memory_cap=[9.0, 3.5]))


def test_every_device_that_cannot_run_is_named_with_its_own_figures() -> None:
    """Static memory of 2 0 0 4 0 0 0 over caps of 1: device 0 needs 3, device 3 needs 5, 5 fits in its 2."""
    caps = [1.0, 0.5, 0.5, 1.0, 0.5, 2.0, 0.5]
    capped = equal_stages(7, 3, memory_cap=caps).with_changes(static_mem=[2.0, 0, 0, 4.0, 0, 0, 0])
    with pytest.raises(InfeasibleError) as caught:
        require_feasible(capped)
    assert (
        "device 0 needs 3 MiB, has 1; devices 1-2, 4, 6 need 1 MiB each, have 0.5; "
        "device 3 needs 5 MiB, has 1: raise"
    ) in str(caught.value)


def test_the_need_that_is_named_is_enough() -> None:
    """1/3 + 1e6 in ten digits is not less than needed by more than the caps' tolerance."""
    tight = equal_stages(1, 1, mem_b=1e6 + 1 / 3, memory_cap=1e6)
    with pytest.raises(InfeasibleError) as caught:
        require_feasible(tight)
    named = float(str(caught.value).split("needs ")[1].split()[0])
    require_feasible(tight.with_changes(memory_cap=named))
