"""What users' layers do: exact after two steps, or refused in one line before the first.

Weights, buffers and losses are compared with those of the unpipelined model, run micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import runtime_cases as cases
import torch

from zbsolve.errors import EnvironmentFailedError, InputError
from zbsolve.model.graph import Task
from zbsolve.model.kinds import BW, B, W
from zbsolve.plan.plan import Plan
from zbsolve.runtime.api import ProfileOptions, RunOptions, profile_model, train
from zbsolve.runtime.models.load import load_model
from zbsolve.runtime.models.pipeline_model import stage_ranges
from zbsolve.runtime.randomness import data_seed, set_seed, step_seed
from zbsolve.runtime.training.checkpoint import read
from zbsolve.runtime.training.gradients import weight_orders

RATE = 0.1
CPU = torch.device("cpu")

EXACT = (
    "custom_once",
    "gradient_hooks",
    "inplace_start",
    "inplace_everywhere",
    "relu_inplace_start",
    "batch_norm",
    "number_among_targets",
    "named_tuples",
    "ordered_dicts",
    "dataclasses",
    "model_outputs",
    "layer_drop",
    "layer_drop_by_others",
    "work_buffer",
    "odd_outputs",
    "integer_inputs",
    "unlike_shapes",
    "random_data",
    "replaced_forward",
)
# A transposed output arrives in plain order, and a sum over a transposed tensor is taken in another one.
STRIDED = {"odd_outputs": 1e-6}
REFUSED = {
    "batch_norm_under_checkpoint": r"changes its buffer .*running_mean .*once more in its backward.*: leave",
    "unknown_dataclasses": r"stage 0 .*is a Unregistered: .*torch\.export\.register_dataclass",
    "restless_data": r"microbatches\(0, \.\.\.\) returned other data .*: make them a function of the step",
    "aliased_outputs": r"changes tensor 0 of its input in place, .*: clone it first",
    "changing_weights": r"changes its parameter layers\.0\.up\.weight in its forward.*: change it between",
    "compiled_in_place": r"is compiled: use it without torch\.compile",
    "saved_work_buffer": r"was changed in place since its F .*: give each call its own",
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the ranks have it: a sum's order depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plan_of(p: int, placement: str, fused: bool) -> Plan:
    """Split backwards with W's delayed, or fused ones; a V mixes both in any case."""
    given = cases.instance(p, 4, placement)
    orders = cases.zb_orders(p, 4) if placement == "linear" else cases.all_forward_orders(given)
    if fused:
        orders = [
            [
                Task(BW if task.kind is B else task.kind, task.stage, task.microbatch)
                for task in order
                if task.kind is not W
            ]
            for order in orders
        ]
    return cases.plan(given, orders)


