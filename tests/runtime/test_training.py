"""Many steps: the loss curve is the unpipelined model's, whichever way the optimizer's step is agreed on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import runtime_cases as cases
import torch

from zbsolve.errors import InputError
from zbsolve.plan.plan import Plan
from zbsolve.runtime.api import RunOptions, train
from zbsolve.runtime.models.load import load_model
from zbsolve.runtime.models.pipeline_model import StageLayers, stage_ranges
from zbsolve.runtime.randomness import set_seed, step_seed
from zbsolve.runtime.ranks.outcome import Outcome
from zbsolve.runtime.training.checkpoint import read


def plan_of(p: int = 2, m: int = 4) -> Plan:
    """A stage a device, W's delayed on later ones."""
    return cases.plan(cases.instance(p, m), cases.zb_orders(p, m))


def run(plan: Plan, model: str, **options: object) -> Outcome:
    """Train a model of :mod:`runtime_cases`."""
    settings = {"steps": 6, "warmup": 0, "timeout": 30.0, "optimizer": "adam", "learning_rate": 0.05}
    return train(plan, RunOptions(model=f"runtime_cases:{model}", **settings | options))  # type: ignore[arg-type]


def alone(
    model: str, split: tuple[int, ...], m: int, steps: int, *, lr: float = 0.05, clip: float | None = None
) -> list[float]:
    """The losses of the same training without any pipeline; step 0 is not among them, as in a run."""
    built = load_model(f"runtime_cases:{model}", 0)
    stages = [StageLayers([built.layers[i] for i in held]).train() for held in stage_ranges(split)]
    parameters = list(dict.fromkeys(p for stage in stages for p in stage.parameters()))
    optimizer = torch.optim.Adam(parameters, lr=lr)
    losses = []
    for step in range(steps + 1):
        optimizer.zero_grad()
        total = 0.0
        for j, batch in enumerate(built.microbatches(step, m)):
            value = batch.inputs
            for s, stage in enumerate(stages):
                set_seed(step_seed(0, step, s, j), torch.device("cpu"))
                value = stage(value)
            loss = built.loss(value, batch.targets) * batch.weight
            loss.backward()
            total += float(loss.detach())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        if all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None):
            optimizer.step()
        losses.append(total)
    return losses[1:]


def losses(outcome: Outcome) -> list[float | None]:
    """Of the measured steps."""
    return list(outcome.trace.losses)


