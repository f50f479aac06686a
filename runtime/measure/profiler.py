"""Measuring a model's pass times and memory the way they will be used.

The profile runs real steps through the same executor, with as many processes and threads as the run will
have and all devices busy, so that contention for cores, caches and memory is in the figures. Two orders
take turns: one with every backward split, one with every backward fused. Times are medians after warm-up
and include the call that sends a result. Memory is what autograd saved plus what was put aside, at the
boundaries after F and B. What an op needs beyond that while it runs (``peak_*``) is what
:mod:`zbsolve.runtime.execute.transients` sees of it; it is written down where leaving it out could matter to
a cap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from statistics import fmean, median

from zbsolve.model.graph import Task, predecessors
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BW, B, F, W
from zbsolve.model.simulator import simulate
from zbsolve.model.tolerances import MEASURED_MEMORY_RTOL
from zbsolve.plan.certificate import Proof, SolverInfo
from zbsolve.plan.make import make_plan
from zbsolve.plan.plan import Plan
from zbsolve.runtime.ranks.outcome import Outcome
from zbsolve.trace.compare import measured_hops
from zbsolve.trace.trace import Trace

logger = logging.getLogger(__name__)

# A split this much dearer than a fused backward loses more than most schedules gain by it.
_DEAR_SPLIT = 1.3
_PEAKS = ("F", "B", "W", "BW")
# Share of what a micro-batch holds on a stage: what a run's memory check lets pass, so that no transient that
# is left out can set off its alarm.
PEAK_FLOOR = MEASURED_MEMORY_RTOL
# F + B + W and F + BW are the same arithmetic: further apart than this, something disturbed the profile.
_APART = 0.1


def busy_orders(instance: Instance, fused: bool) -> list[list[Task]]:
    """An order a device that keeps it busy: backward first, W at once, stage s at most S - s in flight.

    With one stage a device this is 1F1B. The limit is 1F1B's on the stage number, so that the order runs
    on any placement.
    """
    stages, count = instance.num_stages, instance.num_microbatches
    ends: dict[Task, float] = {}
    free = [0.0] * instance.num_devices
    orders: list[list[Task]] = [[] for _ in range(instance.num_devices)]
    started, finished = [0] * stages, [0] * stages
    backward = BW if fused else B
    while any(done < count for done in finished):
        options = []
        for s in range(stages):
            device = instance.stages[s].device
            tasks = []
            if started[s] < count and started[s] - finished[s] < stages - s:
                tasks.append((1, Task(F, s, started[s])))
            if finished[s] < started[s]:
                tasks.append((0, Task(backward, s, finished[s])))
            for rank, task in tasks:
                needed = [e.before for e in predecessors(instance, task) if e.before.kind in (F, backward)]
                if all(before in ends for before in needed):
                    start = max([free[device], *(ends[before] for before in needed)])
                    options.append((start, rank, s, task))
        start, _, s, task = min(options)
        device = instance.stages[s].device
        orders[device].append(task)
        ends[task] = start + 1.0
        free[device] = start + (1.0 if task.kind is F else 2.0)
        if task.kind is F:
            started[s] += 1
        else:
            finished[s] += 1
            if not fused:
                orders[device].append(Task(W, s, task.microbatch))
    return orders


def profiling_plan(instance: Instance, fused: bool) -> Plan:
    """A plan with :func:`busy_orders`; its times mean nothing."""
    return make_plan(
        instance,
        simulate(instance, busy_orders(instance, fused)),
        objective="makespan",
        lower_bound=0.0,
        proof=Proof(method="none", statement="an order for measuring, not for its length"),
        solver=SolverInfo(name="profiler", version="1"),
    )


def peaks(mem_b: int, mem_w: int, rises: Mapping[str, int]) -> dict[str, int]:
    """Bytes that each op needs beyond the model's levels (F acquires ``mem_b``, B what ``mem_w`` is more).

    Those below ``PEAK_FLOOR`` of what a micro-batch holds are left out, except that a fused backward has its
    own as soon as B or W has one (without, the model would take the larger of those for it).
    """
    known = {"F": mem_b, "B": max(0, mem_w - mem_b)}
    beyond = {op: max(0, rise - known.get(op, 0)) for op, rise in rises.items()}
    kept = {op: n for op, n in beyond.items() if n > PEAK_FLOOR * max(mem_b, mem_w)}
    if "BW" in beyond and kept.keys() & {"B", "W"}:
        kept["BW"] = beyond["BW"]
    return kept


def build_instance(
    draft: Instance,
    split: Outcome,
    fused: Outcome,
    progress: Callable[[str], None] | None,
    *,
    unlike: bool = False,
) -> Instance:
    """The draft with measured times (ms) and memory (MiB).

    Of ``unlike`` micro-batches the mean of each one's median stands for all, so that a device's work in a
    step is right; memory is the largest one's.
    """
    of = _means if unlike else _medians
    split_times, fused_times = of(split.trace), of(fused.trace)
    stages = []
    for s, stage in enumerate(draft.stages):
        t_f = median([split_times["F", s], fused_times["F", s]])
        t_b, t_w, t_bw = split_times["B", s], split_times["W", s], fused_times["BW", s]
        if t_b + t_w > _DEAR_SPLIT * t_bw:
            _say(
                progress,
                f"stage {s}: B + W take {t_b + t_w:.1f} ms, a fused BW {t_bw:.1f} ms: plans will fuse it "
                "where they can",
            )
        elif abs((t_f + t_b + t_w) / (t_f + t_bw) - 1) > _APART:
            _say(
                progress,
                f"stage {s}: F + B + W take {t_f + t_b + t_w:.1f} ms, F + BW {t_f + t_bw:.1f} ms: if the "
                "machine was busy, profile again when it is idle",
            )
        mem_b, mem_w = split.held_after_f.get(s, 0), split.held_after_b.get(s, 0)
        rises = {op: max(run.rises.get(op, {}).get(s, 0) for run in (split, fused)) for op in _PEAKS}
        stages.append(
            stage.model_copy(
                update={
                    "t_f": round(t_f, 6),
                    "t_b": round(t_b, 6),
                    "t_w": round(t_w, 6),
                    "t_bw": round(t_bw, 6),
                    "mem_b": round(mem_b / 2**20, 6),
                    "mem_w": round(mem_w / 2**20, 6),
                }
                | {f"peak_{op.lower()}": round(n / 2**20, 6) for op, n in peaks(mem_b, mem_w, rises).items()}
            )
        )
    hops = []
    for boundary, pair in enumerate(
        zip(measured_hops(draft, split.trace), measured_hops(draft, fused.trace), strict=True)
    ):
        known = [hop for hop in pair if hop is not None]
        if not known:
            _say(progress, f"no op waited at boundary {boundary}: its hop is taken as 0")
        hops.append(round(median(known), 6) if known else 0.0)
    return draft.with_changes(
        stages=stages,
        t_comm=hops,
        static_mem=[round(b / 2**20, 6) for b in split.static_bytes],
    )


def _medians(trace: Trace) -> dict[tuple[str, int], float]:
    samples: dict[tuple[str, int], list[float]] = {}
    for step in trace.steps:
        for event in step.events:
            samples.setdefault((event.op, event.stage), []).append(event.duration)
    return {key: median(values) for key, values in samples.items()}


def _means(trace: Trace) -> dict[tuple[str, int], float]:
    samples: dict[tuple[str, int], dict[int, list[float]]] = {}
    for step in trace.steps:
        for event in step.events:
            own = samples.setdefault((event.op, event.stage), {})
            own.setdefault(event.microbatch, []).append(event.duration)
    return {key: fmean(median(values) for values in own.values()) for key, own in samples.items()}


def _say(progress: Callable[[str], None] | None, text: str) -> None:
    logger.info("%s", text)
    if progress is not None:
        progress(text)
