"""Order on CUDA streams, shown with streams that only write down: what overlaps, and what may not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import runtime_cases as cases
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from zbsolve.errors import InputError
from zbsolve.plan.actions import COMPUTE_OPS
from zbsolve.runtime.api import RunOptions, run_plan
from zbsolve.runtime.execute.executor import Executor, pairs_of
from zbsolve.runtime.execute.lanes import (
    ASIDE,
    Issued,
    Lanes,
    Launch,
    arrange,
    issued,
)
from zbsolve.runtime.execute.stages import RealStages
from zbsolve.runtime.execute.transport import Transport
from zbsolve.runtime.models.load import load_model
from zbsolve.runtime.status import Status
from zbsolve.runtime.training.gradients import compare_gradients, reference_gradients, weight_orders


class Stream:
    """What has run, for certain, when the next thing issued here begins."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known: set[int] = set()


class Recorder:
    """A stream API that keeps, per stream, what is certain to be done; ``before`` has it for each action."""

    def __init__(self) -> None:
        self._home = self.current = Stream("home")
        self.before: dict[int, set[int]] = {}
        self.kept: list[tuple[str, torch.Tensor]] = []

    def home(self) -> Stream:
        return self._home

    def create(self, lane: int) -> Stream:
        return Stream(f"lane {lane}")

    def use(self, stream: Stream) -> None:
        self.current = stream

    def mark(self, stream: Stream) -> set[int]:
        return set(stream.known)

    def wait(self, stream: Stream, event: set[int]) -> None:
        stream.known |= event

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.kept.append((stream.name, tensor))

    def issue(self, place: int) -> None:
        """Something begins on the current stream."""
        self.before[place] = set(self.current.known)
        self.current.known.add(place)


def issue_all(actions: Sequence[Issued], launches: Sequence[Launch]) -> tuple[Recorder, set[int]]:
    """Issue a program; what is certain before each action, and what is once the step has ended."""
    api = Recorder()
    lanes = Lanes(launches, api)
    lanes.begin()
    for place in range(len(actions)):
        lanes.enter(place)
        api.issue(place)
        lanes.leave(place)
    lanes.end()
    assert api.current.name == "home"
    return api, api.current.known


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Issued], frozenset[int]]:
    """Random programs of one device: two stages, F&B pairs wherever they fit, some stages' W's aside."""
    count = draw(st.integers(1, 6))
    waiting = {stage: list(range(count)) for stage in (0, 1)}
    ready: list[tuple[int, int]] = []
    pending: list[tuple[int, int]] = []
    actions: list[Issued] = []
    while waiting[0] or waiting[1] or ready or pending:
        moves = [("F", s) for s in (0, 1) if waiting[s]]
        moves += [(kind, 0) for kind in ("B", "BW") if ready] + ([("W", 0)] if pending else [])
        moves += [("pair", s) for s in (0, 1) if waiting[s] and ready]
        kind, stage = draw(st.sampled_from(moves))
        if kind in ("F", "pair"):
            done = ready.pop(draw(st.integers(0, len(ready) - 1))) if kind == "pair" else None
            microbatch = waiting[stage].pop(0)
            actions.append(Issued("F", stage, microbatch, kind == "pair"))
            ready.append((stage, microbatch))
            if done is not None:
                actions.append(Issued("BW", *done))
        elif kind == "W":
            actions.append(Issued("W", *pending.pop(0)))
        else:
            done = ready.pop(draw(st.integers(0, len(ready) - 1)))
            actions.append(Issued(kind, *done))
            if kind == "B":
                pending.append(done)
        if draw(st.booleans()):
            actions.append(Issued("SEND_F", actions[-1].stage, actions[-1].microbatch))
    return actions, frozenset(draw(st.sets(st.sampled_from([0, 1]))))


@given(programs())
def test_everything_waits_but_pairs_and_weights_aside(drawn: tuple[list[Issued], frozenset[int]]) -> None:
    """Before each op all earlier ones are certain to be done, except its partner and W's put aside."""
    actions, aside = drawn
    launches = arrange(actions, aside)
    api, at_the_end = issue_all(actions, launches)
    compute = [place for place, action in enumerate(actions) if action.op in COMPUTE_OPS]
    for number, place in enumerate(compute):
        op, stage, microbatch, _ = actions[place]
        on_its_own = op == "W" and stage in aside
        needed = set(compute[:number])
        if number and actions[compute[number - 1]].paired:
            partner = compute[number - 1]
            needed.remove(partner)
            assert partner not in api.before[place]
            assert launches[partner].lane != launches[place].lane
        if op not in ("BW", "W"):
            away = {p for p in needed if actions[p].op == "W" and actions[p].stage in aside}
            needed -= away
            # Unless a BW waited for it already, nothing does.
            adders = [p for p in needed if actions[p].op in ("BW", "W")]
            assert not {p for p in away if p > max(adders, default=-1)} & api.before[place]
        assert needed <= api.before[place], (actions[place], on_its_own)
        # Autograd stays on the stream of the F.
        forward = actions.index(next(a for a in actions if a[:3] == ("F", stage, microbatch)))
        assert launches[place].lane == (ASIDE if on_its_own else launches[forward].lane)
    for place, action in enumerate(actions):
        if action.op not in COMPUTE_OPS:
            # A message is issued on the lane that makes what it carries.
            made = max(p for p in range(place) if actions[p][1:3] == action[1:3])
            assert made in api.before[place] or launches[made].lane == ASIDE
    assert set(compute) <= at_the_end


