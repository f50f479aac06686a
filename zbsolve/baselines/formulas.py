"""Published closed forms of the catalogue's schedules: bubble, peak memory, hops, parameters.

They speak of equal stages without hop latency; times and memory are those of one stage of the instance (a
chunk where a device holds several). Each says where it comes from, which cost it measures, and where it
holds: outside of that the simulator is right and the formula is not. :func:`simulated` gives the simulator's
answer to the same question, and :func:`verified` compares both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from zbsolve.baselines import BASELINES
from zbsolve.model.instance import Instance, Placement, equal_stages
from zbsolve.model.objective import Objective
from zbsolve.model.schedule import Schedule
from zbsolve.model.tolerances import TIME_RTOL
from zbsolve.plan.make import peaks_of


@dataclass(frozen=True, slots=True)
class Sizes:
    """p devices, m micro-batches of the whole step, v chunks per device, N; times of one stage.

    ``t_fb`` defaults to t_f + t_bw (no overlap); ``mem_r`` is what a recomputing stage keeps of the 1 that
    every stage holds from F to the end of W.
    """

    p: int
    m: int
    v: int = 1
    n: int | None = None
    t_f: float = 1.0
    t_b: float = 1.0
    t_w: float = 1.0
    t_fb: float | None = None
    mem_r: float = 0.0

    @property
    def t_bw(self) -> float:
        return self.t_b + self.t_w

    @property
    def pair(self) -> float:
        """Duration of an F&B pair."""
        return self.t_f + self.t_bw if self.t_fb is None else self.t_fb

    @property
    def group(self) -> int:
        """N, depth-first unless given."""
        return self.p if self.n is None else self.n

    @property
    def equal_times(self) -> bool:
        return self.t_f == self.t_b == self.t_w


@dataclass(frozen=True, slots=True)
class Formula:
    """Closed forms of one schedule.

    Attributes
    ----------
    bubble : Sizes -> time
        Cost less the work of the busiest device.
    cost : "makespan" or "span"
        The cost that ``bubble`` measures.
    peak : Sizes -> stage activations
        Highest number held on any device, static memory not counted.
    hops : Sizes -> number
        Boundaries between different devices that a micro-batch crosses on its way through the model.
    holds : Sizes -> bool
        Where the forms hold; ``where`` says it in words.
    copies : int
        How often the parameters are held.
    peak_is_limit : bool
        The schedule may stay below ``peak``, which is its memory cap.
    """

    bubble: Callable[[Sizes], float]
    peak: Callable[[Sizes], float]
    hops: Callable[[Sizes], int]
    holds: Callable[[Sizes], bool]
    where: str
    text: str
    source: str
    cost: Objective = "makespan"
    copies: int = 1
    peak_is_limit: bool = False


def _fused_pipeline(z: Sizes) -> float:
    return (z.p - 1) * (z.t_f + z.t_bw)


def _linear_hops(z: Sizes) -> int:
    return z.p - 1


def _v_hops(z: Sizes) -> int:
    return 2 * (z.p - 1)  # the turn on the last device is none


def _dualpipe_bubble(stages: int, z: Sizes) -> float:
    return (stages / 2 - 1) * (z.pair + z.t_bw - 3 * z.t_w)


def _interleaved_peak(n: int, z: Sizes) -> int:
    return min(z.m * z.v, 2 * (z.p - 1) + (z.v - 1) * n + 1)


FORMULAS: dict[str, Formula] = {
    "naive": Formula(
        lambda z: z.m * (z.p - 1) * (z.t_f + z.t_bw),
        lambda z: 1,
        _linear_hops,
        lambda z: True,
        "always",
        "m (p - 1)(t_f + t_b); 1 activation",
        "every other device waits",
    ),
    "gpipe": Formula(
        _fused_pipeline,
        lambda z: z.m,
        _linear_hops,
        lambda z: True,
        "always",
        "(p - 1)(t_f + t_b); m activations",
        "arXiv 1811.06965, section 2.2",
    ),
    "gpipe-r": Formula(
        _fused_pipeline,
        lambda z: 1 + (z.m - 1) * z.mem_r,
        _linear_hops,
        lambda z: True,
        "always: R runs before the gradient comes",
        "(p - 1)(t_f + t_b), t_f more work per micro-batch; m stage inputs and 1 activation",
        "arXiv 1811.06965, section 2.3",
    ),
    "1f1b": Formula(
        _fused_pipeline,
        lambda z: min(z.p, z.m),
        _linear_hops,
        lambda z: True,
        "always",
        "(p - 1)(t_f + t_b); p activations on device 0, p - r on device r",
        "arXiv 2006.09503, section 3",
    ),
    "interleaved": Formula(
        _fused_pipeline,
        lambda z: _interleaved_peak(z.group, z),
        lambda z: z.v * z.p - 1,
        lambda z: z.m % z.group == 0 and z.p >= 2 and z.v >= 2,
        "m a multiple of N, p >= 2",
        "(p - 1)(t_f + t_b) of a chunk, 1/v of 1F1B's; p v + p - 1 chunks",
        "arXiv 2104.04473, section 2.2",
    ),
    "breadth-first": Formula(
        _fused_pipeline,
        lambda z: _interleaved_peak(z.m, z),
        lambda z: z.v * z.p - 1,
        lambda z: z.m >= z.p >= 2 and z.v >= 2,
        "m >= p >= 2",
        "(p - 1)(t_f + t_b) of a chunk; (v - 1) m + 2 p - 1 chunks",
        "arXiv 2211.05953",
    ),
    "zb-h1": Formula(
        lambda z: (z.p - 1) * (z.t_f + z.t_b - z.t_w),
        lambda z: z.p,
        _linear_hops,
        lambda z: z.m >= z.p and z.t_w <= z.t_b,
        "m >= p, T_W <= T_B",
        "(p - 1)(T_F + T_B - T_W); p activations",
        "arXiv 2401.10241, table 1",
    ),
    "zb-h2": Formula(
        lambda z: (z.p - 1) * (z.t_f + z.t_b - 2 * z.t_w),
        lambda z: 2 * z.p - 1,
        _linear_hops,
        lambda z: z.m >= 2 * z.p - 1 and z.t_w <= z.t_b <= z.t_f + z.t_w and z.t_f <= z.t_b + z.t_w,
        "m >= 2 p - 1, T_W <= T_B <= T_F + T_W",
        "(p - 1)(T_F + T_B - 2 T_W); 2 p - 1 activations",
        "arXiv 2401.10241, table 1",
        cost="span",
    ),
    "zb-1p": Formula(
        lambda z: (z.p - 1) * (z.t_f + z.t_b - z.t_w),
        lambda z: z.p,
        _linear_hops,
        lambda z: z.m >= 2 * z.p and z.t_w <= z.t_b,
        "m >= 2 p, T_W <= T_B",
        "(p - 1)(T_F + T_B - T_W); p activations",
        "arXiv 2401.10241, section 4",
    ),
    "zb-2p": Formula(
        lambda z: 0.0,
        lambda z: 2 * z.p,
        _linear_hops,
        lambda z: z.m >= 2 * z.p and z.equal_times,
        "m >= 2 p, T_F = T_B = T_W",
        "0; at most 2 p activations",
        "arXiv 2401.10241, section 4",
        cost="span",
        peak_is_limit=True,
    ),
    "zb-v": Formula(
        lambda z: 0.0,
        lambda z: 2 * z.p,
        _v_hops,
        lambda z: z.m >= 2 * z.p and z.equal_times,
        "m >= 2 p, T_F = T_B = T_W",
        "0; p activations of both chunks",
        "arXiv 2401.10241, section 6",
        cost="span",
    ),
    "v-half": Formula(
        lambda z: 3 * z.p - 7,
        lambda z: 2 * ((z.p + 2) // 2),
        _v_hops,
        lambda z: z.m >= 2 * z.p and z.equal_times and z.t_f == 1 and z.p % 2 == 0 and z.p >= 4,
        "m >= 2 p, p even and >= 4, T_F = T_B = T_W = 1",
        "about 3 p units of a chunk (p / 2m of the step); floor((p + 2) / 2) activations of both chunks",
        "arXiv 2405.15362, section 3; constant of the authors' program",
        cost="span",
    ),
    "v-min": Formula(
        lambda z: 4 * z.p - 5,
        lambda z: 2 * ((z.p + 4) // 3),
        _v_hops,
        lambda z: z.m >= 2 * z.p and z.equal_times and z.t_f == 1 and z.p % 3 != 0 and z.p >= 2,
        "m >= 2 p, 3 not a divisor of p, T_F = T_B = T_W = 1",
        "about 4 p units of a chunk (2p / 3m of the step); floor((p + 4) / 3) activations of both chunks",
        "arXiv 2405.15362, section 3; constant of the authors' program",
        cost="span",
    ),
    "dualpipe": Formula(
        lambda z: _dualpipe_bubble(z.p, z),
        lambda z: z.p + 1,
        _linear_hops,
        lambda z: z.p % 2 == 0 and z.m % 2 == 0 and z.m >= 2 * z.p and z.equal_times and z.t_fb is None,
        "p and m even, m >= 2 p, T_F = T_B = T_W, F&B = F + BW",
        "(p/2 - 1)(F&B + BW - 3 W); p + 1 activations",
        "github.com/deepseek-ai/DualPipe",
        copies=2,
    ),
    "dualpipe-v": Formula(
        lambda z: _dualpipe_bubble(2 * z.p, z),
        lambda z: 2 * z.p + 1,
        _v_hops,
        lambda z: z.m >= 2 * z.p and z.equal_times and z.t_fb is None,
        "m >= 2 p, T_F = T_B = T_W, F&B = F + BW",
        "(p - 1)(F&B + BW - 3 W) for 2 p stages on p devices; 2 p + 1 chunks",
        "github.com/deepseek-ai/DualPipe",
    ),
}


class Figures(NamedTuple):
    """Bubble, peak and hops of a schedule at some sizes, by formula or by simulation."""

    bubble: float
    peak: float
    hops: int


def placement_of(name: str) -> Placement:
    """Placement at which a schedule's formula is stated: its own, or the linear one where any will do."""
    return BASELINES[name].placement or "linear"


