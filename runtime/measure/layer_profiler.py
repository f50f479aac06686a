"""Measuring a model layer by layer on one device: a profile that can be composed into any split.

Each layer is built, fed with what the one before it gave, run through F, B, W and BW a few times, and dropped
before the next: a model whose ``layers`` build lazily (:class:`zbsolve.runtime.models.llama.LazyLayers`) may
be larger than the machine. Times are medians after warm-up; memory is what autograd saved plus what was put
aside, and what an op needs beyond that while it runs, as in the pipeline's own profile. It runs in a process
of its own with the allocator's settings of the runs.

Not measured: contention with other devices of the same host, and what a run of layers shares (a boundary
tensor counts in the layer that receives it).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from zbsolve.errors import EnvironmentFailedError, InputError
from zbsolve.model.instance import ModelFactory
from zbsolve.partition.layers import Layer, LayerProfile
from zbsolve.run_options import LayerOptions
from zbsolve.runtime.backward.refusals import refuse_graph, refuse_unsupported
from zbsolve.runtime.backward.split import SplitStage
from zbsolve.runtime.execute.data import distinct_shapes, move, step_data
from zbsolve.runtime.execute.transients import measure_rise, watch_of
from zbsolve.runtime.measure.profiler import peaks
from zbsolve.runtime.models.load import load_model
from zbsolve.runtime.models.pipeline_model import MicroBatch, PipelineModel, StageLayers
from zbsolve.runtime.ranks.launch import MALLOC
from zbsolve.runtime.values import Spec, flatten, unflatten

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIB = 2.0**20
# A refusal of the model, told apart from a crash.
_REFUSED = 2


def profile_layers(options: LayerOptions, progress: Callable[[str], None] | None = None) -> LayerProfile:
    """Measure every layer of a model, one at a time, in a process of its own.

    Returns
    -------
    LayerProfile
        Times in ms, memory in MiB, in the model's order.

    Raises
    ------
    InputError
        The model cannot be profiled (its own words).
    EnvironmentFailedError
        The process died or took longer than the timeout.
    """
    for field in ("num_microbatches", "repeats"):
        if getattr(options, field) < 1:
            raise InputError(f"{field} is {getattr(options, field)}: give at least 1")
    with tempfile.TemporaryDirectory(prefix="zbsolve-layers-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(options.to_json()), encoding="utf-8")
        environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": str(options.threads)}
        environment["PYTHONPATH"] = os.pathsep.join([entry for entry in sys.path if entry] + [os.getcwd()])
        command = [sys.executable, "-m", "zbsolve.runtime.measure.layer_profiler", str(folder)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                _watch(process, folder, options.timeout, progress)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
        log_text = (folder / "log").read_text(encoding="utf-8", errors="replace")
        if process.returncode == _REFUSED:
            raise InputError((folder / "refusal").read_text(encoding="utf-8"))
        if process.returncode:
            last = log_text.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
            raise EnvironmentFailedError(f"profiling layers of {options.model} failed: {last[0]}")
        return LayerProfile.model_validate_json((folder / "profile.json").read_text(encoding="utf-8"))


def _watch(
    process: subprocess.Popen[bytes], folder: Path, timeout: float, progress: Callable[[str], None] | None
) -> None:
    """Wait for the end; every finished layer pushes the deadline on."""
    seen, deadline = "", time.monotonic() + timeout
    while process.poll() is None:
        time.sleep(0.05)
        place = folder / "place"
        text = place.read_text(encoding="utf-8") if place.exists() else ""
        if text != seen:
            seen, deadline = text, time.monotonic() + timeout
            if progress is not None:
                progress(text)
        if time.monotonic() > deadline:
            raise EnvironmentFailedError(
                f"profiling layers: {seen or 'the start'} took more than {timeout:g} s: raise --timeout"
            )


# --- in the process --------------------------------------------------------------------------------


def measure_layers(options: LayerOptions, note: Callable[[str], None]) -> LayerProfile:
    """Measure here and now, on the first GPU where there is one."""
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(options.model, options.seed)
    batch = step_data(model, 0, options.num_microbatches, options.seed)[0]
    unlike = distinct_shapes(model, range(1), options.num_microbatches, options.seed) > 1
    of_what = ", on the first of micro-batches of unlike shapes" if unlike else ""
    inputs, spec = flatten(batch.inputs, "microbatches(): inputs")
    inputs = [t.to(device) for t in inputs]
    rows = int(inputs[0].shape[0]) if inputs and inputs[0].dim() else 1
    needs = (False,) * len(inputs)
    layers = []
    count = len(model.layers)
    for index in range(count):
        note(f"layer {index} of {count}{of_what}")
        layer, inputs, needs, spec = _measure_layer(model, index, batch, inputs, needs, spec, options, device)
        layers.append(layer)
    return LayerProfile(
        name=options.model,
        microbatch_size=max(1, rows),
        model=ModelFactory(factory=options.model, split=options.split),
        layers=tuple(layers),
    )


def _measure_layer(
    model: PipelineModel,
    index: int,
    batch: MicroBatch,
    inputs: list[torch.Tensor],
    needs: tuple[bool, ...],
    spec: Spec,
    options: LayerOptions,
    device: torch.device,
) -> tuple[Layer, list[torch.Tensor], tuple[bool, ...], Spec]:
    module = model.layers[index]
    refuse_unsupported(module, f"layer {index}")
    stage = SplitStage(StageLayers([module]).to(device).train(), index, options.split)
    last = index == len(model.layers) - 1
    targets = move(batch.targets, device) if last else None

    def finish(value: Any) -> torch.Tensor:
        return model.loss(value, targets)

    def forward(fused: bool) -> tuple[list[torch.Tensor], Spec]:
        return stage.forward(0, options.seed, inputs, needs, spec, finish if last else None, fused=fused)

    with torch.enable_grad():
        leaves = [
            t.detach().requires_grad_(n) if n else t.detach() for t, n in zip(inputs, needs, strict=True)
        ]
        out_needs = _output_needs(stage, leaves, spec, finish if last else None, index)
    samples: dict[str, list[float]] = {"F": [], "B": [], "W": [], "BW": []}
    for turn in range(options.warmup + options.repeats):
        for fused in (False, True):
            spent, outputs, out_spec = _turn(stage, forward, out_needs, fused, device)
            if turn >= options.warmup:
                for op, milliseconds in spent.items():
                    samples[op].append(milliseconds)
    mem_b, mem_w, beyond = _held(stage, forward, inputs, out_needs, device)
    times = {op: round(median(values), 6) for op, values in samples.items()}
    every = {id(p): p for p in stage.module.parameters()}.values()
    static = sum(p.nbytes * (4 if p.requires_grad else 1) for p in every)
    layer = Layer(
        name=type(module).__name__,
        t_f=times["F"],
        t_b=times["B"],
        t_w=times["W"],
        t_bw=times["BW"],
        mem_b=round(mem_b / MIB, 6),
        mem_w=round(mem_w / MIB, 6),
        peak_f=round(beyond.get("F", 0) / MIB, 6),
        peak_b=round(max(beyond.get("B", 0), beyond.get("BW", 0)) / MIB, 6),  # a layer has one for both
        peak_w=round(beyond.get("W", 0) / MIB, 6),
        static_mem=round(static / MIB, 6),
        mem_out=0.0 if last else round(sum(t.nbytes for t in outputs) / MIB, 6),
    )
    return layer, outputs, out_needs, out_spec


def _output_needs(
    stage: SplitStage,
    leaves: list[torch.Tensor],
    spec: Spec,
    finish: Callable[[Any], torch.Tensor] | None,
    index: int,
) -> tuple[bool, ...]:
    """Which outputs get a gradient; refuses what the runs would refuse."""
    value = stage.module(unflatten(leaves, spec))
    outputs, _ = flatten(value if finish is None else finish(value), f"the output of layer {index}")
    refuse_graph(outputs, f"layer {index}")
    return tuple(t.requires_grad for t in outputs)


def _turn(
    stage: SplitStage,
    forward: Callable[[bool], tuple[list[torch.Tensor], Spec]],
    needs: tuple[bool, ...],
    fused: bool,
    device: torch.device,
) -> tuple[dict[str, float], list[torch.Tensor], Spec]:
    """F and the backward of one micro-batch; milliseconds of each op, and what F gave."""
    began = _now(device)
    outputs, spec = forward(fused)
    spent = {"F": _now(device) - began}
    gradients = [torch.ones_like(t) if need else None for t, need in zip(outputs, needs, strict=True)]
    began = _now(device)
    if fused:
        stage.backward_fused(0, gradients)
        spent["BW"] = _now(device) - began
    else:
        stage.backward_input(0, gradients)
        halfway = _now(device)
        stage.backward_weight(0)
        spent["B"], spent["W"] = halfway - began, _now(device) - halfway
    return spent, outputs, spec


def _now(device: torch.device) -> float:
    """Milliseconds, once all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3


