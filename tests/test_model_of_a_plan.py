"""The model that times are of: files remember it, what changes the cut drops it, and a run takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from zbsolve import cli
from zbsolve.errors import InputError
from zbsolve.model.instance import (
    Instance,
    ModelCut,
    ModelFactory,
    equal_stages,
    load_instance,
    make_instance,
)
from zbsolve.model.recut import recut
from zbsolve.partition.cluster import Cluster, DeviceGroup
from zbsolve.partition.layers import Keep, Layer, LayerProfile, join_profiles, load_layers
from zbsolve.partition.problem import Decision, DecisionProblem
from zbsolve.plan.plan import load_plan
from zbsolve.solver.portfolio import solve
from zbsolve.trace.compare import recalibrate
from zbsolve.trace.trace import load_trace

CUT = ModelCut(factory="shop.models:build", split="generic", layers_per_stage=(3, 2))


def known() -> Instance:
    """Two stages of a known model."""
    return equal_stages(2, 4).with_changes(model=CUT)


def invoke(*arguments: object) -> Result:
    """The command line in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_files_remember_the_model(tmp_path: Path) -> None:
    """Instance and plan carry it through JSON; a file without it, as older ones are, has none."""
    path = tmp_path / "i.json"
    path.write_text(json.dumps(known().to_json_dict()))
    assert load_instance(path).model == CUT
    plan = solve(load_instance(path), solver="1f1b").plan
    plan.save(tmp_path / "p.json")
    assert load_plan(tmp_path / "p.json").instance.model == CUT
    data = known().to_json_dict()
    del data["model"]
    assert make_instance(**data).model is None
    assert "model" not in equal_stages(2, 4).to_json_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers_per_stage": [3, 2, 1]}, "model.layers_per_stage has 3 entries: give 2 (one per stage)"),
        ({"layers_per_stage": [5, 0]}, "model.layers_per_stage[1]"),
        ({"layers_per_stage": 5}, "model.layers_per_stage: not a list"),
        ({"factory": ""}, "model.factory"),
        ({"split": "both"}, "model.split"),
        ({"colour": 1}, "model.colour: unknown field"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    """One line names the field."""
    data = known().to_json_dict()
    data["model"] |= change
    with pytest.raises(InputError) as caught:
        make_instance(**data)
    assert message in str(caught.value)


def test_a_new_cut_is_of_no_known_layers() -> None:
    """Halved and joined stages drop the model; the same stages elsewhere, and two copies of them, keep it."""
    from zbsolve.baselines import BASELINES

    assert recut(known(), "v").model is None
    assert recut(known(), "linear").model == CUT
    v = equal_stages(2, 4, placement="v")
    v = v.with_changes(model=ModelCut(factory="gpt", layers_per_stage=(1, 2, 2, 1)))
    assert recut(v, "linear").model is None
    assert recut(v, "loop").model == v.model
    timed_on, _ = BASELINES["dualpipe"].schedule(equal_stages(2, 8).with_changes(model=CUT))
    assert (timed_on.num_stages, timed_on.model) == (4, CUT)


def layers(size: int = 2) -> LayerProfile:
    """Five layers of a known model."""
    one = Layer(t_f=1.0, t_b=1.0, t_w=1.0, t_bw=2.0, mem_b=1.0, mem_w=1.0)
    factory = ModelFactory(factory="shop.models:build", split="generic")
    return LayerProfile(name="shop", microbatch_size=size, model=factory, layers=(one,) * 5)


def test_a_partition_carries_the_model_where_the_split_is_all_that_changes(tmp_path: Path) -> None:
    """The split is the decision's; another micro-batch size, joined parts, and activations that the model
    itself would have to give up are of no known model."""
    path = tmp_path / "l.json"
    path.write_text(layers().to_json())
    assert load_layers(path) == layers()
    assert layers().scaled(4).model is None
    assert layers().scaled(2).model is not None
    assert join_profiles([layers()]).model == layers().model
    assert join_profiles([layers(), layers()]).model is None

    cluster = Cluster(devices=(DeviceGroup(count=2),))
    problem = DecisionProblem(layers(), cluster, 2, 4)

    def model(*keep: Keep) -> ModelCut | None:
        return problem.instance(Decision("linear", (0, 1), (3, 2), keep)).model

    assert model(Keep.plain, Keep.plain) == CUT
    assert model(Keep.recompute, Keep.plain) == CUT
    assert model(Keep.checkpoint, Keep.plain) is None

    assert invoke("partition", path, "-p", 2, "-m", 4, "-o", tmp_path / "i.json").exit_code == 0
    found = load_instance(tmp_path / "i.json").model
    assert found is not None
    assert (found.factory, found.split, sum(found.layers_per_stage)) == ("shop.models:build", "generic", 5)


def test_a_run_takes_what_is_left_open_from_the_plan() -> None:
    """Nothing given: the plan's model, split and cut, without a word. Each other thing given has its line."""
    pytest.importorskip("torch")
    from zbsolve.run_options import RunOptions

    def line(instance: Instance, **given: object) -> tuple[RunOptions, str]:
        options, notes = RunOptions(**given).for_instance(instance)  # type: ignore[arg-type]
        assert all("\n" not in note for note in notes)
        return options, "; ".join(notes)

    options, said = line(known())
    assert (options.model, options.split, options.layers_per_stage) == (
        "shop.models:build",
        "generic",
        (3, 2),
    )
    assert said == ""
    assert line(known(), model="shop.models:build", layers_per_stage=(3, 2), split="generic")[1] == ""

    options, said = line(known(), model="gpt")
    # Neither the cut nor the split of another model is this one's.
    assert (options.model, options.layers_per_stage, options.split) == ("gpt", None, "auto")
    assert said.startswith("the plan's times are of shop.models:build, this runs gpt: ")
    assert line(known(), layers_per_stage=(4, 1))[1] == (
        "the plan's times are of 3,2 layers per stage, this runs 4,1"
    )
    assert line(known(), split="deferred")[1] == "the plan's times are of split generic, this runs deferred"

    options, said = line(equal_stages(2, 4))
    assert options.model == "gpt"
    assert said.startswith("the plan's times are of no known model: unless they are of gpt, ")
    assert line(equal_stages(2, 4), emulate=True)[1] == ""
    assert line(known(), emulate=True, split="deferred")[1] == ""


def test_profile_solve_run_is_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiled model of one's own is what the plan runs, cut as it was, without naming it again."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "runtime"))
    instance, plan, trace = (tmp_path / name for name in ("i.json", "p.json", "t.json"))
    profiled = invoke(
        "profile", "runtime_cases:trainable", "-p", 2, "-m", 2, "--repeats", 1, "--warmup", 0,
        "--split", "generic", "-o", instance,
    )  # fmt: skip
    assert profiled.exit_code == 0, profiled.output
    found = load_instance(instance).model
    assert found is not None
    assert (found.factory, found.split) == ("runtime_cases:trainable", "generic")
    assert invoke("solve", instance, "--solver", "1f1b", "-o", plan).exit_code == 0
    ran = invoke("run", plan, "--steps", 1, "--warmup", 0, "--trace-out", trace)
    assert ran.exit_code == 0, ran.output
    assert ran.stderr == ""
    measured = load_trace(trace)
    assert measured.model == "runtime_cases:trainable"
    assert set(measured.split) <= {"generic"}
    assert recalibrate(load_instance(instance), measured).model == found
