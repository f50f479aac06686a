"""One rank of a run: the process that executes one device's program.

Two ways in, one way through. ``zbsolve run`` starts its ranks itself (:mod:`zbsolve.runtime.launch`) and
hands each a job file. Under torchrun the same module takes the plan and options from its command line:

    torchrun --nproc-per-node 2 -m zbsolve.runtime.worker plan.json --model gpt --trace-out trace.json

Ranks compare the plan's digest before anything else, agree on what each boundary carries, then run: one
untimed step that is checked and whose memory is counted, warm-up steps, measured steps. Rank 0 writes
the outcome. A rank that fails tells the others through the store, and every rank's last words name
the rank, op, stage and micro-batch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import math
import os
import platform
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from zbsolve.errors import EnvironmentFailedError, InputError, ZbsolveError
from zbsolve.instance import Instance
from zbsolve.partition.splits import even_split
from zbsolve.plan import ComputeOp, Plan, check_plan, load_plan
from zbsolve.runtime import models
from zbsolve.runtime.emulation import EmulatedStages
from zbsolve.runtime.executor import Executor, OpRecord
from zbsolve.runtime.gradients import (
    TOLERANCE,
    Difference,
    compare_gradients,
    reference_gradients,
    weight_orders,
)
from zbsolve.runtime.split_backward import Mechanism
from zbsolve.runtime.stages import RealStages, check_model
from zbsolve.runtime.status import Monitor, Status, announce_failure, connect_store, report_to
from zbsolve.runtime.transport import Transport, join
from zbsolve.trace import Event, GradientCheck, Step, Trace, step_makespan

logger = logging.getLogger(__name__)

TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
MEMORY_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}

# How long a rank whose peer vanished waits for somebody to say what really happened.
_GRACE_SECONDS = 1.5


@dataclass(frozen=True)
class Job:
    """What a group of ranks does. ``plans`` run one after the other on the same layers."""

    plans: tuple[str, ...]
    outcome: str = ""
    model: str = "gpt"
    steps: int = 5
    warmup: int = 2
    emulate: bool = False
    payload_mib: float = 1.0
    check_gradients: bool = True
    split: Mechanism = "auto"
    layers_per_stage: tuple[int, ...] | None = None
    threads: int = 1
    timeout: float = 120.0
    seed: int = 0
    backend: str = "gloo"
    optimizer: str = "adam"
    learning_rate: float = 3e-4

    def save(self, path: Path) -> None:
        """Write the job file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read a job file."""
        data = json.loads(path.read_text(encoding="utf-8"))
        data["plans"] = tuple(data["plans"])
        if data["layers_per_stage"] is not None:
            data["layers_per_stage"] = tuple(data["layers_per_stage"])
        return cls(**data)


@dataclass(frozen=True)
class Outcome:
    """What a plan's run measured: the trace, and bytes per stage and device for the profile."""

    trace: Trace
    held_after_f: dict[int, int] = field(default_factory=dict)
    held_after_b: dict[int, int] = field(default_factory=dict)
    static_bytes: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "trace": json.loads(self.trace.to_json()),
            "held_after_f": sorted(self.held_after_f.items()),
            "held_after_b": sorted(self.held_after_b.items()),
            "static_bytes": list(self.static_bytes),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """From JSON data."""
        return cls(
            Trace.model_validate(data["trace"]),
            dict(data["held_after_f"]),
            dict(data["held_after_b"]),
            tuple(data["static_bytes"]),
        )


def time_unit(instance: Instance) -> float:
    """The instance's time unit in seconds."""
    if instance.time_unit not in TIME_UNITS:
        raise InputError(
            f"time_unit is {instance.time_unit!r}: a run needs a unit of real time, "
            f"one of {', '.join(TIME_UNITS)}"
        )
    return TIME_UNITS[instance.time_unit]


# --- one rank -----------------------------------------------------------------------------------


