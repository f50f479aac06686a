"""Plans run by real processes over gloo: right values, right refusals, and no rank left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import runtime_cases as cases
import torch

from zbsolve.errors import EnvironmentFailedError, InfeasibleError
from zbsolve.model.kinds import BW, B, F, W
from zbsolve.plan.plan import Plan
from zbsolve.runtime.api import ProfileOptions, RunOptions, profile_model, run_plan
from zbsolve.runtime.models.load import load_model
from zbsolve.runtime.training.gradients import reference_gradients, weight_orders
from zbsolve.trace.compare import compare
from zbsolve.trace.trace import Trace, load_trace


def run(plan: Plan, model: str, **options: object) -> Trace:
    """Run few steps of a model of :mod:`runtime_cases`."""
    settings = {"steps": 2, "warmup": 0, "timeout": 30.0, "optimizer": "none", **options}
    return run_plan(plan, RunOptions(model=f"runtime_cases:{model}", **settings))  # type: ignore[arg-type]


def linear_plan(m: int = 4) -> Plan:
    """Two devices, a stage each, W's delayed on the second."""
    return cases.plan(cases.instance(2, m), cases.zb_orders(2, m))


def live_ranks() -> list[psutil.Process]:
    """Ranks of this process's rank servers that still run."""
    servers = psutil.Process().children()
    return [p for s in servers for p in s.children() if p.status() != psutil.STATUS_ZOMBIE]


both = pytest.mark.parametrize("split", ["deferred", "generic"])


@both
def test_frozen_prefix_over_two_ranks(split: str) -> None:
    """With stage 0 frozen every trainable gradient equals the reference, although nothing goes backward."""
    trace = run(linear_plan(), "frozen_prefix", split=split)
    assert trace.gradients is not None
    assert trace.gradients.bit_equal, trace.gradients
    assert trace.split == (split, split)
    assert len(trace.steps) == 2
    assert all(len(step.events) == 2 * 4 * 3 for step in trace.steps)


@both
def test_two_chunks_and_messages_to_one_peer(split: str) -> None:
    """p=2, two chunks a rank, m=5, backwards split and fused: messages to the same peer never mix."""
    # Every micro-batch has other values, so a swapped message changes gradients; the sums are
    # taken in the order 1, 3, 0, 2, 4 and the reference follows.
    given = cases.instance(2, 5, "loop")
    trace = run(cases.plan(given, cases.all_forward_orders(given)), "residual", split=split)
    assert trace.gradients is not None
    assert trace.gradients.bit_equal, trace.gradients
    assert trace.losses[0] is not None


@both
def test_v_placement_tied_weights_shapes_and_structures(split: str) -> None:
    """V on two ranks: no message at the turn, the loss on rank 0, a tied weight, dicts, shorter steps."""
    # Steps 0 and 1 have sequences of 5, later ones of 3, and 7 rows over 3 micro-batches are 3, 2, 2.
    given = cases.instance(2, 3, "v")
    plan = cases.plan(given, cases.all_forward_orders(given))
    sends = [a for p in plan.programs for a in p.actions if a.op.startswith("SEND")]
    # Boundaries 0 and 2 cross devices, boundary 1 does not: 2 boundaries x 2 directions x 3.
    assert len(sends) == 12
    assert not [a for a in sends if (a.op, a.stage) in {("SEND_F", 1), ("SEND_B", 2)}]
    trace = run(plan, "tied", steps=4, split=split)
    assert trace.gradients is not None
    assert trace.gradients.equal, trace.gradients
    assert {e.device for e in trace.steps[0].events if e.stage == 3} == {0}
    assert all(loss is not None for loss in trace.losses)
    assert trace.peak_memory is not None


@both
def test_several_inputs_and_a_mask(split: str) -> None:
    """Micro-batches of ids, a mask and a float, with a tuple of targets, over three ranks."""
    plan = cases.plan(cases.instance(3, 3), cases.zb_orders(3, 3))
    trace = run(plan, "many_inputs", split=split)
    assert trace.gradients is not None
    assert trace.gradients.bit_equal, trace.gradients


