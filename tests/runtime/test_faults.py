"""Failures injected at random places: every rank ends, nobody hangs, and the message names the place."""

from __future__ import annotations

import random
import time
from typing import Literal, cast

import pytest
import runtime_cases as cases
from test_run import live_ranks

from zbsolve.errors import EnvironmentFailedError
from zbsolve.plan.plan import Plan
from zbsolve.runtime.api import RunOptions, run_plan
from zbsolve.runtime.ranks.faults import Fault
from zbsolve.trace.compare import compare

TIMEOUT = 4.0


def random_fault(rng: random.Random, kind: str) -> tuple[Plan, Fault]:
    """A plan on 2 or 3 devices, and a failure at one of its ops in one of three steps."""
    p = rng.choice([2, 3])
    if rng.random() < 0.5:
        given = cases.instance(p, 4, time=2.0)
        plan = cases.plan(given, cases.zb_orders(p, 4))
    else:
        given = cases.instance(p, 4, "v", time=2.0)
        plan = cases.plan(given, cases.all_forward_orders(given))
    program = rng.choice(plan.programs)
    action = rng.choice([a for a in program.actions if a.is_compute])
    kind_of = cast(Literal["raise", "kill", "stall"], kind)
    return plan, Fault(kind_of, action.op, action.stage, action.microbatch, rng.randrange(1, 4))


def break_once(seed: int, kind: str) -> None:
    """Run a plan with one failure; see that it ends as it should."""
    plan, fault = random_fault(random.Random(seed), kind)
    options = RunOptions(emulate=True, steps=3, warmup=0, payload_mib=0.01, timeout=TIMEOUT, faults=(fault,))
    begun = time.monotonic()
    with pytest.raises(EnvironmentFailedError) as caught:
        run_plan(plan, options)
    assert time.monotonic() - begun < 60
    words = str(caught.value)
    place = f"{fault.op} of stage {fault.stage}, micro-batch {fault.microbatch}, step {fault.step}"
    rank = plan.instance.stages[fault.stage].device
    assert place in words, words
    assert f"rank {rank} " in words
    assert "\n" not in words
    if kind == "raise":
        assert "told to fail" in words
    if kind == "kill":
        assert f"rank {rank} was killed by SIGKILL in {place}" in words
    assert not live_ranks()


@pytest.mark.parametrize(
    ("seed", "kind"), [(0, "raise"), (1, "kill"), (2, "stall"), (3, "raise"), (4, "kill")]
)
def test_a_failure_ends_every_rank(seed: int, kind: str) -> None:
    """A rank that raises, is killed or stalls at a random op ends all within the timeout, by name."""
    break_once(seed, kind)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_fifty_failures(seed: int) -> None:
    """Fifty more of them."""
    break_once(seed, random.Random(seed).choice(["raise", "kill", "stall"]))


def test_a_slow_link_shows_as_waiting() -> None:
    """20 ms more on every link: ops take as long as before, and only the waits in receives grow."""
    # m = 1 on p = 2 with 30 ms ops: F0 | F1 B1 | B0 W0. Device 1 waits for F0, device 0 for F1 and B1:
    # each wait contains one more delay (device 0's two).
    given = cases.instance(2, 1, time=30.0)
    plan = cases.plan(given, cases.zb_orders(2, 1))
    rows = {}
    for delay in (0.0, 0.02):
        options = RunOptions(
            emulate=True, steps=5, warmup=1, payload_mib=0.01, timeout=30.0, link_delay=delay
        )
        rows[delay] = compare(plan, run_plan(plan, options)).devices
    for quick, slow, messages in zip(rows[0.0], rows[0.02], (2, 1), strict=True):
        assert slow.wait - quick.wait == pytest.approx(20.0 * messages, abs=8.0)
        assert slow.busy == pytest.approx(quick.busy, abs=8.0)
