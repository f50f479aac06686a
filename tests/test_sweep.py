"""The sweep: its grid, its costs, its store under kill -9, and where it can run."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zbsolve.cli import app
from zbsolve.errors import EnvironmentFailedError, InputError
from zbsolve.partition.cluster import Cluster, DeviceGroup, Link, equal_cluster, load_cluster
from zbsolve.partition.layers import Layer, LayerProfile, load_layers
from zbsolve.sweep.grid import Config, Grid, Inputs, Outcome, all_reduce, evaluate
from zbsolve.sweep.pareto import num_devices, pareto_front, peak_memory, time_per_sample
from zbsolve.sweep.run import run_sweep
from zbsolve.sweep.store import Store

ROOT = Path(__file__).resolve().parent.parent
LAYER = Layer(t_f=1, t_b=1, t_w=1, mem_b=1, mem_w=1, static_mem=8)


def profile(layers: int = 8, **changes: int) -> LayerProfile:
    """Equal layers of ones, static memory 8 each."""
    return LayerProfile(layers=(LAYER,) * layers, **changes)  # type: ignore[arg-type]


def config(**changes: object) -> Config:
    """p=2, m=4, everything else at its simplest."""
    fields = {"p": 2, "d": 1, "placement": "linear", "microbatch_size": 1, "m": 4, "memory": 1.0}
    return Config(**{**fields, "schedule": "solved", **changes})  # type: ignore[arg-type]


def test_the_global_batch_gives_the_microbatches_where_it_is_whole() -> None:
    """B=16 on 4 devices: m = 16 / (b d), left out for b d = 3; p d is at most 4."""
    grid = Grid(p=(1, 2, 4), d=(1, 2), microbatch_sizes=(1, 3), global_batch=16)
    found = [(c.p, c.d, c.microbatch_size, c.m) for c in grid.configs(equal_cluster(4))]
    assert found == [(1, 1, 1, 16), (1, 2, 1, 8), (2, 1, 1, 16), (2, 2, 1, 8), (4, 1, 1, 16)]
    with pytest.raises(InputError, match="is left: 8 pipeline devices x 1 replicas are more"):
        Grid(p=(8,), global_batch=16).configs(equal_cluster(4))
    # d = 2 does not fit beside p = 4: only micro-batches of 3 and 5 are in the way of 16.
    with pytest.raises(InputError, match=r"a batch of 16 is no multiple .* \(3, 5\)"):
        Grid(p=(4,), d=(1, 2), microbatch_sizes=(3, 5), global_batch=16).configs(equal_cluster(4))
    with pytest.raises(InputError, match="either"):
        Grid(p=(1,)).configs(equal_cluster(4))


def test_a_configuration_costs_its_makespan_and_its_all_reduce() -> None:
    """p=2, m=4, 4 layers each: 4 * 12 of work behind one F of 4 is 52; d=2 adds the gradients' way."""
    cluster = Cluster(devices=(DeviceGroup(count=4),), same_node=Link(bandwidth=2.0))
    alone = evaluate(Inputs((profile(),), cluster), config())
    assert (alone.status, alone.makespan, alone.all_reduce) == ("ok", pytest.approx(52), 0.0)
    assert alone.per_sample == pytest.approx(52 / 4)
    twice = evaluate(Inputs((profile(),), cluster), config(d=2))
    # A rank has 4 * 8 of static memory, an eighth of it gradients: 4. Ring of 2: 2 turns of 4 / 2 over
    # bandwidth 2 take 2 * 1.
    assert twice.all_reduce == pytest.approx(2.0)
    assert twice.step == pytest.approx(54)
    assert twice.per_sample == pytest.approx(54 / 8)


def test_the_slowest_replica_counts() -> None:
    """Replicas of one device each, speeds 1 and 2: 4 micro-batches of 24 at speed 1 take 96."""
    cluster = Cluster(devices=(DeviceGroup(speed=2.0), DeviceGroup(speed=1.0)))
    assert evaluate(Inputs((profile(),), cluster), config(p=1, d=2)).makespan == pytest.approx(96)


def test_latency_of_the_ring() -> None:
    """d=4, no bandwidth limit: 2 * 3 turns of the slowest link."""
    cluster = Cluster(
        devices=(DeviceGroup(count=2, node=0), DeviceGroup(count=2, node=1)),
        same_node=Link(latency=1.0),
        other_node=Link(latency=3.0),
    )
    assert all_reduce((8.0,), cluster, config(p=1, d=4)) == pytest.approx(18)


