"""The main job end to end, as ``zbsolve demo`` runs it.

Real part: a small GPT is profiled on 2 processes, its schedule solved and run with every gradient compared
with the unpipelined model; 1F1B is run on the same profile. Emulated part: 4 processes whose stages sleep
for unequal times and exchange real tensors. There a first run calibrates (what sleeping and sending really
take), and a second run is held against the re-timed plan, so that no run is compared with itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zbsolve.baselines import BASELINES
from zbsolve.baselines.comparison import gain_text
from zbsolve.errors import ZbsolveError
from zbsolve.files.atomic import write_text_atomically
from zbsolve.model.instance import Instance, make_instance
from zbsolve.model.simulator import simulate
from zbsolve.plan.plan import Plan
from zbsolve.report.demo_text import DemoRow
from zbsolve.report.figures import save_plan_figure
from zbsolve.runtime.api import ProfileOptions, RunOptions, profile_model, run_plan, train_by_turns
from zbsolve.solver.portfolio import certify, solve
from zbsolve.trace.compare import compare, compare_times, recalibrate
from zbsolve.trace.trace import Trace

Report = Callable[[str], None]

# T_F, T_B, T_W (ms): a short first stage, a long one in the middle (a stage with more layers).
EMULATED_TIMES = ((16.0, 15.0, 11.0), (26.0, 25.0, 20.0), (20.0, 20.0, 16.0), (22.0, 20.0, 16.0))
EMULATED_HOP = 0.6


@dataclass
class DemoResult:
    """Everything the demo found and wrote."""

    rows: list[DemoRow] = field(default_factory=list)
    files: list[tuple[Path, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def gradients_equal(self) -> bool:
        """Whether every gradient check that ran passed."""
        checks = [row.trace.gradients for row in self.rows]
        return all(check.equal for check in checks if check is not None)


@dataclass(frozen=True, slots=True)
class _Effort:
    repeats: int
    steps: int
    solve_seconds: float


def emulated_instance() -> Instance:
    """Four unequal stages of about 20 ms an op, under 1F1B's memory."""
    stages = [
        {"device": d, "t_f": f, "t_b": b, "t_w": w, "t_bw": b + w, "mem_b": 1.0, "mem_w": 0.5}
        for d, (f, b, w) in enumerate(EMULATED_TIMES)
    ]
    instance = make_instance(
        name="emulated-p4",
        num_devices=len(stages),
        num_microbatches=8,
        stages=stages,
        t_comm=EMULATED_HOP,
        memory_unit="micro-batches",
    )
    return instance.with_memory_cap("1p")


def run_demo(out: Path, *, quick: bool, progress: Report) -> DemoResult:
    """Run every part; files go to ``out``. ``quick`` measures less and solves shorter."""
    effort = _Effort(3, 3, 5.0) if quick else _Effort(7, 6, 20.0)
    result = DemoResult()
    _real_part(out, effort, progress, result)
    _emulated_part(out, effort, progress, result)
    return result


def _real_part(out: Path, effort: _Effort, progress: Report, result: DemoResult) -> None:
    progress("profiling a small GPT on 2 processes …")
    profile = ProfileOptions(num_devices=2, num_microbatches=8, repeats=effort.repeats)
    # Twice 1F1B's activation memory: room for the solver, and still a cap.
    instance = profile_model(profile, progress).with_memory_cap("2p")
    write_text_atomically(out / "instance.json", json.dumps(instance.to_json_dict(), indent=1) + "\n")
    result.files.append((out / "instance.json", "the profile"))

    progress("solving …")
    plan = solve(instance, time_limit=effort.solve_seconds).plan
    _save_plan(plan, out / "plan.json", "the solved plan", result)
    plans = {"zbsolve": plan}
    reference = _one_f_one_b(instance, result)
    if reference is not None:
        plans["1F1B"] = reference
        _save_plan(reference, out / "plan_1f1b.json", "1F1B on the same profile", result)
    progress(f"running {' and '.join(plans)} by turns on 2 processes, gradients checked …")
    # No optimizer: the plans share the model, and each one's gradients are held against its first weights.
    options = RunOptions(steps=effort.steps, optimizer="none")
    outcomes = train_by_turns(list(plans.values()), options, progress)
    for (name, made), outcome in zip(plans.items(), outcomes, strict=True):
        _add_row(f"{name}, GPT on 2 processes", made, outcome.trace, result)
        _note_drift(result)
    _save_trace(outcomes[0].trace, out / "trace.json", "its measured run", result)
    save_plan_figure(out / "gantt.png", plan, outcomes[0].trace)
    result.files.append((out / "gantt.png", "predicted over measured, and memory"))
    if reference is not None:
        _save_trace(outcomes[1].trace, out / "trace_1f1b.json", "1F1B's measured run", result)
        _note_gain(result)