class Rank:
    """This process's part of a job."""

    def __init__(self, job: Job, rank: int, size: int, store: Store, status: Status) -> None:
        self.job, self.rank, self.size = job, rank, size
        self.store, self.status = store, status
        cuda = job.backend == "nccl"
        local = int(os.environ.get("LOCAL_RANK", rank))
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")

    def run(self) -> list[Outcome]:
        """Run all plans. Outcomes on rank 0, nothing elsewhere."""
        torch.set_num_threads(self.job.threads)
        plans = [load_plan(path) for path in self.job.plans]
        self._compare_digests(plans)
        for plan in plans:
            time_unit(plan.instance)
            violations = check_plan(plan)
            if violations:
                raise InputError(f"the plan is not valid: {violations[0]}: solve the instance again")
        instance = plans[0].instance
        if instance.num_devices != self.size:
            raise InputError(
                f"the plan has {instance.num_devices} devices and {self.size} ranks were started: "
                "start one rank a device"
            )
        join(self.store, self.rank, self.size, self.job.backend, self.job.timeout, self.device)
        stages = self._stages(instance)
        transport = Transport(self.device)
        prepared = [self._prepare(plan, stages, transport) for plan in plans]
        # Plans take turns step by step: a machine that slows down does so for all of them.
        for turn in range(self.job.warmup + self.job.steps):
            for executor, part in prepared:
                self._measure(executor, part, stages, turn)
        outcomes = []
        for number, (plan, (_, part)) in enumerate(zip(plans, prepared, strict=True)):
            outcomes += self._gather(number, plan, part)
        dist.barrier()
        dist.destroy_process_group()
        return outcomes

    def _compare_digests(self, plans: Sequence[Plan]) -> None:
        own = " ".join(plan.digest() for plan in plans)
        self.store.set(f"digest/{self.rank}", own)
        for other in range(self.size):
            theirs = self.store.get(f"digest/{other}").decode()
            if theirs != own:
                raise InputError(
                    f"rank {self.rank} has plan {own[:12]}, rank {other} has {theirs[:12]}: "
                    "give every rank the same plan file"
                )

    def _split(self, model: models.PipelineModel, instance: Instance) -> tuple[int, ...]:
        layers = len(model.layers)
        chosen = self.job.layers_per_stage or models.recorded_split(instance)
        if chosen is None:
            chosen = even_split(layers, instance.num_stages)
        return models.check_split(chosen, layers, instance.num_stages)

    def _stages(self, instance: Instance) -> RealStages | EmulatedStages:
        if self.job.emulate:
            return EmulatedStages(instance, time_unit(instance), self.job.payload_mib)
        model = models.load_model(self.job.model, self.job.seed)
        self._layers = self._split(model, instance)
        check_model(model, instance, self._layers)
        stages = RealStages(
            model, instance, self.rank, self._layers, self.job.split, self.job.seed, self.device
        )
        total = 1 + self.job.warmup + self.job.steps
        stages.agree(self.store, total, self.status)
        self._optimizer = _make_optimizer(self.job, stages)
        return stages

    def _prepare(
        self, plan: Plan, stages: RealStages | EmulatedStages, transport: Transport
    ) -> tuple[Executor, dict[str, Any]]:
        """The executor of a plan, after the untimed step whose memory and gradients are looked at."""
        program = plan.programs[self.rank]
        executor = Executor(plan.instance, program, stages, transport, self.status)
        part: dict[str, Any] = {"host": platform.node(), "steps": [], "difference": None, "split": []}
        if isinstance(stages, RealStages):
            _clear(stages)
            with stages.accounting():
                executor.step(0)
            part["held"] = [sorted(stages.memory.after[op].items()) for op in ("F", "B")]
            part["static"] = stages.static_bytes()
            part["peak"] = stages.memory.peak
            part["split"] = [[s, stage.mechanism] for s, stage in stages.stages.items()]
            if self.job.check_gradients:
                part["difference"] = asdict(self._check(plan, stages))
            self._update(stages, 0)
        return executor, part

    def _measure(
        self, executor: Executor, part: dict[str, Any], stages: RealStages | EmulatedStages, turn: int
    ) -> None:
        """One timed step and the optimizer's; kept once the warm-up is over."""
        records = executor.step(1 + turn)
        loss = None
        if isinstance(stages, RealStages):
            loss = stages.step_loss()
            self._update(stages, 1 + turn)
        if turn >= self.job.warmup:
            ops = [asdict(record) for record in records]
            part["steps"].append({"zero": executor.clock.zero, "loss": loss, "ops": ops})

    def _check(self, plan: Plan, stages: RealStages) -> Difference:
        self.status.set("check", 0, -1, -1)
        reference = reference_gradients(
            models.load_model(self.job.model, self.job.seed),
            self._layers,
            weight_orders(plan.programs[self.rank]),
            seed=self.job.seed,
            step=0,
            count=plan.instance.num_microbatches,
            device=self.device,
        )
        return compare_gradients(stages, reference)

    def _update(self, stages: RealStages, number: int) -> None:
        """One optimizer step on all ranks, or on none when any gradient is not finite."""
        if self._optimizer is not None:
            finite = all(bool(p.grad.isfinite().all()) for p in stages.parameters if p.grad is not None)
            flag = torch.tensor([int(finite)], device=self.device)
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            if int(flag.item()):
                self._optimizer.step()
            elif self.rank == 0:
                logger.warning("step %d has gradients that are not finite: every rank skips it", number)
        _clear(stages)

    # --- gathering ------------------------------------------------------------------------------

    def _gather(self, number: int, plan: Plan, part: dict[str, Any]) -> list[Outcome]:
        self.store.set(f"part/{number}/{self.rank}", json.dumps(part))
        if self.rank != 0:
            return []
        parts = [json.loads(self.store.get(f"part/{number}/{r}").decode()) for r in range(self.size)]
        return [self._outcome(plan, parts)]

    def _outcome(self, plan: Plan, parts: list[dict[str, Any]]) -> Outcome:
        instance, job = plan.instance, self.job
        unit = time_unit(instance)
        one_host = len({part["host"] for part in parts}) == 1
        steps = [_merge([part["steps"][k] for part in parts], unit, one_host) for k in range(job.steps)]
        held_f: dict[int, int] = {}
        held_b: dict[int, int] = {}
        peak = None
        split: list[str] = ["emulated"] * instance.num_stages
        if not job.emulate:
            for part in parts:
                held_f.update(dict(part["held"][0]))
                held_b.update(dict(part["held"][1]))
                for s, mechanism in part["split"]:
                    split[s] = mechanism
            memory = MEMORY_UNITS.get(instance.memory_unit)
            if memory is not None:
                peak = tuple((part["static"] + part["peak"]) / memory for part in parts)
        trace = Trace(
            plan_digest=plan.digest(),
            mode="emulated" if job.emulate else "real",
            hardware=_hardware(job, self.size, self.device),
            backend=job.backend,
            model="sleeping stages" if job.emulate else job.model,
            time_unit=instance.time_unit,
            memory_unit=instance.memory_unit,
            split=tuple(split),
            steps=tuple(steps),
            peak_memory=peak,
            gradients=_gradient_check([part["difference"] for part in parts]),
        )
        return Outcome(trace, held_f, held_b, tuple(part.get("static", 0) for part in parts))