def test_a_chain_of_pairs_alternates() -> None:
    """F0, F1 & BW0, F2 & BW1, BW2: lanes 0, 1, 0; the second half of a pair waits for what came before it."""
    actions = [
        Issued("F", 0, 0),
        Issued("F", 0, 1, True),
        Issued("BW", 0, 0),
        Issued("F", 0, 2, True),
        Issued("BW", 0, 1),
        Issued("BW", 0, 2),
    ]
    # F1 (lane 1) waits for F0; BW0 (lane 0) comes after F0 on its own lane. F2 (lane 0) waits for F1, and BW1
    # (lane 1) for BW0; BW2 (lane 0) for BW1.
    assert arrange(actions) == [(0, ()), (1, (0,)), (0, ()), (0, (1,)), (1, (2,)), (0, (4,))]


def test_weights_aside_wait_for_their_b_and_hold_nothing_up() -> None:
    """F0 B0 W0 F1 BW1: W0 waits for B0, F1 for nothing of it, BW1 for W0, which adds to the same weights."""
    actions = [Issued(op, 0, j) for op, j in (("F", 0), ("B", 0), ("W", 0), ("F", 1), ("BW", 1))]
    assert arrange(actions, {0}) == [(0, ()), (0, ()), (ASIDE, (1,)), (0, ()), (0, (2,))]


# --- the executor's own loop, with streams that write down -----------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Issuing(RealStages):
    """Real layers that write down on which stream each op was issued."""

    api: Recorder
    issued: list[tuple[str, int, int]]

    def run(self, op: str, stage: int, microbatch: int, received: list[torch.Tensor]) -> list[torch.Tensor]:
        self.api.issue(len(self.issued))
        self.issued.append((op, stage, microbatch))
        return super().run(op, stage, microbatch, received)


@pytest.mark.parametrize("split", ["deferred", "generic"])
@pytest.mark.usefixtures("group")
def test_the_executor_issues_on_lanes(split: Any) -> None:
    """The loop itself: pairs and W's are free of each other, tensors of other lanes kept, gradients right."""
    plan = cases.paired_plan()
    model = load_model("runtime_cases:residual", 0)
    api = Recorder()
    stages = Issuing(model, plan.instance, 0, (2, 2), split, 0, torch.device("cpu"))
    stages.api, stages.issued = api, []
    status = Status()
    stages.agree(HashStore(), 1, status)
    aside = frozenset({1} if split == "deferred" else ())
    transport = Transport(torch.device("cpu"))
    program = plan.programs[0]
    launches = arrange(issued(program, pairs_of(program)), aside)
    executor = Executor(plan.instance, program, stages, transport, status, lanes=Lanes(launches, api))
    executor.step(0)
    at = {key: number for number, key in enumerate(stages.issued)}
    assert len(at) == 15
    for f, bw in ((("F", 0, 1), ("BW", 1, 0)), (("F", 1, 1), ("BW", 0, 0))):
        assert at[f] not in api.before[at[bw]]
        assert at[bw] not in api.before[at[f]]
    assert (at["W", 1, 1] in api.before[at["F", 1, 2]]) == (not aside)
    assert at["W", 1, 1] in api.before[at["BW", 0, 2]]
    assert set(range(15)) <= api.home().known
    # F of stage 1 takes over what stage 0 made; a W put aside what its B left: x and dy of its Linears.
    assert api.kept
    if aside:
        assert sum(name == f"lane {ASIDE}" for name, _ in api.kept) >= 2 * 2 * 2 * 2
    reference = reference_gradients(
        load_model("runtime_cases:residual", 0), (2, 2), weight_orders(plan.programs[0]),
        seed=0, step=0, count=3, device=torch.device("cpu"),
    )  # fmt: skip
    assert compare_gradients(stages, reference).bit_equal


def test_weights_aside_are_refused_on_cpu() -> None:
    """The option needs a GPU, and says so before step 1."""
    plan = cases.plan(cases.instance(2, 4), cases.zb_orders(2, 4))
    with pytest.raises(InputError, match="async_weights needs a GPU"):
        run_plan(plan, RunOptions(model="runtime_cases:residual", async_weights=True, timeout=30.0))
