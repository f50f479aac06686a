"""Do predictions hold? Schedules side by side, predicted from one profile and measured in one run.

Emulated part: stages sleep for their time and move real tensors. For each placement one group of ranks runs
every schedule and two profiling orders by turns, step by step, so that a machine that slows down does so
for all. The profiling orders alone give the times of the prediction, whose orders are each schedule's. Real
part: the small GPT on two processes, likewise.

Nothing here judges a schedule: it judges the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from zbsolve.baselines import BASELINES
from zbsolve.errors import InputError
from zbsolve.model.instance import Instance, make_instance, place
from zbsolve.model.simulator import simulate
from zbsolve.plan.plan import Plan
from zbsolve.runtime.api import ProfileOptions, RunOptions, profile_model
from zbsolve.runtime.measure.profiler import build_instance, profiling_plan
from zbsolve.runtime.ranks.job import Job
from zbsolve.runtime.ranks.launch import launch
from zbsolve.solver.portfolio import certify, solve
from zbsolve.trace.compare import recalibrate
from zbsolve.trace.trace import Trace

Placement = Literal["linear", "loop", "v"]
SOLVED = "zbsolve"

# What runs on which placement; a name that this version has no generator for is left out.
SCHEDULES: dict[Placement, tuple[str, ...]] = {
    "linear": ("1f1b", "zb-h1", "zb-1p", "zb-2p", SOLVED),
    "loop": ("interleaved",),
    "v": ("zb-v", "dualpipe-v", "v-half", "v-min", SOLVED),
}


# An overlapped F&B pair takes this share of its two halves in the emulation.
PAIR_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Prediction:
    """One schedule's makespan in ms, predicted from the profile and measured (median of the steps)."""

    part: str
    devices: int
    placement: str
    schedule: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


def emulated_instance(p: int, placement: Placement, op: float, payload_hop: float = 0.0) -> Instance:
    """Equal stages whose F, B and W take ``op`` ms a device, shared by its chunks."""
    devices = place(p, placement)
    chunks = len(devices) // p
    time, mem = op / chunks, 1.0 / chunks
    stages = [
        {"device": d, "t_f": time, "t_b": time, "t_w": time, "t_bw": 2 * time, "mem_b": mem, "mem_w": mem / 2}
        for d in devices
    ]
    if placement == "v":
        stages = [stage | {"t_fb": 3 * time * PAIR_SHARE} for stage in stages]
    instance = make_instance(
        name=f"emulated-p{p}-{placement}",
        num_devices=p,
        num_microbatches=2 * p,
        stages=stages,
        t_comm=payload_hop,
        memory_unit="activations",
    )
    return instance.with_memory_cap("2p")


def emulated(
    p: int,
    *,
    steps: int = 10,
    op: float = 20.0,
    payload_mib: float = 0.25,
    solve_seconds: float = 10.0,
    placements: Sequence[Placement] = ("linear", "loop", "v"),
    progress: Callable[[str], None],
) -> list[Prediction]:
    """Every schedule of :data:`SCHEDULES` on ``p`` emulated devices."""
    rows = []
    for placement in placements:
        instance = emulated_instance(p, placement, op, payload_hop=0.3)
        plans = {}
        for name in SCHEDULES[placement]:
            progress(f"planning {name} on {p} devices, {placement} …")
            plan = _plan(instance, name, solve_seconds)
            if plan is not None:
                plans[name] = plan
        profiles = [profiling_plan(instance, fused) for fused in (False, True)]
        options = RunOptions(
            emulate=True, payload_mib=payload_mib, steps=steps, warmup=2, check_gradients=False
        )
        outcomes = launch([*profiles, *plans.values()], Job(options), progress)
        measured = instance
        for outcome in outcomes[: len(profiles)]:
            measured = recalibrate(measured, outcome.trace)
        if placement == "v":
            # The profile has no pairs: their share is known, their length follows what F and BW really take.
            measured = measured.with_changes(
                stages=[
                    s.model_copy(update={"t_fb": (s.t_f + (s.t_bw or 0.0)) * PAIR_SHARE})
                    for s in measured.stages
                ]
            )
        traces = [outcome.trace for outcome in outcomes[len(profiles) :]]
        rows += [
            _row("emulated", placement, name, measured, plan, trace)
            for (name, plan), trace in zip(plans.items(), traces, strict=True)
        ]
    return rows


def _plan(instance: Instance, name: str, solve_seconds: float) -> Plan | None:
    if name == SOLVED:
        return solve(instance, time_limit=solve_seconds).plan
    if name not in BASELINES:
        return None
    # Every stage may fuse: split and fused schedules run on one instance. A split one is made without.
    free = instance.with_changes(memory_cap=None)
    split_only = [stage.model_copy(update={"t_bw": None, "t_fb": None}) for stage in free.stages]
    baseline = BASELINES[name]
    fuses = baseline.adapt is not None or baseline.pairs is not None
    _, schedule = baseline.schedule(free if fuses else free.with_changes(stages=split_only))
    return certify(free, simulate(free, schedule.orders, schedule.pairs), "makespan", name)


def _row(part: str, placement: str, name: str, profile: Instance, plan: Plan, trace: Trace) -> Prediction:
    schedule = plan.schedule()
    predicted = simulate(profile, schedule.orders, schedule.pairs).makespan
    return Prediction(part, profile.num_devices, placement, name, predicted, trace.makespan)


def real(
    *, steps: int = 10, solve_seconds: float = 10.0, progress: Callable[[str], None]
) -> list[Prediction]:
    """The small GPT on two processes: 1F1B and the solver's plan.

    A first profile is what the plans are made on. They then run by turns with a second one, of the same
    orders and steps, which alone gives the times of the prediction.
    """
    progress("profiling the GPT on 2 processes …")
    instance = profile_model(ProfileOptions(num_devices=2, num_microbatches=8), progress)
    instance = instance.with_memory_cap("2p")
    plans = {name: plan for name in ("1f1b", SOLVED) if (plan := _plan(instance, name, solve_seconds))}
    profiles = [profiling_plan(instance, fused) for fused in (False, True)]
    options = RunOptions(steps=steps, check_gradients=False, optimizer="none")
    outcomes = launch([*profiles, *plans.values()], Job(options), progress)
    measured = build_instance(instance, outcomes[0], outcomes[1], progress)
    return [
        _row("GPT", "linear", name, measured, plan, outcome.trace)
        for (name, plan), outcome in zip(plans.items(), outcomes[len(profiles) :], strict=True)
    ]


def misordered(rows: Sequence[Prediction], apart: float = 0.01) -> list[tuple[Prediction, Prediction]]:
    """Pairs of one part and p whose measured order is not the predicted one.

    Predictions closer than ``apart`` (relative) are a tie, in which either order is right.
    """
    wrong = []
    for a in rows:
        for b in rows:
            together = (a.part, a.devices) == (b.part, b.devices)
            if together and a.predicted < b.predicted * (1 - apart) and a.measured > b.measured:
                wrong.append((a, b))
    return wrong


def require_devices(devices: Sequence[int]) -> None:
    """Raise ``InputError`` for a number of devices that the schedules have no use for."""
    for p in devices:
        if p < 2 or p % 2:
            raise InputError(f"--devices {p}: give an even number from 2")