@both
def test_rows_that_do_not_divide(split: str) -> None:
    """7 rows in 3 micro-batches, loss (w x)^2 mean, w=1, x=0..6: dw = 2 * 91 / 7 = 26."""
    plan = linear_plan(3)
    gradients = reference_gradients(
        load_model("runtime_cases:SevenRows", 0),
        (1, 1),
        {0: [0, 1, 2]},
        seed=0,
        step=0,
        count=3,
        device=torch.device("cpu"),
    )
    assert gradients[0][0] is not None
    assert gradients[0][0].item() == pytest.approx(26.0)
    trace = run(plan, "SevenRows", steps=1, optimizer="sgd", learning_rate=0.01, split=split)
    assert trace.gradients is not None
    assert trace.gradients.bit_equal
    # After one step w = 1 - 0.26 = 0.74; the next loss is 0.74^2 * 91 / 7.
    assert trace.losses[0] == pytest.approx(0.74**2 * 13)


def test_poisoned_step_is_skipped_by_all_ranks() -> None:
    """A NaN in step 1 stops every rank's optimizer for that step; the next loss is finite again."""
    trace = run(linear_plan(), "poisoned", steps=3, optimizer="sgd", learning_rate=0.1)
    poisoned, after, last = trace.losses
    assert poisoned is None  # not a finite number
    assert after is not None
    assert last is not None


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("raises", "rank 1 failed in F of stage 1, micro-batch 2, step 0: ArithmeticError: a layer gave up"),
        ("killed", "rank 1 was killed by SIGKILL in F of stage 1, micro-batch 2, step 0"),
    ],
)
def test_failing_rank_ends_the_other(model: str, words: str) -> None:
    """Rank 1 raises or is killed in F of micro-batch 2: rank 0 ends within the timeout, all places named."""
    start = time.monotonic()
    with pytest.raises(EnvironmentFailedError) as caught:
        run(linear_plan(), model, timeout=60.0)
    assert time.monotonic() - start < 40
    assert words in str(caught.value)
    assert "rank 0 ended in the wait before B of stage 0, micro-batch" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not live_ranks()


def test_hanging_rank_ends_within_the_timeout() -> None:
    """A stage that never returns ends the run after the timeout, and the waiting op is named."""
    start = time.monotonic()
    with pytest.raises(EnvironmentFailedError, match="rank 1 ended in F of stage 1, micro-batch 2"):
        run(linear_plan(), "hangs", timeout=6.0)
    assert time.monotonic() - start < 45
    assert not live_ranks()


def test_killed_parent_leaves_no_rank_behind(tmp_path: Path) -> None:
    """When whoever started the ranks is killed, they end by themselves, blocked or not."""
    linear_plan().save(tmp_path / "plan.json")
    code = (
        "import sys; from zbsolve.plan.plan import load_plan\n"
        "from zbsolve.runtime.api import RunOptions, run_plan\n"
        "run_plan(load_plan(sys.argv[1]), RunOptions(model='runtime_cases:hangs', timeout=100.0))"
    )
    hanging = tmp_path / "hanging"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        cases.HANGING: str(hanging),
    }
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "plan.json")], env=environment
    ) as parent:
        until = time.monotonic() + 60
        while not hanging.exists() and time.monotonic() < until:
            time.sleep(0.02)
        ranks = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert hanging.exists()
    assert len(ranks) == 3  # the rank server and its two ranks
    _, alive = psutil.wait_procs(ranks, timeout=30)
    for survivor in alive:
        survivor.kill()
    assert not alive


def test_one_device() -> None:
    """p = 1 runs without any message, fused and split backwards side by side, equal to the last bit."""
    order = [cases.Task(kind, 0, j) for j, kinds in enumerate(([F, BW], [F, B, W])) for kind in kinds]
    plan = cases.plan(cases.instance(1, 2), [order])
    trace = run(plan, "residual", steps=1)
    assert trace.gradients is not None
    assert trace.gradients.bit_equal
    assert trace.steps[0].makespan > 0