def test_what_does_not_fit_or_apply_says_why() -> None:
    """Too little memory, too few layers, a baseline of another placement."""
    small = Inputs((profile(),), equal_cluster(2, memory=10.0))
    assert evaluate(small, config()).status == "infeasible"
    few = evaluate(Inputs((profile(1),), equal_cluster(2)), config())
    assert (few.status, "cannot fill" in few.reason) == ("not applicable", True)
    assert evaluate(
        Inputs((profile(),), equal_cluster(2)), config(placement="v", schedule="1f1b")
    ).status == ("not applicable")


def test_microbatch_sizes_use_their_own_profile_or_scale_the_nearest() -> None:
    """b=2 doubles times and activations of the profile for 1; a profile for 2 is used as it is."""
    measured = LayerProfile(layers=(LAYER.model_copy(update={"t_f": 1.5}),) * 8, microbatch_size=2)
    scaled = Inputs((profile(),), equal_cluster(2)).profile(2).layers[0]
    assert (scaled.t_f, scaled.mem_b, scaled.static_mem) == (2.0, 2.0, 8.0)
    both = Inputs((profile(), measured), equal_cluster(2))
    assert both.profile(2).layers[0].t_f == 1.5
    assert both.profile(4).layers[0].t_f == 3.0


def test_pareto_front_by_hand() -> None:
    """(time, memory) of (1, 5), (2, 3), (2, 4), (3, 3), (4, 1): the first, second and last remain."""
    rows = [
        (config(p=p), Outcome("ok", per_sample=a, peak_memory=b), 0.0)
        for p, (a, b) in enumerate([(1, 5), (2, 3), (2, 4), (3, 3), (4, 1)], start=1)
    ]
    rows.append((config(p=9), Outcome("infeasible"), 0.0))
    assert [row[0].p for row in pareto_front(rows, time_per_sample, peak_memory)] == [1, 2, 5]
    assert [row[0].p for row in pareto_front(rows, time_per_sample, num_devices)] == [1]


# --- the store ---------------------------------------------------------------------------------------


def test_nothing_is_computed_twice_and_other_inputs_are_other_results(tmp_path: Path) -> None:
    """A second run finds all; a changed profile finds nothing."""
    configs = [config(m=m) for m in (1, 2, 3)]
    inputs, other = Inputs((profile(),), equal_cluster(2)), Inputs((profile(7),), equal_cluster(2))
    with Store(tmp_path / "s.db") as store:
        first = run_sweep(inputs, configs, store)
        again = run_sweep(inputs, configs, store)
        assert (first.computed, again.computed) == (3, 0)
        assert again.rows == first.rows
        assert run_sweep(other, configs, store).computed == 3
        assert len(store) == 6


def test_another_database_is_left_alone(tmp_path: Path) -> None:
    """A file that is not a store is refused and unchanged."""
    path = tmp_path / "x.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE mine (a)")
    before = path.read_bytes()
    with pytest.raises(InputError, match="database of something else"):
        Store(path)
    (tmp_path / "y.db").write_text("no database, a text that is long enough to be looked at")
    with pytest.raises(InputError, match="cannot be used"):
        Store(tmp_path / "y.db")
    assert path.read_bytes() == before


SMALL_GRID = ["-p", "2,3,4,6,8", "-m", "8,12,16,24", "--memory", "0.8,1"]  # 40 configurations
LARGE_GRID = [
    *("-p", "2,3,4,6,8", "-m", "6,8,10,12,14,16,18,20,22,24,26,28,30"),
    *("--memory", "0.65,0.7,0.75,0.8,0.85,0.9,0.95,1"),  # 5 * 13 * 8 = 520
]


def sweep_arguments(tmp_path: Path, name: str, grid: list[str]) -> list[str]:
    """A sweep of small models."""
    layers = tmp_path / "layers.json"
    layers.write_text(json.dumps({**profile(24).model_dump(mode="json", by_alias=True, exclude_none=True)}))
    cluster = tmp_path / "cluster.json"
    cluster.write_text(
        json.dumps({"schema": "zbsolve.cluster/1", "devices": [{"count": 8, "memory": 120.0}]})
    )
    store = str(tmp_path / name)
    return [
        "sweep",
        str(layers),
        "--cluster",
        str(cluster),
        "-o",
        store,
        *grid,
        "--placement",
        "linear",
        "--json",
    ]