def _clear(stages: RealStages) -> None:
    """Gradients to zero, in place, so that no step pays for new buffers."""
    for parameter in stages.parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()


def _make_optimizer(job: Job, stages: RealStages) -> torch.optim.Optimizer | None:
    if job.optimizer == "none":
        return None
    # A rank whose layers are all frozen still takes part in the decision whether to step.
    parameters = stages.parameters or [torch.nn.Parameter(torch.zeros(1))]
    if job.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=job.learning_rate)
    if job.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=job.learning_rate)
    raise InputError(f"optimizer {job.optimizer}: give adam, sgd or none")


def _merge(steps: list[dict[str, Any]], unit: float, one_host: bool) -> Step:
    """One step of all ranks on one clock, its zero at the first op of any."""
    origins = [0.0 if one_host else step["zero"] for step in steps]
    records = [(rank, OpRecord(**op)) for rank, step in enumerate(steps) for op in step["ops"]]
    zero = min((record.start - origins[rank] for rank, record in records), default=0.0)
    events = tuple(
        Event(
            device=rank,
            op=cast(ComputeOp, record.op),
            stage=record.stage,
            microbatch=record.microbatch,
            start=(record.start - origins[rank] - zero) / unit,
            end=(record.end - origins[rank] - zero) / unit,
            wait=max(0.0, record.wait) / unit,
        )
        for rank, record in records
    )
    losses = [step["loss"] for step in steps if step["loss"] is not None and math.isfinite(step["loss"])]
    return Step(events=events, makespan=step_makespan(events), loss=losses[0] if losses else None)