def _emulated_part(out: Path, effort: _Effort, progress: Report, result: DemoResult) -> None:
    instance = emulated_instance()
    plan = solve(instance, time_limit=effort.solve_seconds).plan
    _save_plan(plan, out / "plan_emulated.json", "a solved plan for 4 unequal stages", result)
    options = RunOptions(emulate=True, payload_mib=1.0, steps=effort.steps, check_gradients=False)
    progress("running 4 emulated devices at nominal times …")
    first = _run(plan, "zbsolve, 4 emulated devices, nominal times", options, progress, result)

    # The same orders on the measured times, held against a run that had no part in the calibration.
    measured = recalibrate(instance, first)
    retimed = certify(measured, simulate(measured, plan.schedule().orders), plan.objective, "re-timed")
    progress("running 4 emulated devices again, against the calibrated prediction …")
    second = run_plan(plan, options, progress)
    result.rows.append(
        DemoRow("zbsolve, 4 emulated devices, calibrated", retimed, second, compare_times(retimed, second))
    )
    _save_trace(second, out / "trace_emulated.json", "its measured run", result)
    save_plan_figure(out / "gantt_emulated.png", plan, second)
    result.files.append((out / "gantt_emulated.png", "predicted over measured, and memory"))

    reference = _one_f_one_b(instance, result)
    if reference is not None:
        progress("running 1F1B on 4 emulated devices …")
        _run(reference, "1F1B, 4 emulated devices, nominal times", options, progress, result)
        _note_gain(result, solved=-3)


def _one_f_one_b(instance: Instance, result: DemoResult) -> Plan | None:
    try:
        timed_on, schedule = BASELINES["1f1b"].schedule(instance)
        return certify(timed_on, schedule, "makespan", "1f1b")
    except ZbsolveError as error:
        result.notes.append(f"1F1B was not run on {instance.name}: {error}")
        return None


def _run(plan: Plan, name: str, options: RunOptions, progress: Report, result: DemoResult) -> Trace:
    trace = run_plan(plan, options, progress)
    _add_row(name, plan, trace, result)
    return trace


def _add_row(name: str, plan: Plan, trace: Trace, result: DemoResult) -> None:
    result.rows.append(DemoRow(name, plan, trace, compare(plan, trace)))


def _note_drift(result: DemoResult) -> None:
    """Say it plainly when profile and run disagree by more than a tenth."""
    row = result.rows[-1]
    if not 0.9 <= row.comparison.ratio <= 1.1:
        result.notes.append(
            f"{row.name}: measured is {row.comparison.ratio:.2f} times predicted: pass times changed between "
            "profile and run (other load on the machine?): run again when it is idle"
        )


def _note_gain(result: DemoResult, solved: int = -2) -> None:
    """Gain of the solved plan over 1F1B, the last row: as predicted and as measured."""
    ours, reference = result.rows[solved].comparison, result.rows[-1].comparison
    predicted = 1 - ours.predicted_makespan / reference.predicted_makespan
    measured = 1 - ours.measured_makespan / reference.measured_makespan
    result.notes.append(
        f"{result.rows[solved].name}, over 1F1B: predicted {gain_text(predicted)}, "
        f"measured {gain_text(measured)}"
    )


def _save_plan(plan: Plan, path: Path, meaning: str, result: DemoResult) -> None:
    plan.save(path)
    result.files.append((path, meaning))


def _save_trace(trace: Trace, path: Path, meaning: str, result: DemoResult) -> None:
    trace.save(path)
    result.files.append((path, meaning))