@pytest.mark.parametrize(
    ("grid", "number", "killed_after"),
    [
        (SMALL_GRID, 40, 5),
        pytest.param(LARGE_GRID, 520, 200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
    ids=["40", "520"],
)
def test_killed_in_the_middle_it_goes_on_and_ends_the_same(
    tmp_path: Path, grid: list[str], number: int, killed_after: int
) -> None:
    """kill -9 after some results: the second run keeps them, computes the rest, and prints the same."""
    killed = sweep_arguments(tmp_path, "killed.db", grid)
    process = subprocess.Popen(
        [sys.executable, "-m", "zbsolve", *killed], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    path = tmp_path / "killed.db"
    deadline = time.monotonic() + 600
    done = 0
    while done < killed_after and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
        if path.exists() and path.stat().st_size:
            with sqlite3.connect(path, timeout=60) as database:
                tables = database.execute("SELECT name FROM sqlite_master").fetchall()
                done = database.execute("SELECT count(*) FROM results").fetchone()[0] if tables else 0
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    with Store(path) as store:
        kept = len(store)
    assert killed_after <= kept < number
    resumed = CliRunner().invoke(app, killed)
    assert resumed.exit_code == 0, resumed.output
    with Store(path) as store:
        assert len(store) == number
    began = time.monotonic()
    whole = CliRunner().invoke(app, sweep_arguments(tmp_path, "whole.db", grid))
    print(f"{number} configurations, {(time.monotonic() - began) / number:.3f} s each; killed after {kept}")
    assert resumed.stdout == whole.stdout
    assert len(json.loads(whole.stdout)) == number


# --- elsewhere ---------------------------------------------------------------------------------------


def test_two_processes_give_the_same_results(tmp_path: Path) -> None:
    """joblib's workers and this process agree on every row."""
    inputs = Inputs((profile(),), equal_cluster(4))
    configs = [config(p=p, m=m) for p in (1, 2, 4) for m in (4, 6)]
    with Store(tmp_path / "one.db") as one, Store(tmp_path / "two.db") as two:
        here = run_sweep(inputs, configs, one)
        there = run_sweep(inputs, configs, two, jobs=2)
    assert [row[:2] for row in here.rows] == [row[:2] for row in there.rows]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_a_local_ray_cluster_gives_the_same_results(tmp_path: Path) -> None:
    """Ray started here and this process agree on every row."""
    inputs = Inputs((profile(),), equal_cluster(4))
    configs = [config(p=p, m=m) for p in (1, 2, 4) for m in (4, 6)]
    with Store(tmp_path / "one.db") as one, Store(tmp_path / "two.db") as two:
        here = run_sweep(inputs, configs, one)
        there = run_sweep(inputs, configs, two, ray="local")
    assert [row[:2] for row in here.rows] == [row[:2] for row in there.rows]


def test_a_ray_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray the extra is named."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with Store(tmp_path / "s.db") as store, pytest.raises(EnvironmentFailedError, match=r"zbsolve\[ray\]"):
        run_sweep(Inputs((profile(),), equal_cluster(2)), [config()], store, ray="local")


def test_an_interrupted_command_says_where_the_results_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C: exit 130, and the store that the next run goes on with."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zbsolve.sweep.run.run_sweep", interrupted)
    store = str(tmp_path / "s.db")
    result = CliRunner().invoke(
        app, ["sweep", "model-small-1b", "--cluster", "cluster-2-mixed", "--batch", "8", "-o", store]
    )
    assert result.exit_code == 130
    assert result.stderr == f"zbsolve: interrupted: {store} has the results so far: repeat to go on\n"


def test_command_prints_fronts_and_draws(tmp_path: Path) -> None:
    """Both fronts, how many were found before, and a picture."""
    arguments = ["sweep", "model-small-1b", "--cluster", "cluster-2-mixed", "-o", str(tmp_path / "s.db")]
    arguments += ["--batch", "8", "--schedule", "solved", "--schedule", "1f1b"]
    figure = tmp_path / "p.svg"
    first = CliRunner().invoke(app, [*arguments, "--figure", str(figure)])
    assert first.exit_code == 0, first.output
    assert "step time against devices" in first.stdout
    assert "0 found in the store, 4 computed" in first.stdout
    assert figure.read_text().startswith("<?xml")
    assert "4 found in the store, 0 computed" in CliRunner().invoke(app, arguments).stdout
    wrong = CliRunner().invoke(app, [*arguments, "--schedule", "2f2b"])
    assert wrong.exit_code == 2
    assert "2f2b" in wrong.stderr


def test_few_steps_are_enough_on_unlike_devices() -> None:
    """A 7B on the 8 unequal devices that ship: the plan of a sweep is within 3 % of its joint bound."""
    folder = Path(str(resources.files("zbsolve.instances")))
    inputs = Inputs(
        (load_layers(folder / "model-llama-7b.json"),), load_cluster(folder / "cluster-8-unequal.json")
    )
    outcome = evaluate(inputs, config(p=8, m=32), steps=2)
    assert outcome.lower_bound <= outcome.step <= outcome.lower_bound * 1.03
    # Two replicas of 4: the four equal fast devices, and the four others; these are slower.
    assert evaluate(inputs, config(p=4, d=2, m=16), steps=2).slowest == 1
