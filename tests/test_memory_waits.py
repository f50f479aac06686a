"""What the caps force of the order, against every order that keeps them."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.brute_force import all_orders
from zbsolve.bounds.arcs import Reason, pass_arcs
from zbsolve.bounds.waits import MemoryWait, memory_waits
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.kinds import B, F
from zbsolve.model.serial import serial_program

AMOUNTS = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 3.0])
PEAKS = st.sampled_from([0.0, 0.0, 1.0, 2.0, 4.0])


@st.composite
def tight_devices(draw: st.DrawFn) -> Instance:
    """One or two devices of up to three stages, any transients, caps from what one micro-batch needs on."""
    devices, most = draw(
        st.sampled_from([((0,), 4), ((0, 0), 2), ((0, 1), 2), ((0, 0, 0), 1), ((0, 1, 0), 1)])
    )
    stages = []
    for device in devices:
        stage: dict[str, object] = {"device": device, "mem_b": draw(AMOUNTS), "mem_w": draw(AMOUNTS)}
        stage |= {peak: draw(PEAKS) for peak in ("peak_f", "peak_b", "peak_w")}
        stage |= {"t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_bw": draw(st.sampled_from([None, None, 2.0]))}
        stages.append(stage)
    p = max(devices) + 1
    instance = make_instance(num_devices=p, num_microbatches=draw(st.integers(1, most)), stages=stages)
    more = [draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0, 3.0])) for _ in range(p)]
    return instance.with_changes(memory_cap=[serial_program(instance, d)[0] + more[d] for d in range(p)])


def memory_precedences(instance: Instance) -> Iterator[tuple[Task, Task]]:
    """Every pair (before, after) that memory forces, a B standing for BW, too."""
    for arc in pass_arcs(instance):
        if arc.reason is Reason.MEMORY:
            yield from arc.tasks(instance.num_microbatches)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(tight_devices())
def test_every_order_within_the_caps_keeps_what_they_force(instance: Instance) -> None:
    """Exhaustively: each pair stands in its order in all of an instance's canonical orders."""
    pairs = [((a.kind, *a[1:]), (b.kind, *b[1:])) for a, b in memory_precedences(instance)]
    if not pairs:
        return
    for orders, _ in all_orders(instance):
        place = {}
        for order in orders:
            for position, (kind, s, j) in enumerate(order):
                place["B" if kind == "BW" else kind, s, j] = position  # a B stands for BW, too
        assert all(place[before] < place[after] for before, after in pairs), (orders, pairs)


def test_the_transient_of_an_f_counts() -> None:
    """Cap 4, mem_b 1, peak_f 2: F j holds 3 for itself, so one more may be in flight: it waits for B j - 2.

    Without the transient, 4 micro-batches fit (with the one whose B runs), and F j waits for B j - 4.
    """
    plain = equal_stages(1, 8, mem_w=0.0, memory_cap=4.0)
    assert set(memory_waits(plain)) == {MemoryWait(0, B, 0, 4)}
    stage = plain.stages[0].model_copy(update={"peak_f": 2.0})
    assert set(memory_waits(plain.with_changes(stages=[stage]))) == {MemoryWait(0, B, 0, 2)}
    first = next(memory_precedences(plain.with_changes(stages=[stage])))
    assert [str(task) for task in first] == ["B0.0", "F0.2"]
    assert first[1].kind is F