def _gradient_check(found: list[dict[str, Any] | None]) -> GradientCheck | None:
    differences = [Difference(**entry) for entry in found if entry is not None]
    if not differences:
        return None
    worst = max(differences, key=lambda d: d.worst)
    return GradientCheck(
        checked=True,
        equal=worst.worst <= TOLERANCE,
        bit_equal=all(d.bit_equal for d in differences),
        # JSON has no infinity: a missing gradient is written as the largest number.
        worst_relative_difference=min(worst.worst, sys.float_info.max),
        tolerance=TOLERANCE,
        where=worst.where,
    )


def _hardware(job: Job, size: int, device: torch.device) -> str:
    if device.type == "cuda":
        what = f"{size} x {torch.cuda.get_device_name(device)}"
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        what = f"{platform.machine()} CPU with {cores} cores, {size} ranks of {job.threads} thread(s)"
    return f"{what}, {platform.system()}, torch {torch.__version__}"


# --- process entry ------------------------------------------------------------------------------


def _fail(store: Store | None, rank: int, status: Status, error: Exception) -> tuple[str, int]:
    """Tell everyone; the words and exit code to leave with."""
    place = status.get()
    if isinstance(error, ZbsolveError):
        message, code = str(error), error.exit_code
    else:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        first = re.sub(r"^\[\S+:\d+\] ", "", first)  # gloo begins with the place in its own source
        message = f"rank {rank} failed in {place}: {type(error).__name__}: {first}"
        code = EnvironmentFailedError.exit_code
        peer_may_be_gone = place.waiting or place.op in ("barrier", "setup") or "_" in place.op
        if peer_may_be_gone and isinstance(error, RuntimeError):
            # The cause is likelier at the other end. If it says so, the monitor ends this process.
            time.sleep(_GRACE_SECONDS)
    if store is not None:
        try:
            announce_failure(store, message)
        except RuntimeError:
            logger.debug("the store is gone too")
    return message, code


def _run_guarded(
    job: Job,
    rank: int,
    size: int,
    connect: Callable[[], Store],
    status: Status,
    report: Callable[[str, int], None],
) -> list[Outcome]:
    """Run a rank; on any failure report it and end the process, without waiting for other threads."""
    store: Store | None = None
    try:
        store = connect()
        monitor = Monitor(connect, rank, size, status, job.timeout, report)
        monitor.start()
        outcomes = Rank(job, rank, size, store, status).run()
        status.set("done", -1, -1, -1)
        monitor.stop()
        store.set(f"left/{rank}", "")
        return outcomes
    except Exception as error:  # noqa: BLE001 -- a rank may run any user code; all of it must be reported
        logger.debug("%s", traceback.format_exc())
        message, code = _fail(store, rank, status, error)
        report(message, code)
        sys.stdout.flush()
        os._exit(code)