def alone(name: str, plan: Plan, split: tuple[int, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of the second step, and weights and buffers after it, without any pipeline."""
    model = load_model(name, 0)
    layers = [layer.train() for layer in model.layers]
    orders = {s: o for program in plan.programs for s, o in weight_orders(program).items()}
    total = 0.0
    for step in range(2):
        set_seed(data_seed(0, step), CPU, host=True)
        batches = model.microbatches(step, plan.instance.num_microbatches)
        parameters = {
            p: s for s, held in enumerate(stage_ranges(split)) for i in held for p in layers[i].parameters()
        }
        gradients = []
        total = 0.0
        for j, batch in enumerate(batches):
            value = batch.inputs
            for s, held in enumerate(stage_ranges(split)):
                set_seed(step_seed(0, step, s, j), CPU, host=True)
                for i in held:
                    value = layers[i](value)
            loss = model.loss(value, batch.targets) * batch.weight
            total += float(loss.detach())
            found = [None] * len(parameters)
            if loss.requires_grad:
                found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
            gradients.append(dict(zip(parameters, found, strict=True)))
        with torch.no_grad():
            for parameter, s in parameters.items():
                terms = [g for j in orders[s] if (g := gradients[j][parameter]) is not None]
                if terms:
                    parameter.sub_(sum(terms[1:], terms[0]), alpha=RATE)
    return total, {
        f"{i}.{n}": t.detach() for i, layer in enumerate(layers) for n, t in layer.state_dict().items()
    }


def require_exact(name: str, plan: Plan, mechanism: str, folder: Path) -> None:
    """Two steps of SGD in a pipeline: the unpipelined loss, weights and buffers to the last bit."""
    stages = plan.instance.num_stages
    split = (4 // stages,) * stages
    options = RunOptions(
        model=f"trap_models:{name}",
        steps=1,  # after the untimed one
        warmup=0,
        timeout=60.0,
        optimizer="sgd",
        learning_rate=RATE,
        split=mechanism,  # type: ignore[arg-type]
        layers_per_stage=split,
        save=str(folder / "saved"),
    )
    outcome = train(plan, options)
    got, _ = read(folder / "saved")
    loss, expected = alone(options.model, plan, split)
    assert got.keys() == expected.keys()
    tolerance = STRIDED.get(name, 0.0)
    for label, wanted in expected.items():
        torch.testing.assert_close(got[label], wanted, rtol=tolerance, atol=tolerance, msg=label)
    # The ranks' sum of losses is in float64, of the same float32 terms.
    assert outcome.trace.losses[0] == pytest.approx(loss, rel=max(tolerance, 1e-12))
    assert outcome.trace.gradients is not None
    assert outcome.trace.gradients.equal
    assert tolerance or outcome.trace.gradients.bit_equal, outcome.trace.gradients


# Two layers a stage, split generically; a V whose stages mix B, W and BW, deferred.
@pytest.mark.parametrize(("placement", "mechanism"), [("linear", "generic"), ("v", "deferred")])
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, placement: str, mechanism: str, tmp_path: Path) -> None:
    """Every model of :mod:`trap_models` that can be right is, to the last bit."""
    require_exact(name, plan_of(2, placement, False), mechanism, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "fused"), [("deferred", False), ("generic", False), ("deferred", True)]
)
@pytest.mark.parametrize(("p", "placement"), [(2, "linear"), (4, "linear"), (2, "v")])
@pytest.mark.parametrize("name", EXACT)
def test_exact_every_way(
    name: str, p: int, placement: str, mechanism: str, fused: bool, tmp_path: Path
) -> None:
    """The same in every way to split, on one to two layers a stage, linear and V."""
    require_exact(name, plan_of(p, placement, fused), mechanism, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    """What cannot be right in a pipeline is refused in one line that says what to do."""
    with pytest.raises((InputError, EnvironmentFailedError), match=REFUSED[name]) as caught:
        require_exact(name, plan_of(2, "v", False), "deferred", tmp_path)
    assert "\n" not in str(caught.value)


def test_forwards_out_of_order_are_refused(tmp_path: Path) -> None:
    """Running statistics follow the order of F's: a plan that turns it is refused on a norm's stage."""
    given = cases.instance(1, 2)
    order = [cases.Task(kind, 0, j) for j in (1, 0) for kind in (cases.F, cases.B, cases.W)]
    with pytest.raises(InputError, match=r"running_mean .*F's in the order \[1, 0\]: use a plan that takes"):
        require_exact("batch_norm", cases.plan(given, [order]), "deferred", tmp_path)


def test_running_statistics_of_several_pipelines_are_refused() -> None:
    """Each of two pipelines would have its own."""
    options = RunOptions(model="trap_models:batch_norm", data_parallel=2, timeout=60.0)
    with pytest.raises(InputError, match="each of the pipelines side by side would have its own"):
        train(cases.plan(cases.instance(1, 2), cases.zb_orders(1, 2)), options)


def test_unlike_micro_batches_are_profiled() -> None:
    """The profile of micro-batches of three lengths says in one line what its one time a stage stands for."""
    said: list[str] = []
    options = ProfileOptions(
        model="trap_models:unlike_shapes", num_microbatches=3, repeats=1, warmup=0, timeout=60.0
    )
    instance = profile_model(options, said.append)
    assert all(stage.t_f > 0 for stage in instance.stages)
    unlike = [text for text in said if "unlike shapes" in text]
    assert len(unlike) == 1
    assert "one time a stage, the mean" in unlike[0]
