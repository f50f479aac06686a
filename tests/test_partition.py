"""Layers to stages: exact splits, every layer once, and what they are worth."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from zbsolve.cli import app
from zbsolve.errors import InputError
from zbsolve.model.instance import load_instance
from zbsolve.partition.splits import balanced_split, even_split, imbalance, stage_loads
from zbsolve.plan.plan import load_plan
from zbsolve.solver.portfolio import solve


def test_equal_layers_and_a_head_worth_three() -> None:
    """12 equal layers + LM head worth 3, p=4: 15 of work, so no split beats 4 a stage; 4 4 4 head is one."""
    costs = [1.0] * 12 + [3.0]
    even = even_split(13, 4)
    # 4 + 3 + 3 + 3 layers: the last stage has 2 layers and the head, 5; mean 3.75; 5 / 3.75 - 1 = 1/3.
    assert even == (4, 3, 3, 3)
    assert imbalance(costs, even) == pytest.approx(1 / 3)
    balanced = balanced_split(costs, 4)
    assert max(stage_loads(costs, balanced)) == 4
    assert sorted(stage_loads(costs, balanced)) == [3, 4, 4, 4]
    assert imbalance(costs, balanced) == pytest.approx(4 / 3.75 - 1)


@pytest.mark.parametrize(("layers", "stages"), [(30, 4), (5, 4), (42, 16), (7, 7), (9, 1)])
def test_no_layer_lost_none_twice_no_empty_stage(layers: int, stages: int) -> None:
    """Both splits give every layer to exactly one stage."""
    for split in (even_split(layers, stages), balanced_split([1.0] * layers, stages)):
        assert len(split) == stages
        assert sum(split) == layers
        assert min(split) >= 1
        assert max(split) - min(split) <= 1  # equal layers: nothing else is balanced


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0]), min_size=1, max_size=9), st.integers(1, 5))
def test_bottleneck_and_squares_equal_exhaustive_search(costs: list[float], stages: int) -> None:
    """Least bottleneck, then least sum of squares, over all ways to cut."""
    if len(costs) < stages:
        return
    n = len(costs)
    ways = [
        tuple(b - a for a, b in pairwise([0, *cuts, n])) for cuts in combinations(range(1, n), stages - 1)
    ]

    def worth(split: tuple[int, ...]) -> tuple[float, float]:
        loads = stage_loads(costs, split)
        return max(loads), sum(load * load for load in loads)

    assert worth(balanced_split(costs, stages)) == pytest.approx(min(map(worth, ways)))


def test_too_few_layers_is_an_error_that_says_so() -> None:
    """3 layers over 4 stages: refused by name."""
    for split in (lambda: even_split(3, 4), lambda: balanced_split([1.0] * 3, 4)):
        with pytest.raises(InputError, match="3 layers cannot fill 4 stages"):
            split()


def layer_file(path: Path, layers: list[dict[str, object]]) -> Path:
    """A layer profile on disk."""
    path.write_text(json.dumps({"schema": "zbsolve.layers/1", "name": "head", "layers": layers}))
    return path


def test_command_reports_imbalance_and_writes_a_better_instance(tmp_path: Path) -> None:
    """The balanced instance's optimum is below the even one's; the table names both."""
    block = {"t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "mem_b": 1.0, "mem_w": 1.0}
    head = {"t_f": 3.0, "t_b": 3.0, "t_w": 3.0, "mem_b": 1.0, "mem_w": 1.0, "name": "head"}
    layers = layer_file(tmp_path / "layers.json", [block] * 12 + [head])
    out = tmp_path / "instance.json"
    result = CliRunner().invoke(app, ["partition", str(layers), "-p", "4", "-m", "8", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "33.3%" in result.output
    assert "6.7%" in result.output
    instance = load_instance(out)
    # The busiest stage works 8 * 4 * 3 = 96; the even split's 8 * 5 * 3 = 120.
    assert max(instance.device_work(d) for d in range(4)) == 96
    assert solve(instance, time_limit=5).plan.makespan < 120


def test_bad_layer_files_get_one_line(tmp_path: Path) -> None:
    """A negative time names its layer and field."""
    layers = layer_file(tmp_path / "layers.json", [{"t_f": -1.0, "t_b": 1.0, "t_w": 1.0}])
    result = CliRunner().invoke(app, ["partition", str(layers), "-p", "1"])
    assert result.exit_code == 2
    assert "layers[0].t_f" in result.output


def test_readme_shows_what_the_command_prints() -> None:
    """The README's example is the command's own output on the file that ships in docs."""
    root = Path(__file__).parent.parent
    layers = root / "docs" / "layers-head.json"
    result = CliRunner().invoke(app, ["partition", str(layers), "-p", "4"])
    readme = {" ".join(line.split()) for line in (root / "README.md").read_text().splitlines()}
    printed = [" ".join(line.split()) for line in result.output.splitlines()]
    assert len(printed) == 3
    assert set(printed) <= readme


# --- the joint decision on the command line -------------------------------------------------------------


def partition(*arguments: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(app, ["partition", *map(str, arguments)])


def test_joint_command_writes_instance_plan_and_decision(tmp_path: Path) -> None:
    """12 layers and a head worth 3: 4 4 4 1 at 104, proven; each file is what the others say."""
    layers = Path(__file__).parent.parent / "docs" / "layers-head.json"
    paths = {name: tmp_path / f"{name}.json" for name in ("instance", "plan", "decision")}
    result = partition(
        *(layers, "-p", 4, "-m", 8, "-o", paths["instance"], "--plan", paths["plan"]),
        *("--decision", paths["decision"], "--time-limit", 10),
    )
    assert result.exit_code == 0, result.output
    assert "layers per stage 4,4,4,1" in result.stdout
    assert "the joint plan against it: 20.0% of the step" in result.stdout  # the even split's 130
    # What was closed because it cannot be better is not "open": 0 is left to say nothing is proven about.
    assert "none of them all costs less than the plan" in result.stdout
    assert "open" not in result.stdout
    plan, decision = load_plan(paths["plan"]), json.loads(paths["decision"].read_text())
    assert plan.instance == load_instance(paths["instance"])
    assert (decision["cost"], decision["lower_bound"], decision["status"]) == (104, 104, "optimal")
    assert decision["layers_per_stage"] == [4, 4, 4, 1]
    assert decision["plan"] == plan.to_json_dict()
    assert [device["rank"] for device in decision["devices"]] == [0, 1, 2, 3]
    assert CliRunner().invoke(app, ["check", str(paths["plan"])]).exit_code == 0


def test_joint_command_prints_json_alone() -> None:
    """--json is the decision file, and nothing else is on stdout."""
    result = partition("model-small-1b", "--cluster", "cluster-2-mixed", "-m", 4, "--json", "--time-limit", 5)
    decision = json.loads(result.stdout)
    assert decision["schema"] == "zbsolve.decision/1"
    assert decision["lower_bound"] <= decision["cost"]
    assert {device["name"] for device in decision["devices"]} == {"A100-80G", "A100-40G"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", 14, "--joint"], "13 layers cannot fill 14 stages"),
        (["-p", 8, "--placement", "v"], "13 layers cannot fill 16 stages"),
        (["-p", 4, "--layers-per-stage", "4,4,4,2"], "has 14 layers: give all 13"),
        (["-p", 4, "--layers-per-stage", "4,4,5"], "has 3 stages for 4 devices"),
        (["--joint"], "--devices is missing"),
        (["-p", 4, "--allow", "offload"], 'the cluster has no "host"'),
        (["-p", 4, "--memory-share", 0, "--joint"], "--memory-share 0: give a positive number"),
        (["--cluster", "cluster-8-unequal", "--hop", 1], "leave them out with --cluster"),
        (["--cluster", "cluster-8-unequl"], "did you mean cluster-8-unequal"),
        (["--cluster", "cluster-8-unequal", "-p", 9], "the cluster has 8: use 1 to that many"),
    ],
)
def test_joint_command_refuses_in_one_line(arguments: list[object], words: str) -> None:
    """What is wrong and how to mend it; exit code 2."""
    result = partition(Path(__file__).parent.parent / "docs" / "layers-head.json", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_model_that_fits_nowhere_is_infeasible() -> None:
    """Exit code 1, with what would help."""
    layers = Path(__file__).parent.parent / "docs" / "layers-head.json"
    result = partition(layers, "-p", 4, "--memory", 0.5, "--time-limit", 5)
    assert result.exit_code == 1
    assert "no split of the layers fits" in result.stderr