def _from_job(path: Path, rank: int, size: int) -> int:
    """A rank that :mod:`zbsolve.runtime.launch` started; its parent serves the store."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends its ranks
    job = Job.load(path)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    status = Status(path.parent / f"status{rank}")
    report = report_to(path.parent / f"report{rank}.json")
    outcomes = _run_guarded(job, rank, size, lambda: connect_store(host, port, job.timeout), status, report)
    if rank == 0:
        text = json.dumps([outcome.to_json() for outcome in outcomes])
        Path(job.outcome).write_text(text, encoding="utf-8")
    return 0


def _from_torchrun(arguments: Sequence[str]) -> int:
    """A rank under torchrun, or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    parser = argparse.ArgumentParser(prog="python -m zbsolve.runtime.worker", allow_abbrev=False)
    parser.add_argument("plan", help="plan file, the same on every rank")
    parser.add_argument("--model", default="gpt", help="gpt, or package.module:factory")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--payload-mib", type=float, default=1.0)
    parser.add_argument("--no-check-gradients", action="store_true")
    parser.add_argument("--split", default="auto", choices=("auto", "deferred", "generic"))
    parser.add_argument("--layers", default=None, help="layers per stage, such as 5,5")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto", choices=("auto", "gloo", "nccl"))
    parser.add_argument("--optimizer", default="adam", choices=("adam", "sgd", "none"))
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--trace-out", default=None, help="where rank 0 writes the trace")
    given = parser.parse_args(arguments)
    missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        parser.error(f"{missing[0]} is not set: start this under torchrun, or use `zbsolve run`")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    layers = None if given.layers is None else tuple(int(n) for n in given.layers.split(","))
    job = Job(
        plans=(given.plan,),
        model=given.model,
        steps=given.steps,
        warmup=given.warmup,
        emulate=given.emulate,
        payload_mib=given.payload_mib,
        check_gradients=not given.no_check_gradients,
        split=given.split,
        layers_per_stage=layers,
        threads=given.threads,
        timeout=given.timeout,
        seed=given.seed,
        backend=choose_backend(given.backend, size),
        optimizer=given.optimizer,
        learning_rate=given.learning_rate,
    )
    connect = _torchrun_store(rank, given.timeout)
    outcomes = _run_guarded(job, rank, size, connect, Status(), report_to(None))
    for outcome in outcomes:
        if given.trace_out is not None:
            outcome.trace.save(given.trace_out)
        gradients = outcome.trace.gradients
        if gradients is not None and not gradients.equal:
            report_to(None)(f"gradients differ from the unpipelined model: {gradients.where}", 1)
            return 1
    return 0


def _torchrun_store(rank: int, timeout: float) -> Callable[[], Store]:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    prefix = f"zbsolve/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    served: list[Store] = []

    def connect() -> Store:
        if serves and not served:
            limit = datetime.timedelta(seconds=timeout)
            served.append(TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit))
            return PrefixStore(prefix, served[0])
        return PrefixStore(prefix, connect_store(host, port, timeout))

    return connect


def choose_backend(wanted: str, size: int) -> str:
    """NCCL where every rank can have a GPU of its own, else gloo."""
    if wanted == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise EnvironmentFailedError(
            "NCCL needs a GPU for each device, and none is found: use --backend gloo"
        )
    if wanted != "auto":
        return wanted
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= size
    return "nccl" if enough and dist.is_nccl_available() else "gloo"


def main(arguments: Sequence[str]) -> int:
    """Process entry; returns the exit code."""
    logging.basicConfig(level=os.environ.get("ZBSOLVE_LOG", "WARNING"), format="%(levelname)s %(message)s")
    if len(arguments) == 4 and arguments[0] == "--job":
        return _from_job(Path(arguments[1]), int(arguments[2]), int(arguments[3]))
    return _from_torchrun(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
