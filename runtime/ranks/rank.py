"""One rank of a run: agrees with the others, then runs one device's program step after step.

Ranks compare the plan's digest before anything else, agree on what each boundary carries, then run: one
untimed step that is checked and whose memory is counted, warm-up steps, measured steps. Rank 0 gathers.
With several pipelines side by side, rank r is device ``r % p`` of pipeline ``r // p``.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from zbsolve.errors import EnvironmentFailedError, InputError
from zbsolve.model.instance import Instance
from zbsolve.partition.splits import even_split
from zbsolve.plan.actions import Program
from zbsolve.plan.check import check_plan
from zbsolve.plan.plan import Plan, load_plan
from zbsolve.runtime.execute.copies import Held, aliases, shared_buffers
from zbsolve.runtime.execute.emulation import EmulatedStages
from zbsolve.runtime.execute.executor import Executor, OpRecord, pairs_of
from zbsolve.runtime.execute.green import GreenStreams, one_gpu
from zbsolve.runtime.execute.lanes import (
    CudaStreams,
    Lanes,
    StreamApi,
    arrange,
    arrange_devices,
    issued,
)
from zbsolve.runtime.execute.side_by_side import on_one_device, told_apart
from zbsolve.runtime.execute.stages import RealStages, check_model
from zbsolve.runtime.execute.transport import Transport, join
from zbsolve.runtime.models import pipeline_model as models
from zbsolve.runtime.models.load import load_model
from zbsolve.runtime.ranks.faults import FaultAt, SlowTransport
from zbsolve.runtime.ranks.job import Job
from zbsolve.runtime.ranks.outcome import Outcome, merge, time_unit
from zbsolve.runtime.status import Status
from zbsolve.runtime.training import checkpoint
from zbsolve.runtime.training.gradients import (
    Difference,
    compare_gradients,
    reference_gradients,
    weight_orders,
)
from zbsolve.runtime.training.update import Updater

_AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


class Rank:
    """This process's part of a job."""

    def __init__(self, job: Job, rank: int, size: int, store: Store, status: Status) -> None:
        self.job, self.options = job, job.options
        self.rank, self.size = rank, size
        self.store, self.status = store, status
        wanted = "gloo" if self.options.emulate and self.options.backend == "auto" else self.options.backend
        if self.options.green_contexts:
            self.backend, self.device = "gloo", self._one_gpu()
        else:
            self.backend = choose_backend(wanted, size)
            local = int(os.environ.get("LOCAL_RANK", rank))
            self.device = torch.device("cuda", local) if self.backend == "nccl" else torch.device("cpu")
        self.updater: Updater | None = None
        self._green: StreamApi | None = None  # the parts of one GPU, when it is cut

    def run(self) -> list[Outcome]:
        """Run all plans. Outcomes on rank 0, nothing elsewhere."""
        options = self.options
        torch.set_num_threads(options.threads)
        plans = [load_plan(path) for path in self.job.plans]
        self._compare_digests(plans)
        for plan in plans:
            time_unit(plan.instance)
            violations = check_plan(plan)
            if violations:
                raise InputError(f"the plan is not valid: {violations[0]}: solve the instance again")
        # What this process and its like run: with green contexts one of them runs all devices.
        alone = options.green_contexts
        running = [on_one_device(plan) for plan in plans] if alone else plans
        self.whole = plans[0].instance
        instance = running[0].instance
        self.num_devices = instance.num_devices
        if instance.num_devices * options.data_parallel != self.size:
            pipelines = (
                "" if options.data_parallel == 1 else f" for each of {options.data_parallel} pipelines"
            )
            raise InputError(
                f"the plan has {instance.num_devices} devices and {self.size} ranks were started: "
                f"start one rank a device{pipelines}"
            )
        if options.data_parallel > 1 and instance.replicas > 1:
            raise InputError("the plan is bidirectional already: leave data_parallel at 1")
        join(self.store, self.rank, self.size, self.backend, options.timeout, self.device)
        self.replica, self.index = divmod(self.rank, self.num_devices)
        self._make_groups(instance)
        stages = self._stages(instance)
        transport = (
            SlowTransport(self.device, self.pipeline, options.link_delay)
            if options.link_delay
            else Transport(self.device, self.pipeline)
        )
        prepared = [self._prepare(plan, stages, transport) for plan in running]
        # Plans take turns step by step: a machine that slows down does so for all of them.
        for turn in range(options.warmup + options.steps):
            for executor, part in prepared:
                self._measure(executor, part, stages, turn)
        if self.updater is not None:
            self.updater.verify()  # puts the last update right; no step has run on it yet
        if isinstance(stages, RealStages):
            for copies in stages.copies:
                copies.require_equal()
            if options.save is not None:
                self._save(options.save, stages)
        outcomes = []
        for number, (plan, (_, part)) in enumerate(zip(plans, prepared, strict=True)):
            if self.updater is not None:
                part |= {"rollbacks": self.updater.rollbacks, "skipped": self.updater.skipped}
            outcomes += self._gather(number, plan, part, running[number] if alone else None)
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

    def _make_groups(self, instance: Instance) -> None:
        """Ranks of this pipeline (for messages, and for control), and of this device."""
        p, count = self.num_devices, self.options.data_parallel
        self.pipeline = self.siblings = None
        for r in range(count):
            ranks = list(range(r * p, (r + 1) * p))
            group = dist.new_group(ranks) if count > 1 else None
            control = dist.new_group(ranks, backend="gloo")
            if r == self.replica:
                self.pipeline, self.control = group, control
        for d in range(p) if count > 1 else ():
            group = dist.new_group([r * p + d for r in range(count)])
            if d == self.index:
                self.siblings = group
        self._copy_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def _group_of(self, devices: Sequence[int]) -> dist.ProcessGroup | None:
        """The ranks of some devices in all pipelines; None for one rank. Every rank asks alike."""
        p = self.num_devices
        ranks = tuple(sorted(r * p + d for r in range(self.options.data_parallel) for d in devices))
        if ranks not in self._copy_groups:
            self._copy_groups[ranks] = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        return self._copy_groups[ranks]

    def _split(self, model: models.PipelineModel, instance: Instance) -> tuple[int, ...]:
        layers = len(model.layers)
        chosen = self.options.layers_per_stage
        if chosen is None and (instance.model is None or instance.model.factory == self.options.model):
            chosen = models.recorded_split(instance)
        if chosen is None:
            chosen = even_split(layers, instance.chain)
        return models.check_split(chosen, layers, instance.chain)

    def _stages(self, instance: Instance) -> RealStages | EmulatedStages:
        options = self.options
        if options.emulate:
            return EmulatedStages(instance, time_unit(instance), options.payload_mib)
        model = load_model(options.model, options.seed)
        self._layers = self._split(model, instance)
        self._ties = check_model(model, instance, self._layers)
        buffers = shared_buffers(model, self._layers)
        stages = RealStages(
            model,
            instance,
            self.index,
            self._layers,
            options.split,
            options.seed,
            self.device,
            replica=self.replica,
            replicas=options.data_parallel,
            pipeline=self.pipeline,
            siblings=self.siblings,
            autocast=_AUTOCAST[options.precision],
            homes=[stage.device for stage in self.whole.stages] if options.green_contexts else None,
        )
        stages.shared_buffers = buffers
        if options.load is not None:
            checkpoint.load(Path(options.load), stages.stages, self._layers)
        held = Held(instance, self._layers, {s: stage.module for s, stage in stages.stages.items()})
        stages.copies = held.find_copies(self._ties, self._group_of)
        for copies in stages.copies:
            copies.begin_equal()
        # Each pipeline agrees by itself.
        stages.agree(
            dist.PrefixStore(f"pipeline{self.replica}", self.store),  # type: ignore[attr-defined]
            1 + options.warmup + options.steps,
            self.status,
        )
        self.updater = Updater(
            stages.parameters,
            options.optimizer,
            options.learning_rate,
            clip=options.clip,
            float16=options.precision == "float16",
            group=self.control,
            buffers=[b for stage in stages.stages.values() for b in stage.module.buffers()],
            counted=held.counted(self._ties, self.index),
        )
        if options.load is not None and self.updater.optimizer is not None:
            checkpoint.load_optimizer(Path(options.load), stages.stages, self._layers, self.updater.optimizer)
        return stages

    def _save(self, folder: str, stages: RealStages) -> None:
        assert self.updater is not None
        if self.replica == 0:
            checkpoint.save_piece(
                Path(folder),
                self.index,
                stages.stages,
                self._layers,
                self.updater.optimizer,
                aliases(self._ties),
            )
        dist.barrier()
        if self.rank == 0:
            checkpoint.finish(Path(folder), self.num_devices)
        dist.barrier()

    def _prepare(
        self, plan: Plan, stages: RealStages | EmulatedStages, transport: Transport
    ) -> tuple[Executor, dict[str, Any]]:
        """The executor of a plan, after the untimed step whose memory and gradients are looked at."""
        strike = FaultAt(self.options.faults) if self.options.faults else None
        program = plan.programs[self.index]
        lanes = self._lanes(program, stages)
        executor = Executor(plan.instance, program, stages, transport, self.status, strike, lanes=lanes)
        part: dict[str, Any] = {"host": platform.node(), "steps": [], "difference": None, "split": []}
        if isinstance(stages, RealStages):
            assert self.updater is not None
            stages.check_order(program)
            self.updater.clear()
            stages.scale = self.updater.scale.value
            stages.reduces = self._is_update(0)
            with stages.accounting():
                executor.step(0)
            part["held"] = [sorted(stages.memory.after[op].items()) for op in ("F", "B")]
            part["rises"] = {op: sorted(by_stage.items()) for op, by_stage in stages.memory.rises.items()}
            if stages.homes is None:
                part["static"] = stages.static_bytes()
            else:
                part["static_of"] = [stages.static_bytes(home) for home in range(self.whole.num_devices)]
            part["levels"] = stages.memory.levels
            part["highest"] = stages.memory.highest
            part["split"] = [[s, stage.mechanism] for s, stage in stages.stages.items()]
            if self.options.check_gradients:
                with stages.summed():
                    part["difference"] = asdict(self._check(plan, stages))
            self._update(stages, 0)
        return executor, part

    def _lanes(self, program: Program, stages: RealStages | EmulatedStages) -> Lanes | None:
        """The CUDA streams of a program; None where one stream, or none, does."""
        if isinstance(stages, EmulatedStages):
            return None
        pairs = pairs_of(program)
        if self.options.green_contexts:
            tied = [tie.stages for tie in self._ties]
            launches = arrange_devices(self.whole, issued(program, pairs), tied)
            if self._green is None:
                self._green = self._parts(self.whole.num_devices)
            return Lanes(launches, self._green)
        if self.options.async_weights and self.device.type != "cuda":
            raise InputError("async_weights needs a GPU, and this run is on CPU: leave it out")
        # Autograd runs the W's of generic stages on their F's stream.
        deferred = {s for s, stage in stages.stages.items() if stage.mechanism == "deferred"}
        aside = deferred if self.options.async_weights else set()
        if self.device.type != "cuda" or not (pairs or aside):
            return None
        return Lanes(arrange(issued(program, pairs), aside), CudaStreams(self.device))

    def _one_gpu(self) -> torch.device:
        return one_gpu()

    def _parts(self, count: int) -> StreamApi:
        return GreenStreams(self.device, count)

    def _measure(
        self, executor: Executor, part: dict[str, Any], stages: RealStages | EmulatedStages, turn: int
    ) -> None:
        """One timed step and the optimizer's; kept once the warm-up is over."""
        records, loss = self._step(executor, stages, 1 + turn)
        if turn >= self.options.warmup:
            ops = [asdict(record) for record in records]
            part["steps"].append(
                {"zero": executor.clock.zero, "loss": loss, "ops": ops, "resident": _resident_bytes()}
            )

    def _step(
        self, executor: Executor, stages: RealStages | EmulatedStages, number: int
    ) -> tuple[list[OpRecord], float | None]:
        """Run a step, again if the update before it turns out wrong, and update."""
        if isinstance(stages, EmulatedStages):
            return executor.step(number), None
        assert self.updater is not None
        stages.scale = self.updater.scale.value
        stages.reduces = self._is_update(number)
        ahead = self.options.update == "post-validation"
        records = executor.step(number, together=not ahead)
        if ahead and not self.updater.verify():
            stages.scale = self.updater.scale.value
            records = executor.step(number, together=False)
        loss = stages.step_loss()
        self._update(stages, number)
        return records, loss

    def _is_update(self, number: int) -> bool:
        return (number + 1) % self.options.accumulate == 0

    def _update(self, stages: RealStages, number: int) -> None:
        """The optimizer's step, once every ``accumulate`` steps."""
        assert self.updater is not None
        if not self._is_update(number):
            return
        self.status.set("update", number, -1, -1)
        if self.options.update == "post-validation":
            self.updater.step_ahead()
        else:
            self.updater.step_together()

    def _check(self, plan: Plan, stages: RealStages) -> Difference:
        self.status.set("check", 0, -1, -1)
        m, chain = plan.instance.num_microbatches, plan.instance.chain
        copies = range(self.options.data_parallel * plan.instance.replicas)
        orders = {
            stage % chain: [r * m + j for r in copies for j in order]
            for stage, order in weight_orders(plan.programs[self.index]).items()
        }
        model = load_model(self.options.model, self.options.seed)
        if self.options.load is not None:
            checkpoint.load_layers(Path(self.options.load), enumerate(model.layers))
        reference = reference_gradients(
            model,
            self._layers,
            orders,
            seed=self.options.seed,
            step=0,
            count=stages.total_microbatches,
            device=self.device,
            autocast=stages.autocast,
            scale=stages.scale,
        )
        return compare_gradients(stages, {s: reference[s % chain] for s in stages.stages})

    def _gather(self, number: int, plan: Plan, part: dict[str, Any], alone: Plan | None) -> list[Outcome]:
        """The outcome of a plan, on rank 0; ``alone`` is what it was run as where one process ran it all."""
        self.store.set(f"part/{number}/{self.rank}", json.dumps(part))
        if self.rank != 0:
            return []
        parts = [json.loads(self.store.get(f"part/{number}/{r}").decode()) for r in range(self.size)]
        backend = self.backend
        if alone is not None:
            parts, backend = told_apart(parts[0], plan, alone), "none"
        return [merge(plan, self.options, parts, self.device, backend)]


def _resident_bytes() -> int:
    """This process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
