"""Names that people type: in any case, with what may have been meant, listed, and completed by shells."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from zbsolve import cli
from zbsolve.baselines import BASELINES
from zbsolve.benchmark.suites import SUITES
from zbsolve.cli.inputs import load_instance
from zbsolve.cli.names import Kind, listed, shipped_or_file, solver_named, solvers
from zbsolve.errors import InputError
from zbsolve.solver.portfolio import SOLVERS
from zbsolve.words import pick, spelled

ROOT = Path(__file__).resolve().parent.parent
KNOWN: dict[str, Collection[str]] = {
    **{kind.value: tuple(listed(kind)) for kind in Kind},
    "solvers": tuple(solvers()),
}


def invoke(*arguments: object) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def complete(*words: str) -> list[str]:
    """What a shell is told when these words are typed and the last one is to be completed."""
    typed = {"COMP_WORDS": " ".join(("zbsolve", *words)), "COMP_CWORD": str(len(words))}
    done = CliRunner().invoke(
        cli.app, [], env={"_ZBSOLVE_COMPLETE": "complete_bash", **typed}, prog_name="zbsolve"
    )
    return done.stdout.split()


@given(st.data())
@settings(deadline=None)
def test_a_name_is_known_in_any_case_and_offered_for_a_slip(data: st.DataObject) -> None:
    """Any letters turned over: the name itself. One letter dropped or changed: among those offered."""
    known = KNOWN[data.draw(st.sampled_from(sorted(KNOWN)))]
    name = data.draw(st.sampled_from(sorted(known)))
    turned = "".join(data.draw(st.sampled_from((c.lower(), c.upper()))) for c in name)
    assert pick(turned, known, "name") == name

    at = data.draw(st.integers(0, len(name) - 1))
    slip = name[:at] + data.draw(st.sampled_from(("", "_"))) + name[at + 1 :]
    if spelled(slip, known) is None and len(name) > 2:
        # Others may be as like it, and only a few are offered.
        with pytest.raises(InputError, match=r"is not known: use one of .* \(did you mean .*\?\)$"):
            pick(slip, known, "name")


def test_what_is_like_nothing_offers_nothing() -> None:
    """The names alone, then."""
    with pytest.raises(InputError) as error:
        pick("xyzxyz", ("auto", "1f1b"), "solver")
    assert str(error.value) == "solver 'xyzxyz' is not known: use one of auto, 1f1b"


def test_solvers_are_those_of_the_portfolio_and_every_baseline() -> None:
    """Also the interleavings that no list can hold."""
    assert list(solvers()) == [*SOLVERS, *BASELINES]
    assert solver_named("1F1B") == "1f1b"
    assert solver_named("CPSAT") == "cpsat"
    assert solver_named("Interleaved:4") == "interleaved:4"
    with pytest.raises(InputError, match="did you mean zb-h1"):
        solver_named("zbh1")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("solve", "zb-1.5b-M24-1P", "--solver", "GPIPE", "--memory-cap", "none", "--json"), "gpipe"),
        (("compare", "ZB-1.5B-m24-1p", "--solver", "1F1B", "--json"), "makespan"),
        (("catalogue", "GPipe", "--time-limit", "0.1", "--json"), "gpipe"),
        (("estimate", "--placement", "Loop", "--machine", "H100-80G"), "left out"),
        (("list", "Suites"), "published-v"),
    ],
)
def test_commands_take_names_in_any_case(arguments: tuple[str, ...], wanted: str) -> None:
    """Schedules, shipped files, machines, and every choice among few."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert wanted in result.stdout


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("solve", "zb-1.5B-m24-1p", "--solver", "zbh1"), "zb-h1"),
        (("solve", "zb-1.5B-m24-3p"), "zb-1.5B-m24-"),
        (("partition", "model-lama-7b", "-p", 2), "model-llama-7b"),
        (("partition", "model-llama-7b", "--cluster", "cluster-8-unequl"), "cluster-8-unequal"),
        (("bench", "--suite", "publishd"), "published"),
        (("bench", "--solver", "heuristc"), "heuristic"),
        (("catalogue", "dualpip"), "dualpipe"),
        (("estimate", "--machine", "h100"), "h100-80g"),
        (("estimate", "--placement", "lop"), "loop"),
        (("export", "p.json", "--format", "torchcsv"), "torch-csv"),
        (("run", "p.json", "--precision", "bf16"), "bfloat16"),
        (("list", "suite"), "suites"),
        (
            (
                "sweep",
                "model-small-1b",
                "--cluster",
                "cluster-4-workstation",
                "-o",
                "s.db",
                "--schedule",
                "zbv",
            ),
            "zb-v",
        ),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(
    arguments: tuple[object, ...], meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever kind of name it is: exit 2, one line."""
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert meant in result.stderr.partition("did you mean ")[2]


def test_list_has_every_name_and_each_is_taken() -> None:
    """By kind, as text and as JSON; what is listed as shipped is there."""
    found = json.loads(invoke("list", "--json").stdout)
    assert list(found) == [kind.value for kind in Kind]
    assert list(found["schedules"]) == list(BASELINES)
    assert list(found["suites"]) == list(SUITES)
    for kind in ("instances", "models", "clusters"):
        assert all(shipped_or_file(name, kind[:-1]).exists() for name in found[kind])
    instance = load_instance("unequal-8-m16-1p")
    assert found["instances"]["unequal-8-m16-1p"] == (
        f"{instance.num_stages} stages on {instance.num_devices} devices, "
        f"{instance.num_microbatches} micro-batches, cap {instance.cap(0):g} MiB"
    )
    assert found["models"]["model-llama-7b"] == "llama-7b: 34 layers"
    assert found["clusters"]["cluster-2-mixed"] == "1 x A100-80G, 1 x A100-40G"

    lines = invoke("list", "schedules").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(BASELINES)
    assert invoke("list").stdout.count("\n") == sum(len(names) + 1 for names in found.values())


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("so",), ["solve"]),
        (("solve", "zb-1.5B-m24"), ["zb-1.5B-m24-1p", "zb-1.5B-m24-2p"]),
        (("solve", "x.json", "--solver", "zb-"), ["zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v"]),
        (("solve", "x.json", "--objective", "m"), ["makespan"]),
        (("partition", "model-llama-8"), ["model-llama-8b-128k"]),
        (("advise", "model-small-1b", "--cluster", "cluster-2-"), ["cluster-2-mixed"]),
        (("sweep", "model-small-1b", "--schedule", "so"), ["solved"]),
        (("bench", "--suite", "publ"), ["published", "published-v"]),
        (("catalogue", "dual"), ["dualpipe", "dualpipe-v"]),
        (("run", "p.json", "--update", "post"), ["post-validation"]),
        (("list", "c"), ["clusters"]),
    ],
)
def test_a_shell_completes_names(words: tuple[str, ...], wanted: list[str]) -> None:
    """Commands, choices, schedules, suites, and what ships."""
    assert complete(*words) == wanted


def test_a_shell_completes_files_beside_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON files and folders, hidden ones only when asked for; nothing where there is no folder."""
    for name in ("a.json", "b.txt", ".hidden.json", "unequal.json"):
        (tmp_path / name).touch()
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "p.json").touch()
    monkeypatch.chdir(tmp_path)
    assert complete("check", "p") == ["plans/"]
    assert complete("check", "plans/") == ["plans/p.json"]
    assert complete("check", ".h") == [".hidden.json"]
    assert complete("check", "none/") == []
    assert complete("show", "a") == ["a.json"]
    assert complete("show", f"{tmp_path}/u") == [f"{tmp_path}/unequal.json"]
    found = complete("show", "unequal")
    assert found[-1] == "unequal.json"
    assert len(found) == 1 + 12  # the file, and the shipped profiles
