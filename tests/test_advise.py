"""The advice: recommendations worked by hand, reasons with their figures, and what changes the answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zbsolve.advise import Advice, advise, percent
from zbsolve.cli import app
from zbsolve.cluster import Cluster, DeviceGroup, Link, equal_cluster
from zbsolve.errors import InfeasibleError
from zbsolve.partition.layers import Layer, LayerProfile
from zbsolve.plan import check_plan, load_plan
from zbsolve.sweep.grid import Inputs


def equal_layers(count: int, **changes: float) -> LayerProfile:
    """Equal layers: F = B = W = 1, activations 1, static 4, gradients half a unit."""
    layer = Layer(t_f=1, t_b=1, t_w=1, t_bw=2, mem_b=1, mem_w=1, static_mem=4, mem_out=1)
    return LayerProfile(layers=(layer.model_copy(update=changes),) * count)


def reason(advice: Advice, rule: str) -> str:
    """The figures of the reason whose rule contains a text."""
    (found,) = [r for r in advice.reasons if rule in r.rule]
    return found.figures


def test_no_pipeline_where_the_model_fits_without() -> None:
    """8 layers on 2 large devices without link costs: 2 replicas of 8 micro-batches, 8 * 24 = 192."""
    advice = advise(Inputs((equal_layers(8),), equal_cluster(2)), 16)
    assert (advice.best.config.p, advice.best.config.d, advice.best.config.m) == (1, 2, 8)
    assert advice.best.outcome.step == pytest.approx(192)
    # A V over all 16, one layer in the first chunk: its F of 1, then 16 * 12 on the second device: 193.
    assert advice.next_best is not None
    assert advice.next_best.outcome.step == pytest.approx(193)


def test_a_pipeline_where_it_does_not_fit() -> None:
    """8 layers need 40, a device has 30: p = 2, and the reason names both figures."""
    advice = advise(Inputs((equal_layers(8),), equal_cluster(2, memory=30.0)), 16)
    assert (advice.best.config.p, advice.best.config.d) == (2, 1)
    assert "takes about 40 MiB, a device has 30" in reason(advice, "no pipeline")
    assert "(p-1)/m = 6.2%" in reason(advice, "m = B")
    assert "W is 50% of the backward" in reason(advice, "B and W apart")


def test_slow_links_make_an_all_reduce_dearer_than_a_pipeline() -> None:
    """Gradients of 4 over bandwidth 0.05 take 80 each of 2 turns; a boundary's 1 takes 20."""
    cluster = Cluster(devices=(DeviceGroup(count=2),), same_node=Link(bandwidth=0.05))
    fast = Cluster(devices=(DeviceGroup(count=2),), same_node=Link(bandwidth=50.0))
    layers = equal_layers(8, mem_out=0.1)
    # All-reduce: 8 * 4 / 8 = 4 of gradients, two turns of half: 4 / 0.05 = 80 on top of 4 * 24. A pipeline
    # of 2 with m = 8: 8 * 12 and a few hops of 2.
    slow = advise(Inputs((layers,), cluster), 8)
    assert (slow.best.config.p, slow.best.config.d) == (2, 1)
    quick = advise(Inputs((layers,), fast), 8)
    assert (quick.best.config.p, quick.best.config.d) == (1, 2)
    changed = [c for c in quick.changes if c.circumstance.startswith("links") and c.then is not None]
    assert changed
    assert changed[0].then is not None
    assert changed[0].then.config.p == 2


def test_recomputation_where_nothing_fits_without() -> None:
    """4 layers of 4 on 2 devices of 7: two on each hold 8, unless one of them is made anew."""
    layers = equal_layers(4, mem_b=4, mem_w=1, mem_out=0.5, static_mem=0)
    # In one stage both are made anew together, 8 again. In a V one chunk keeps 0.5 while the other has its 4
    # and a W of 1 pending; with 4 even that does not fit.
    advice = advise(Inputs((layers,), equal_cluster(2, memory=7.0)), 4)
    assert (advice.best.config.placement, advice.best.config.recompute) == ("v", True)
    assert advice.best.outcome.peak_memory <= 7
    with pytest.raises(InfeasibleError, match="not even when every activation"):
        advise(Inputs((layers,), equal_cluster(2, memory=4.0)), 4)


def test_percent_has_no_minus_zero() -> None:
    """Rounding to zero shows no sign."""
    assert [percent(x) for x in (-0.0001, 0.0, 0.123, -0.02)] == ["0.0%", "0.0%", "12.3%", "-2.0%"]


def test_command_writes_the_plan_and_prints_reasons(tmp_path: Path) -> None:
    """The recommendation, its reasons and a valid plan; and the same as JSON."""
    plan = tmp_path / "p.json"
    arguments = ["advise", "model-small-1b", "--cluster", "cluster-4-workstation", "--batch", "8"]
    arguments += ["--placement", "linear"]
    result = CliRunner().invoke(app, [*arguments, "--plan", str(plan), "--time-limit", "2"])
    assert result.exit_code == 0, result.output
    for text in ("recommended", "next best", "what would change it", "no pipeline where"):
        assert text in result.stdout
    assert not check_plan(load_plan(plan))
    printed = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert printed["schema"] == "zbsolve.advice/1"
    assert printed["best"]["p"] * printed["best"]["d"] == 4