def test_deadlock_is_refused_before_launch() -> None:
    """Programs whose messages wait for each other never start, and the cycle is shown."""
    plan = linear_plan(2)
    actions = list(plan.programs[1].actions)
    # Rank 1 receives F of micro-batch 0 only after it has computed with it.
    first = next(i for i, a in enumerate(actions) if a.op == "RECV_F")
    use = next(i for i, a in enumerate(actions) if a.op == "F")
    actions.insert(use, actions.pop(first))
    broken = plan.programs[1].model_copy(update={"actions": tuple(actions)})
    with pytest.raises(
        InfeasibleError,
        match=r"nothing was started: deadlock: .*device 0 waits in SEND_F0\.0 for device 1; device 1",
    ):
        run_plan(plan.model_copy(update={"programs": (plan.programs[0], broken)}), RunOptions(emulate=True))


def test_emulated_ranks_overlap() -> None:
    """50 ms sleeps: F0 of rank 1 starts before F1 of rank 0 ends, ops take 50 ms, waits are in receives."""
    given = cases.instance(2, 2, time=50.0)
    orders = [
        [cases.Task(F, 0, 0), cases.Task(F, 0, 1), *(cases.Task(k, 0, j) for j in (0, 1) for k in (B, W))],
        [cases.Task(k, 1, j) for j in (0, 1) for k in (F, B, W)],
    ]
    plan = cases.plan(given, orders)
    trace = run_plan(plan, RunOptions(emulate=True, steps=3, warmup=1, payload_mib=0.25, timeout=30.0))
    assert trace.mode == "emulated"
    assert trace.gradients is None
    assert trace.peak_memory is None
    step = trace.median_step
    at = {(e.op, e.stage, e.microbatch): e for e in step.events}
    assert at["F", 1, 0].start < at["F", 0, 1].end
    assert at["F", 1, 0].wait > 25  # it waits for F0 of rank 0, 50 ms less the ranks' skew
    comparison = compare(plan, trace)
    # F0, F0 | F B W F B W on rank 1 | then B's answer: 50 + 250 + 50 + 50 = 400 ms.
    assert plan.makespan == 400.0
    assert comparison.ratio == pytest.approx(1.0, abs=0.15)
    assert all(row.measured >= 49.9 for row in comparison.ops)


def test_profile_leaves_the_first_call_out() -> None:
    """A layer whose first call takes 300 ms has a profile of its usual time; layers are recorded."""
    instance = profile_model(
        ProfileOptions(
            model="runtime_cases:slow_first_call", num_microbatches=3, repeats=3, warmup=1, timeout=30.0
        )
    )
    assert [stage.name for stage in instance.stages] == ["layers 0-0: Trouble", "layers 1-1: Linear"]
    for stage in instance.stages:
        assert 0 < stage.t_f < 50
        assert stage.t_bw is not None
    # Micro-batches of 4 rows of 6 floats: x is 96 bytes; after B dy lies beside it. The loss keeps
    # the output and the targets too, so the last stage holds more after F.
    assert instance.stages[0].mem_b == pytest.approx(96 / 2**20, abs=1e-6)
    assert instance.stages[0].mem_w == pytest.approx(192 / 2**20, abs=1e-6)
    assert instance.static_mem is not None


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """The same worker under torchrun runs the plan, checks gradients and writes the trace."""
    plan = linear_plan()
    plan.save(tmp_path / "plan.json")
    trace_file = tmp_path / "trace.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "zbsolve.runtime.worker", str(tmp_path / "plan.json")]
    command += ["--model", "runtime_cases:residual", "--steps", "2", "--trace-out", str(trace_file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    trace = load_trace(trace_file)
    assert trace.plan_digest == plan.digest()
    assert trace.gradients is not None
    assert trace.gradients.bit_equal


def test_weight_orders_follow_the_program() -> None:
    """The order of W's and fused BW's of a stage is read from the program."""
    given = cases.instance(2, 5, "loop")
    plan = cases.plan(given, cases.all_forward_orders(given))
    assert weight_orders(plan.programs[1]) == {1: [1, 3, 0, 2, 4], 3: [1, 3, 0, 2, 4]}
