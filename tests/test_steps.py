"""Several steps: the period with and without a barrier, optimizer, roll-back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from tests.extended_strategies import Pair, programs
from zbsolve.baselines import BASELINES
from zbsolve.cli import app
from zbsolve.errors import InputError
from zbsolve.files.atomic import write_text_atomically
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.model.simulator import simulate, simulate_least_span
from zbsolve.model.steps import run_steps, steady_period
from zbsolve.solver.portfolio import solve

Program = tuple[Instance, tuple[tuple[Task, ...], ...], frozenset[Pair]]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(programs())
def test_without_a_barrier_a_step_takes_the_least_span(program: Program) -> None:
    """The steady period of many steps is the least span of these orders; with a barrier, the makespan."""
    instance, orders, pairs = program
    span = simulate_least_span(instance, orders, pairs).span
    assert steady_period(instance, orders, "free", pairs=pairs) == pytest.approx(span, abs=1e-6)
    makespan = simulate(instance, orders, pairs).makespan
    assert steady_period(instance, orders, "barrier", pairs=pairs) == pytest.approx(makespan, abs=1e-6)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(programs())
def test_steps_equal_one_long_simulation(program: Program) -> None:
    """Three free steps end when three times as many micro-batches do, the orders one after the other."""
    instance, orders, pairs = program
    if (
        instance.t_transfer is not None
    ):  # in one simulation a step's last transfers delay the next step's first
        instance = instance.with_changes(t_transfer=None)
    m = instance.num_microbatches
    longer = instance.with_changes(num_microbatches=3 * m)

    def shifted(task: Task, step: int) -> Task:
        return task._replace(microbatch=task.microbatch + step * m)

    repeated = [[shifted(task, step) for step in range(3) for task in order] for order in orders]
    all_pairs = frozenset((shifted(a, step), shifted(b, step)) for step in range(3) for a, b in pairs)
    schedule = simulate(longer, repeated, all_pairs)
    times = run_steps(instance, orders, 3, "free", pairs=pairs)
    assert times.total == pytest.approx(schedule.makespan)
    assert [times.ends[2][d] for d, program in enumerate(schedule.devices) if program] == pytest.approx(
        [program[-1].end for program in schedule.devices if program]
    )


def test_zb_h2_steps_by_hand() -> None:
    """p = 4, m = 8, equal times: 24 + 3 a step with a barrier, 24 without, optimizer on top of either."""
    instance = equal_stages(4, 8)
    orders = BASELINES["zb-h2"].orders(instance)
    assert steady_period(instance, orders, "barrier", optimizer=2.0) == 27 + 2
    assert steady_period(instance, orders, "post-validation", optimizer=2.0) == 24 + 2
    assert run_steps(instance, orders, 3, "post-validation").total == 3 * 24 + 3
    assert run_steps(instance, orders, 3, "barrier").total == 3 * 27


def test_the_reduced_state_travels_down_the_pipeline() -> None:
    """1F1B ends last on device 0: the others wait for its state, so post-validation gains nothing there."""
    instance = equal_stages(4, 8)
    timed_on, orders = BASELINES["1f1b"].prepared(instance)
    assert steady_period(timed_on, orders, "post-validation") == 33
    # With hops of 0.5 the last device hears of device 0 after 1.5 more, and starts the next step after it.
    slow = timed_on.with_changes(t_comm=0.5)
    times = run_steps(slow, orders, 2, "post-validation")
    assert times.starts[1] == pytest.approx(times.starts[1][0] + 0.5 * np.arange(4))


def test_a_failed_step_is_rolled_back_and_redone() -> None:
    """One device: the step of 3 ends at 4 with its optimizer of 1; undone and redone that is 2 later."""
    instance = equal_stages(1, 1)
    orders = BASELINES["zb-h1"].orders(instance)
    good = run_steps(instance, orders, 2, "post-validation", optimizer=1.0)
    bad = run_steps(instance, orders, 2, "post-validation", optimizer=1.0, failed={0})
    assert good.ends.tolist() == [[4.0], [8.0]]
    assert bad.ends.tolist() == [[6.0], [10.0]]
    assert run_steps(instance, orders, 2, "barrier", optimizer=1.0, failed={0}).total == 8


def test_bad_questions_are_refused() -> None:
    """No steps, a negative optimizer time, a period over more steps than were run."""
    instance = equal_stages(1, 1)
    orders = BASELINES["zb-h1"].orders(instance)
    with pytest.raises(InputError, match="steps is 0"):
        run_steps(instance, orders, 0, "free")
    with pytest.raises(InputError, match="optimizer is -1"):
        run_steps(instance, orders, 1, "free", optimizer=-1.0)
    with pytest.raises(InputError, match="period over 3 of 2 steps"):
        run_steps(instance, orders, 2, "free").period(3)


def test_a_failed_step_must_exist(tmp_path: Path) -> None:
    """--failed 3 of two steps is refused, not ignored."""
    write_text_atomically(tmp_path / "p.json", solve(equal_stages(2, 3), time_limit=5).plan.to_json())
    result = CliRunner().invoke(app, ["steps", str(tmp_path / "p.json"), "--steps", "2", "--failed", "3"])
    assert result.exit_code == 2
    assert "--failed 3: there are steps 0 to 1" in result.stderr
