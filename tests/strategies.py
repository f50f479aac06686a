"""Hypothesis strategies: small random instances that touch every rule of the model."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from zbsolve.model.instance import Instance, make_instance
from zbsolve.model.serial import serial_program

# Halves and small integers: sums are exact in floats, and equal costs really tie.
TIMES = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 3.0])
MEMORY = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0])
PEAKS = st.sampled_from([0.0, 0.0, 0.5, 1.0])

PLACEMENTS = (
    (0,),
    (0, 1),
    (0, 1, 2),
    (0, 1, 1, 0),  # V
    (0, 1, 0, 1),  # loop
    (0, 0, 1),  # uneven chunk counts
    (0, 1, 0),
)


@st.composite
def stages(draw: st.DrawFn, device: int, fusible: bool) -> dict[str, Any]:
    """One stage; a fused backward may be shorter or longer than both halves."""
    stage: dict[str, Any] = {
        "device": device,
        "t_f": draw(TIMES),
        "t_b": draw(TIMES),
        "t_w": draw(TIMES),
        "mem_b": draw(MEMORY),
        "mem_w": draw(MEMORY),
        "peak_f": draw(PEAKS),
        "peak_b": draw(PEAKS),
        "peak_w": draw(PEAKS),
    }
    if fusible and draw(st.booleans()):
        stage["t_bw"] = draw(st.sampled_from([0.0, 1.0, 1.5, 2.5, 4.0]))
        if draw(st.booleans()):
            stage["peak_bw"] = draw(PEAKS)
    return stage


@st.composite
def small_instances(
    draw: st.DrawFn, max_passes: int = 4, fusible: bool = True, capped: bool | None = None
) -> Instance:
    """At most ``max_passes`` (stage, micro-batch) pairs, three tasks each.

    Caps, where drawn, lie from just below what one micro-batch needs to well above it.
    """
    devices = draw(st.sampled_from([d for d in PLACEMENTS if len(d) <= max_passes]))
    m = draw(st.integers(1, max(1, max_passes // len(devices))))
    p = max(devices) + 1
    hops = [draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])) for _ in devices[1:]]
    instance = make_instance(
        name="random",
        num_devices=p,
        num_microbatches=m,
        stages=[draw(stages(d, fusible)) for d in devices],
        t_comm=hops,
        static_mem=[draw(MEMORY) for _ in range(p)],
    )
    if draw(st.booleans()) if capped is None else capped:
        extra = st.sampled_from([-0.5, 0.0, 0.0, 0.5, 1.0, 1.5, 3.0])
        caps = [max(0.0, serial_program(instance, d)[0] + draw(extra)) for d in range(p)]
        instance = instance.with_changes(memory_cap=caps)
    return instance
