"""What an executor costs beyond the computation: this one beside torch's own schedule runtime.

Both run the same orders on the same tiny layers as one rank of several, with a process group whose transfers
do nothing (torch's "fake" backend): what remains is the host's work per action. The same passes called
directly, without any executor, are the floor. The orders take turns within one run, so that a
machine that slows down does so for all of them.

Not modelled: the transport's own latency (the same for both), and a GPU's asynchronous launches.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from zbsolve.baselines import BASELINES
from zbsolve.errors import EnvironmentFailedError
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.plan.actions import Program
from zbsolve.plan.lowering import lower
from zbsolve.plan.torch_csv import export_torch_csv
from zbsolve.runtime.backward.split import Mechanism
from zbsolve.runtime.execute.boundary import Boundary
from zbsolve.runtime.execute.data import data_digest, step_data
from zbsolve.runtime.execute.executor import Executor
from zbsolve.runtime.execute.stages import RealStages
from zbsolve.runtime.execute.transport import Shape, Transport
from zbsolve.runtime.models.pipeline_model import MicroBatch
from zbsolve.runtime.status import Status
from zbsolve.runtime.values import TENSOR

RANKS, RANK = 4, 1
WIDTH, ROWS = 32, 4
SCHEDULES = ("1f1b", "zb-h1")


@dataclass(frozen=True, slots=True)
class OverheadRow:
    """The host's CPU time per compute action (F, B, W or BW), in microseconds, of an executor on a schedule.

    ``total`` is the median step divided by its compute actions; ``above`` is what remains of it when the
    same passes called directly (``bare``) are taken off.
    """

    schedule: str
    layers: str
    executor: str
    actions: int
    total: float
    bare: float

    @property
    def above(self) -> float:
        """Microseconds per compute action that the executor adds."""
        return self.total - self.bare


class _Bias(nn.Module):
    """The least layer that has a weight gradient: y = x + b."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.bias
        return result


def _trivial() -> nn.Module:
    return _Bias()


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


LAYERS: dict[str, Callable[[], nn.Module]] = {"x + b": _trivial, "MLP": _mlp}


class _Model:
    """One layer a stage, the same rows in every micro-batch."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers

    def loss(self, output: Any, targets: Any) -> torch.Tensor:
        loss: torch.Tensor = (output - targets).square().mean()
        return loss

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        rows = torch.zeros(ROWS, WIDTH)
        return [MicroBatch(rows, rows, 1 / count)] * count


def measure_overhead(num_microbatches: int = 64, repeats: int = 30) -> list[OverheadRow]:
    """Every schedule and kind of layer through both executors, median of ``repeats`` steps each.

    Raises
    ------
    EnvironmentFailedError
        When this process already belongs to a process group.
    """
    rows = []
    with _fake_group(), tempfile.TemporaryDirectory(prefix="zbsolve-overhead-") as folder:
        for name in SCHEDULES:
            baseline = BASELINES[name]
            instance, schedule = baseline.schedule(equal_stages(RANKS, num_microbatches))
            csv = Path(folder) / f"{name}.csv"
            csv.write_text(export_torch_csv(instance, schedule).text, encoding="utf-8")
            program = lower(instance, schedule)[RANK]
            actions = sum(action.is_compute for action in program.actions)
            for layers, build in LAYERS.items():
                steps = {
                    "bare": _bare_step(program, build()),
                    "zbsolve, deferred": _our_step(instance, program, build, "deferred"),
                    "zbsolve, generic": _our_step(instance, program, build, "generic"),
                    "torch": _torch_step(csv, num_microbatches, build()),
                }
                taken = {key: t / actions * 1e6 for key, t in _take_turns(steps, repeats).items()}
                rows += [
                    OverheadRow(name, layers, key, actions, taken[key], taken["bare"])
                    for key in steps
                    if key != "bare"
                ]
    return rows


@contextmanager
def _fake_group() -> Iterator[None]:
    # The backend registers itself when this is imported.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise EnvironmentFailedError("this process already has a process group: measure in a fresh one")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()  # the collection before each step need not look at all of torch again
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    try:
        yield
    finally:
        gc.unfreeze()
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def _take_turns(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each, after three turns of warm-up."""
    taken: dict[str, list[float]] = {key: [] for key in steps}
    for turn in range(repeats + 3):
        for key, step in steps.items():
            gc.collect()
            begun = time.process_time()
            step()
            if turn >= 3:
                taken[key].append(time.process_time() - begun)
    return {key: median(values) for key, values in taken.items()}


def _bare_step(program: Program, module: nn.Module) -> Callable[[], None]:
    """F and a full backward of every micro-batch, in the program's order, on preallocated tensors."""
    gradient = torch.zeros(ROWS, WIDTH)
    x = torch.zeros(ROWS, WIDTH)
    backward = [a for a in program.actions if a.op in ("B", "BW")]
    order = [(a.op == "F", a.microbatch) for a in program.actions if a.op == "F" or a in backward]

    def step() -> None:
        held: dict[int, torch.Tensor] = {}
        for forward, microbatch in order:
            if forward:
                held[microbatch] = module(x.detach().requires_grad_())
            else:
                torch.autograd.backward(held.pop(microbatch), gradient)

    return step


def _our_step(
    instance: Instance, program: Program, build: Callable[[], nn.Module], mechanism: Mechanism
) -> Callable[[], None]:
    model = _Model([build() for _ in range(RANKS)])
    device = torch.device("cpu")
    stages = RealStages(model, instance, RANK, (1,) * RANKS, mechanism, 0, device)
    # The other ranks' part of the agreement: every boundary carries the same activations.
    store = HashStore()
    boundary = Boundary(TENSOR, (Shape((ROWS, WIDTH), torch.float32),), (True,), (0,))
    for stage in set(range(RANKS)) - {RANK}:
        store.set(f"boundary/0/{stage + 1}", boundary.to_text(f"stage {stage}"))
    store.set("data/0", data_digest(step_data(model, 0, instance.num_microbatches, 0)))
    status = Status()
    stages.agree(store, 1, status)
    executor = Executor(instance, program, stages, Transport(device), status)

    def step() -> None:
        executor.step(0)

    return step


def _torch_step(csv: Path, num_microbatches: int, module: nn.Module) -> Callable[[], None]:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    class Alone(PipelineStage):
        """Its peers' votes for shapes known beforehand cannot arrive over a transport that does nothing."""

        def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
            return torch.ones(1, dtype=torch.int32)

    x = torch.zeros(ROWS, WIDTH, requires_grad=True)
    stage = Alone(
        module,
        RANK,
        RANKS,
        torch.device("cpu"),
        input_args=(x,),
        output_args=(x,),
        input_grads=(x,),
        output_grads=(x,),
    )
    schedule = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        [stage], num_microbatches, loss_fn=nn.MSELoss(), scale_grads=False
    )
    schedule._load_csv(str(csv), format="compute_only")

    def step() -> None:
        schedule.step()

    return step