def instance_for(name: str, sizes: Sizes) -> Instance:
    """Equal stages of a schedule's placement at some sizes, without hop latency or memory cap."""
    placement = placement_of(name)
    plain = equal_stages(
        sizes.p,
        sizes.m,
        sizes.t_f,
        sizes.t_b,
        sizes.t_w,
        placement=placement,
        chunks=sizes.v if placement == "loop" else None,
    )
    changes: dict[str, float] = {}
    if sizes.t_fb is not None or name.startswith("dualpipe"):
        changes = {"t_bw": sizes.t_bw, "t_fb": sizes.pair}
    if name == "gpipe-r":
        changes = {"t_r": sizes.t_f, "mem_r": sizes.mem_r}
    return plain.with_changes(stages=[stage.model_copy(update=changes) for stage in plain.stages])


def by_formula(name: str, sizes: Sizes) -> Figures:
    """What the closed forms say, whether they hold there or not."""
    formula = FORMULAS[name]
    return Figures(formula.bubble(sizes), formula.peak(sizes), formula.hops(sizes))


def simulated(name: str, sizes: Sizes) -> Figures:
    """What the simulator says: cost less the busiest device's work, highest peak, boundaries crossed."""
    formula = FORMULAS[name]
    baseline = BASELINES[name if sizes.n is None else f"{name}:{sizes.n}"]
    instance, schedule = baseline.schedule(instance_for(name, sizes), formula.cost)
    busiest = max(_busy(schedule, device) for device in range(instance.num_devices))
    hops = sum(instance.crosses(boundary) for boundary in range(instance.chain - 1))
    return Figures(schedule.cost(formula.cost) - busiest, max(peaks_of(instance, schedule)), hops)


def _busy(schedule: Schedule, device: int) -> float:
    seconds = {backward for _, backward in schedule.pairs}
    return sum(t.end - t.start for t in schedule.devices[device] if t.task not in seconds)


def verified(name: str, sizes: Sizes) -> bool | None:
    """Whether formula and simulation agree at some sizes; None where the formula does not hold."""
    if not FORMULAS[name].holds(sizes):
        return None
    ours, theirs = simulated(name, sizes), by_formula(name, sizes)
    if FORMULAS[name].peak_is_limit:
        theirs = theirs._replace(peak=min(ours.peak, theirs.peak))
    # A bubble is what is left of a device's time, and as exact as that.
    largest = sizes.m * (sizes.t_f + sizes.t_b + sizes.t_w), theirs.peak, theirs.hops
    return all(abs(a - b) <= TIME_RTOL * each for a, b, each in zip(ours, theirs, largest, strict=True))