def _held(
    stage: SplitStage,
    forward: Callable[[bool], tuple[list[torch.Tensor], Spec]],
    inputs: list[torch.Tensor],
    needs: tuple[bool, ...],
    device: torch.device,
) -> tuple[int, int, dict[str, int]]:
    """Bytes held after F and after B, and what each op needs beyond those."""
    watch = watch_of(device)
    rises: dict[str, int] = {}

    def run(op: str, received: list[torch.Tensor], call: Callable[[], T]) -> T:
        result, rise = measure_rise(stage, 0, received, watch, call)
        rises[op] = max(rise, rises.get(op, 0))
        return result

    def ones(outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return [torch.ones_like(t) if need else None for t, need in zip(outputs, needs, strict=True)]

    def back(op: str, gradients: list[torch.Tensor | None]) -> None:
        call = stage.backward_fused if op == "BW" else stage.backward_input
        run(op, [g for g in gradients if g is not None], lambda: call(0, gradients))

    stage.accounting = True
    back("BW", ones(run("F", inputs, lambda: forward(True))[0]))
    outputs, _ = run("F", inputs, lambda: forward(False))
    after_f = stage.held_bytes(0)
    back("B", ones(outputs))
    after_b = stage.held_bytes(0)
    run("W", [], lambda: stage.backward_weight(0))
    stage.accounting = False
    return after_f, after_b, peaks(after_f, after_b, rises)


def main(folder: Path) -> int:
    """Process entry: job.json in, profile.json or refusal out."""
    data = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    options = LayerOptions.from_json(data)

    def note(text: str) -> None:
        (folder / "place").write_text(text, encoding="utf-8")

    try:
        profile = measure_layers(options, note)
    except InputError as error:
        (folder / "refusal").write_text(str(error), encoding="utf-8")
        return _REFUSED
    text = profile.model_dump_json(by_alias=True, exclude_none=True)
    (folder / "profile.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