def compare_curves(steps: int, update: str) -> None:
    """Losses equal the unpipelined training's to 1e-5, one bad step included; memory stays flat."""
    outcome = run(plan_of(2, 2), "nan_in_last_stage", steps=steps, learning_rate=0.003, update=update)
    expected = alone("nan_in_last_stage", (1, 1), 2, steps, lr=0.003)
    assert outcome.trace.losses == pytest.approx(expected, rel=1e-5)
    assert outcome.skipped == 1
    assert outcome.rollbacks == (1 if update == "post-validation" else 0)
    # Pools fill in the first steps; a leak of one micro-batch's activations a step would be far more.
    assert outcome.resident[-1] - outcome.resident[steps // 4] < 2 * 2**20


@pytest.mark.parametrize("split", ["deferred", "generic"])
def test_memory_is_flat_with_large_activations(split: str) -> None:
    """Messages of 1 MiB, six micro-batches a step: five more steps hold hardly more than the ones before."""
    outcome = run(plan_of(2, 6), "wide", steps=10, optimizer="none", split=split, check_gradients=False)
    # A stage that kept one tensor of every micro-batch would add 6 MiB a step, 30 in all; the allocator
    # settles for some steps.
    assert outcome.resident[-1] - outcome.resident[4] < 15 * 2**20


def test_fifty_steps() -> None:
    """50 steps with post-validation, one of them taken back: the unpipelined loss curve, flat memory."""
    compare_curves(50, "post-validation")


@pytest.mark.slow
@pytest.mark.parametrize("update", ["barrier", "post-validation"])
def test_two_hundred_steps(update: str) -> None:
    """200 steps, in both ways of agreeing on the update."""
    compare_curves(200, update)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_post_validation_equals_the_barrier(clip: float | None) -> None:
    """Stepping ahead gives the barrier's losses to the last bit, with nothing to roll back, and with all."""
    together = run(plan_of(), "trainable", clip=clip, steps=12)
    ahead = run(plan_of(), "trainable", clip=clip, steps=12, update="post-validation")
    assert losses(ahead) == losses(together)
    assert together.rollbacks == 0
    # The norm is above 0.05 in every step here: each of 13 updates is put right. Unclipped: none.
    assert ahead.rollbacks == (0 if clip is None else 13)
    assert together.trace.losses == pytest.approx(alone("trainable", (2, 1), 4, 12, clip=clip), rel=1e-5)


@pytest.mark.parametrize("update", ["barrier", "post-validation"])
def test_nan_in_one_stage(update: str) -> None:
    """A NaN that only the last stage's gradients have: all ranks skip that step, one rollback, same curve."""
    outcome = run(plan_of(), "nan_in_last_stage", update=update, optimizer="sgd", steps=6)
    assert outcome.skipped == 1
    # Steps 1..6 are measured; step 3's update is skipped, so step 4 runs on step 3's weights, and all
    # losses but the marked step's are small.
    assert all(loss is not None and math.isfinite(loss) for loss in outcome.trace.losses)
    assert outcome.rollbacks == (1 if update == "post-validation" else 0)


def test_nan_steps_agree_in_both_ways() -> None:
    """Poisoned steps are skipped in both ways alike: the losses agree to the last bit."""
    together = run(plan_of(), "poisoned", steps=6)
    ahead = run(plan_of(), "poisoned", steps=6, update="post-validation")
    assert losses(together) == losses(ahead)
    assert together.skipped == ahead.skipped == 2
    assert [loss is None for loss in losses(together)] == [True, False, False, True, False, False]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("split", ["deferred", "generic"])
def test_lower_precision(precision: str, split: str) -> None:
    """Under autocast, and with a scaled loss for float16, gradients are the reference's and steps happen."""
    outcome = run(plan_of(), "trainable", precision=precision, split=split, steps=3)
    assert outcome.trace.gradients is not None
    assert outcome.trace.gradients.bit_equal, outcome.trace.gradients
    # The scale is taken out of the reported loss: a mean square of normal numbers, not 2^16 of it.
    assert all(loss is not None and 0.1 < loss < 10 for loss in outcome.trace.losses)
    assert outcome.skipped == 0


def test_accumulated_steps() -> None:
    """Two steps' gradients are summed before the optimizer steps: two steps of loss on the same weights."""
    outcome = run(plan_of(3, 3), "SevenRows3", optimizer="sgd", learning_rate=0.01, accumulate=2, steps=3)
    # loss = 13 w^2, dw = 26 w a step: 26 after step 0, 52 after step 1; then w = 1 - 0.52 = 0.48.
    assert outcome.trace.losses[0] == pytest.approx(13.0)
    assert outcome.trace.losses[1] == pytest.approx(13 * 0.48**2)
    assert outcome.trace.losses[2] == pytest.approx(13 * 0.48**2)


@pytest.mark.parametrize("update", ["barrier", "post-validation"])
def test_data_parallel_pipelines(update: str) -> None:
    """Two pipelines of two ranks share a step's rows: gradients equal the whole model's on all of them."""
    outcome = run(plan_of(2, 2), "trainable", data_parallel=2, steps=3, update=update)
    assert outcome.trace.gradients is not None
    assert outcome.trace.gradients.equal, outcome.trace.gradients
    # Rank 0's pipeline reports the loss of its own half; the weights follow all rows.
    whole = run(plan_of(2, 4), "trainable", steps=3, save=None)
    assert len(outcome.trace.losses) == len(whole.trace.losses)


def test_checkpoint_under_another_split(tmp_path: Path) -> None:
    """Saved from 2 devices, loaded on 3 and on 1: training goes on as if nothing had happened."""
    folder = tmp_path / "saved"
    run(plan_of(), "residual", steps=3, layers_per_stage=(3, 1), save=str(folder))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [entry["stage"] for piece in manifest["pieces"] for entry in piece["layers"]] == [0, 0, 0, 1]
    weights, state = read(folder)
    assert len({name.split(".")[0] for name in weights}) == 4
    assert state.keys() == set(weights)
    goes_on = [
        run(plan_of(p), "residual", steps=2, layers_per_stage=split, load=str(folder))
        for p, split in ((2, (3, 1)), (3, (1, 2, 1)))
    ]
    # Dropout depends on the stage's number, so only the first losses' closeness to the saved state is
    # comparable: without dropout in between they would be equal. Compare weights instead.
    assert all(outcome.trace.gradients is not None and outcome.trace.gradients.equal for outcome in goes_on)
    again = tmp_path / "again"
    run(
        plan_of(3),
        "residual",
        steps=1,
        layers_per_stage=(1, 2, 1),
        load=str(folder),
        save=str(again),
        optimizer="none",
    )
    for name, tensor in read(again)[0].items():
        assert torch.equal(tensor, weights[name]), name


def test_a_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    """A folder without a manifest, and a piece cut short, are refused in one line."""
    with pytest.raises(InputError, match="holds no checkpoint"):
        run(plan_of(), "residual", load=str(tmp_path))
    folder = tmp_path / "saved"
    run(plan_of(), "residual", steps=1, save=str(folder))
    piece = next(folder.glob("piece0-*.pt"))
    piece.write_bytes(piece.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be read"):
        run(plan_of(), "residual", steps=1, load=str(folder))
