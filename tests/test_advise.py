"""The advice: recommendations worked by hand, reasons with their figures, and what changes the answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zbsolve.cli import app
from zbsolve.errors import InfeasibleError
from zbsolve.partition.cluster import Cluster, DeviceGroup, Link, equal_cluster
from zbsolve.partition.layers import Layer, LayerProfile
from zbsolve.plan.check import check_plan
from zbsolve.plan.plan import load_plan
from zbsolve.report.advice_text import candidate_table, summary_lines
from zbsolve.sweep.advise import Advice, advise
from zbsolve.sweep.grid import Config, Inputs, Outcome
from zbsolve.sweep.ways import Candidate
from zbsolve.words import percent


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
    assert "(p-1)/m = 6.25%" in reason(advice, "m = B")
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
    """4 layers of 4 on 2 devices of 7: two on each hold 8, unless they are made anew one by one."""
    layers = equal_layers(4, mem_b=4, mem_w=1, mem_out=0.5, static_mem=0)
    # One layer's 4 beside the other's input of 0.5 and its W of 1; with 4 even that does not fit.
    advice = advise(Inputs((layers,), equal_cluster(2, memory=7.0)), 4)
    assert advice.best.config.recompute
    assert advice.best.outcome.peak_memory <= 7
    with pytest.raises(InfeasibleError, match="not even when every activation"):
        advise(Inputs((layers,), equal_cluster(2, memory=4.0)), 4)


def test_percent_is_zero_only_where_it_is() -> None:
    """Two decimals, more where those would be a zero; what float64 leaves of zero has no sign."""
    shown = {0.0: "0.00%", -1e-16: "0.00%", 0.123: "12.30%", -0.02: "-2.00%", 3e-4: "0.03%"}
    shown |= {3e-5: "0.003%", -4.9e-5: "-0.005%", 5e-5: "0.01%", 2e-7: "0.00002%"}
    assert {share: percent(share) for share in shown} == shown


def test_the_summary_and_the_table_give_one_gap(tmp_path: Path) -> None:
    """A step of 10000 over a bound of 9997 is 0.03 % in both; over its own bound it is the best."""
    config = Config(1, 2, "linear", 1, 8, 1.0, "solved")
    outcome = Outcome("ok", step=10_000.0, per_sample=625.0, lower_bound=9_997.0, layers_per_stage=(8,))
    found = Candidate(config, outcome)
    advice = Advice(found, None, (), (), (found,))
    assert "proven within 0.03% of the best for these choices" in summary_lines(advice, "ms", "MiB")[1]
    [gap] = list(candidate_table(advice, "ms", "MiB").columns[9].cells)
    assert gap == "0.03%"
    proven = Advice(Candidate(config, replace(outcome, lower_bound=10_000.0)), None, (), (), ())
    assert "proven the best for these choices" in summary_lines(proven, "ms", "MiB")[1]


def test_a_batch_that_cannot_be_dealt_out_says_so() -> None:
    """3 samples in micro-batches of 2 over 1, 2 or 4 replicas: a multiple of 2, 4 or 8 is wanted."""
    command = ["advise", "model-small-1b", "--cluster", "cluster-4-workstation", "--batch", "3", "-b", "2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert result.stderr == (
        "zbsolve: no configuration is left: a batch of 3 is no multiple of micro-batch size x replicas "
        "(2, 4, 8): change the batch, or the micro-batch size (-b)\n"
    )


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
