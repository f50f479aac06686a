"""Weights on several ranks at once: one sum of gradients, one value, one copy in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import runtime_cases as cases
import torch
from test_catalogue_runs import plan_of as catalogue_plan
from test_training import alone, losses, plan_of, run

from zbsolve.errors import InputError
from zbsolve.plan.plan import Plan
from zbsolve.runtime.execute.copies import Held, find_ties
from zbsolve.runtime.models.load import load_model
from zbsolve.runtime.models.pipeline_model import StageLayers, stage_ranges
from zbsolve.runtime.ranks.outcome import Outcome
from zbsolve.runtime.training.checkpoint import read

both = pytest.mark.parametrize("split", ["deferred", "generic"])


def require_gradients(outcome: Outcome) -> None:
    """Every gradient is the unpipelined model's."""
    assert outcome.trace.gradients is not None
    assert outcome.trace.gradients.equal, outcome.trace.gradients


def placed(placement: str) -> Plan:
    """Four stages on two devices, W's of even micro-batches last, odd ones fused."""
    given = cases.instance(2, 4, placement)
    return cases.plan(given, cases.all_forward_orders(given))


@both
def test_first_and_last_layer(split: str) -> None:
    """One Linear first and last, on two ranks, W's delayed: gradients and 6 losses are the reference's."""
    outcome = run(plan_of(), "tied_training", split=split, layers_per_stage=(2, 3))
    require_gradients(outcome)
    assert outcome.trace.losses == pytest.approx(alone("tied_training", (2, 3), 4, 6), rel=1e-5)


@both
@pytest.mark.parametrize("placement", ["v", "loop"])
def test_four_weights_over_crossing_pairs_of_stages(split: str, placement: str) -> None:
    """Four stages that share four weights crosswise, V and loop: on one device and on two."""
    # V puts stages 0, 3 and 1, 2 together. a is in 0 and 1, b in 0 and 2, c in 1 and 3, d in 2 and 3: all
    # four cross. A loop puts 0, 2 and 1, 3 together: a and d cross, b and c stay at home.
    model = load_model("runtime_cases:woven", 0)
    plan = placed(placement)
    crossing = [
        t.places[0].label
        for t in find_ties(model, (1,) * 4, plan.instance)
        if len(t.devices(plan.instance)) > 1
    ]
    assert len(crossing) == {"v": 8, "loop": 4}[placement]  # a weight and a bias each
    require_gradients(run(plan, "woven", steps=2, split=split))


def test_four_ranks_that_wait_for_each_other_crosswise() -> None:
    """A stage a rank, sums over (0,1), (0,2), (1,3), (2,3): taken in one order they end, and are right."""
    outcome = run(plan_of(4, 4), "woven", steps=4, update="post-validation", clip=0.05)
    require_gradients(outcome)
    expected = alone("woven", (1, 1, 1, 1), 4, 4, clip=0.05)
    assert outcome.trace.losses == pytest.approx(expected, rel=1e-5)


def test_the_norm_counts_a_tied_weight_once() -> None:
    """Clipped in every step, losses are the unpipelined training's; stepping ahead has the same bits."""
    together = run(plan_of(), "tied_training", steps=8, clip=0.05, layers_per_stage=(2, 3))
    expected = alone("tied_training", (2, 3), 4, 8, clip=0.05)
    assert together.trace.losses == pytest.approx(expected, rel=1e-5)
    ahead = run(
        plan_of(), "tied_training", steps=8, clip=0.05, layers_per_stage=(2, 3), update="post-validation"
    )
    assert losses(ahead) == losses(together)
    assert ahead.rollbacks == 9


@both
def test_data_parallel_pipelines(split: str) -> None:
    """Two pipelines of two ranks: a tied weight has four copies, and one gradient."""
    outcome = run(
        plan_of(2, 2), "tied_training", split=split, data_parallel=2, steps=3, layers_per_stage=(2, 3)
    )
    require_gradients(outcome)


def test_accumulated_steps_with_copies() -> None:
    """Sums over ranks are taken once for two accumulated steps: the losses of one pipeline alone."""
    settings = {"accumulate": 2, "steps": 5, "optimizer": "sgd", "layers_per_stage": (2, 3)}
    one = run(plan_of(2, 4), "tied_training", **settings)
    require_gradients(one)
    two = run(plan_of(2, 2), "tied_training", data_parallel=2, **settings)
    require_gradients(two)
    # Two pipelines' losses are each of half the rows; together they are the whole step's.
    assert two.trace.losses == pytest.approx(one.trace.losses, rel=1e-5)


def test_two_replicas() -> None:
    """DualPipe on two devices: each holds the weight twice, and all four copies have one gradient."""
    outcome = run(catalogue_plan("dualpipe", 2, 4), "tied_training", steps=4, layers_per_stage=(2, 3))
    require_gradients(outcome)
    assert outcome.trace.losses == pytest.approx(alone("tied_training", (2, 3), 4, 4), rel=1e-5)


def test_a_checkpoint_has_one_copy(tmp_path: Path) -> None:
    """A tied weight is written once, read under each name, and training goes on under another split."""
    folder = tmp_path / "saved"
    run(plan_of(), "tied_training", steps=3, layers_per_stage=(2, 3), save=str(folder))
    pieces = [torch.load(path, weights_only=True) for path in sorted(folder.glob("piece*.pt"))]
    assert [sorted(piece["weights"]) for piece in pieces] == [
        ["0.bias", "0.weight"],
        ["2.bias", "2.weight"],
    ]
    assert pieces[1]["ties"] == {"4.weight": "0.weight", "4.bias": "0.bias"}
    weights, state = read(folder)
    assert torch.equal(weights["4.weight"], weights["0.weight"])
    assert state.keys() == weights.keys()
    whole = run(plan_of(), "tied_training", steps=7, layers_per_stage=(2, 3))
    goes_on = run(plan_of(3), "tied_training", steps=2, layers_per_stage=(1, 2, 2), load=str(folder))
    require_gradients(goes_on)
    # A run numbers its steps from 0, and the data are a step's: the loaded run's losses are those of steps 1
    # and 2 on weights that have been through steps 0 to 3 and 0. Its first loss is below the fresh run's.
    assert goes_on.trace.losses[0] is not None
    assert whole.trace.losses[0] is not None
    assert goes_on.trace.losses[0] < whole.trace.losses[0]
    again = run(plan_of(1), "tied_training", steps=2, layers_per_stage=(5,), load=str(folder))
    assert again.trace.losses == pytest.approx(goes_on.trace.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("shared_norm", r"stage 0 changes its buffer .*running_mean, which is layer 2\.norm\.running_mean"),
        ("same_memory", r"layer 2\.weight shares its memory with layer 0\.weight on another device"),
    ],
)
def test_what_cannot_be_shared_is_refused(model: str, words: str) -> None:
    """Running means of two devices, and memory without a common parameter, are refused by name."""
    with pytest.raises(InputError, match=words):
        run(plan_of(), model, steps=1, layers_per_stage=(2, 1))


def test_the_first_holder_alone_counts() -> None:
    """Over all devices every weight is counted in the norm exactly once."""
    model = load_model("runtime_cases:woven", 0)
    instance, split = cases.instance(4, 4), (1,) * 4
    ties = find_ties(model, split, instance)
    counted = []
    for device in range(4):
        modules = {
            s: StageLayers([model.layers[i] for i in stage_ranges(split)[s]])
            for s in instance.stages_on(device)
        }
        counted += [id(p) for p in Held(instance, split, modules).counted(ties, device)]
    assert len(counted) == len(set(counted)) == 8  # four Linears with a bias
