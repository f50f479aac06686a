"""All devices of a plan in one process: order and waits shown with streams that only write down."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import runtime_cases as cases
import torch
import torch.distributed as dist
from test_catalogue_runs import plan_of as catalogue_plan
from test_lanes import Recorder, issue_all
from torch.distributed import HashStore  # type: ignore[attr-defined]

from zbsolve.errors import EnvironmentFailedError, InputError
from zbsolve.model.graph import Task, predecessors
from zbsolve.model.kinds import TaskKind
from zbsolve.plan.plan import Plan
from zbsolve.runtime.api import RunOptions, run_plan
from zbsolve.runtime.execute.green import GreenStreams
from zbsolve.runtime.execute.lanes import StreamApi, arrange_devices, issued
from zbsolve.runtime.execute.side_by_side import on_one_device
from zbsolve.runtime.ranks.job import Job
from zbsolve.runtime.ranks.outcome import Outcome
from zbsolve.runtime.ranks.rank import Rank
from zbsolve.runtime.status import Status

PLANS = [("zb-h1", 4, 8), ("zb-v", 3, 6), ("interleaved", 2, 4)]


@pytest.mark.parametrize(("name", "p", "m"), PLANS)
def test_ops_wait_for_what_they_need_and_for_nothing_else(name: str, p: int, m: int) -> None:
    """Before each op the device's own earlier ops and what it depends on are done; other devices run free."""
    plan = catalogue_plan(name, p, m)
    one = on_one_device(plan)
    actions = issued(one.programs[0], frozenset())
    launches = arrange_devices(plan.instance, actions)
    api, at_the_end = issue_all(actions, launches)
    tasks = [Task(TaskKind(a.op), a.stage, a.microbatch) for a in actions]
    place = {task: number for number, task in enumerate(tasks)}
    device_of = [stage.device for stage in plan.instance.stages]
    assert len(place) == sum(a.is_compute for program in plan.programs for a in program.actions)
    certain: list[set[int]] = []
    for number, task in enumerate(tasks):
        needed = {place[e.before] for e in predecessors(plan.instance, task) if e.before in place}
        own = [k for k in range(number) if device_of[tasks[k].stage] == device_of[task.stage]]
        direct = needed | set(own[-1:])
        # Exactly what follows from those, no wait more.
        certain.append(set().union(direct, *(certain[k] for k in direct)))
        assert api.before[number] == certain[number]
    assert at_the_end == set(range(len(tasks)))
    for device, program in enumerate(plan.programs):
        order = [(a.op, a.stage, a.microbatch) for a in program.actions if a.is_compute]
        assert [a[:3] for a in actions if device_of[a.stage] == device] == order


def test_tied_weights_are_added_to_one_by_one() -> None:
    """W's of stages that share a weight wait for each other across devices, others do not."""
    plan = cases.plan(cases.instance(2, 3), cases.zb_orders(2, 3))
    actions = issued(on_one_device(plan).programs[0], frozenset())
    adders = [k for k, a in enumerate(actions) if a.op == "W"]
    tied, _ = issue_all(actions, arrange_devices(plan.instance, actions, [(0, 1)]))
    for earlier, later in pairwise(adders):
        assert earlier in tied.before[later]
    free, _ = issue_all(actions, arrange_devices(plan.instance, actions))
    assert any(earlier not in free.before[later] for earlier, later in pairwise(adders))


def test_pairs_are_refused() -> None:
    """A plan with F&B pairs is refused by the name of the first."""
    with pytest.raises(InputError, match=r"the plan runs F\S+ and BW\S+ as a pair"):
        on_one_device(cases.paired_plan())


class OnCpu(Rank):
    """A rank that runs everything as it would on a GPU, on streams that only write down."""

    def _one_gpu(self) -> torch.device:
        return torch.device("cpu")

    def _parts(self, count: int) -> StreamApi:
        self.recorder = Recorder()
        return self.recorder


@pytest.fixture
def no_group() -> Iterator[None]:
    """Leaves no process group behind, and torch as it was."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


def run(plan: Plan, model: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Outcome:
    """One process for all devices, on CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    plan.save(folder / "plan.json")
    settings = {"steps": 3, "warmup": 0, "optimizer": "adam", "learning_rate": 0.05, "timeout": 30.0}
    given = RunOptions(model=f"runtime_cases:{model}", green_contexts=True, **settings | options)
    given.check()
    rank = OnCpu(Job(given, (str(folder / "plan.json"),)), 0, 1, HashStore(), Status())
    (outcome,) = rank.run()
    return outcome


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(
    ("model", "split", "layers"), [("residual", "deferred", (2, 2)), ("tied_training", "generic", (2, 3))]
)
def test_one_process_measures_as_many_devices(
    model: str, split: str, layers: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients, losses, events, and each device's memory are those of a process a device."""
    plan = cases.plan(cases.instance(2, 4), cases.zb_orders(2, 4))
    one = run(plan, model, tmp_path, monkeypatch, split=split, layers_per_stage=layers)
    settings = {"steps": 3, "warmup": 0, "optimizer": "adam", "learning_rate": 0.05, "timeout": 30.0}
    options = RunOptions(
        model=f"runtime_cases:{model}",
        split=split,
        layers_per_stage=layers,
        **settings,  # type: ignore[arg-type]
    )
    two = run_plan(plan, options)
    assert one.trace.gradients is not None
    assert one.trace.gradients.equal
    assert one.trace.losses == pytest.approx(two.losses, rel=1e-6)
    assert one.trace.split == two.split
    assert one.trace.memory is not None
    for device in range(2):
        ours, theirs = (
            [(e.op, e.stage, e.microbatch) for e in trace.steps[0].events if e.device == device]
            for trace in (one.trace, two)
        )
        assert ours == theirs
        assert two.memory is not None
        assert one.trace.memory[device] == pytest.approx(two.memory[device], rel=0.02)
    assert "cut into 2 parts (green contexts)" in one.trace.hardware


def test_without_a_gpu_it_is_refused() -> None:
    """No GPU, no cuda-bindings: each is said in one line, before anything runs."""
    plan = cases.plan(cases.instance(2, 4), cases.zb_orders(2, 4))
    with pytest.raises(EnvironmentFailedError, match="green contexts need a GPU, and none is found"):
        run_plan(plan, RunOptions(model="runtime_cases:residual", green_contexts=True, timeout=30.0))
    with pytest.raises(InputError, match="green_contexts and data_parallel do not go together"):
        RunOptions(green_contexts=True, data_parallel=2).check()
    with pytest.raises(EnvironmentFailedError, match="green contexts need the package cuda-bindings"):
        GreenStreams(torch.device("cuda", 0), 2)
