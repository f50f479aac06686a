"""Options declared once: every reader of a declaration takes the same names, values and bounds."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from zbsolve.cli import app
from zbsolve.cli.declared import with_options
from zbsolve.errors import InputError
from zbsolve.options import Declaration, Declared, Options, declarations, integers
from zbsolve.run_options import Fault, LayerOptions, ProfileOptions, RunOptions

DECLARED = declarations(RunOptions)


@dataclass(frozen=True)
class Trial(Options):
    """One option of each kind, as a new one would be declared."""

    count: Annotated[int, Declaration(least=1, most=9, short="-c", flag="--number", help="How many.")] = 3
    share: Annotated[float, Declaration(above=0, help="A share.")] = 0.5
    way: Annotated[Literal["by-rule", "by-hand"], Declaration(help="A way.")] = "by-rule"
    cuts: Annotated[tuple[int, ...] | None, Declaration(metavar="N,N", help="Cuts.")] = None
    loud: Annotated[bool, Declaration(help="A switch that is off.")] = False
    sure: Annotated[bool, Declaration(help="A switch that is on.")] = True
    hidden: Annotated[int, Declaration(on_command=False)] = 1
    inner: int = 7


def values(declared: Declared) -> st.SearchStrategy[Any]:
    """Values that a declaration allows."""
    words = declared.words
    if declared.choices:
        found: st.SearchStrategy[Any] = st.sampled_from(declared.choices)
    elif declared.kind is bool:
        found = st.booleans()
    elif declared.kind is tuple:
        found = st.lists(st.integers(1, 99), min_size=1, max_size=5).map(tuple)
    elif declared.kind is int:
        low = 0 if words.least is None else int(words.least)
        found = st.integers(low, 10**6 if words.most is None else int(words.most))
    elif declared.kind is float:
        low = 0.0 if words.least is None else words.least
        found = st.floats(low, 1e6, exclude_min=words.above is not None)
    else:
        found = st.text(st.characters(categories=("L", "N")), min_size=1)
    return st.none() | found if declared.is_optional else found


def words_of(options: Options, name: dict[str, str]) -> list[str]:
    """A command line that says every declared option; ``name`` is each one's flag."""
    said = []
    for declared in declarations(type(options)).values():
        value, flag = getattr(options, declared.name), name.get(declared.name, declared.flag)
        if declared.kind is bool:
            said += [flag] if value != declared.default else []
        elif value is not None:
            said += [f"{flag}={','.join(map(str, value)) if declared.kind is tuple else value}"]
    return said


run_options = st.builds(RunOptions, **{name: values(declared) for name, declared in DECLARED.items()})


@settings(deadline=None)
@given(run_options)
def test_a_rank_reads_what_a_command_line_says(options: RunOptions) -> None:
    """Whatever is declared can be said to a rank, and arrives as it was."""
    pytest.importorskip("torch")
    from zbsolve.runtime.worker import _parser

    flags = {"check_gradients": "--no-check-gradients", "layers_per_stage": "--layers"}
    given = _parser().parse_args(["plan.json", *words_of(options, flags)])
    assert RunOptions(**{name: getattr(given, name) for name in DECLARED}) == options


@settings(deadline=None)
@given(run_options, st.booleans())
def test_a_job_file_keeps_every_option(options: RunOptions, faulty: bool) -> None:
    """Those too that no command line has."""
    if faulty:
        options = RunOptions(
            faults=(Fault("kill", "F", 0, 1, 2), Fault("stall", "B", 1, 1, 2)), link_delay=0.5
        )
    assert RunOptions.from_json(json.loads(json.dumps(options.to_json()))) == options


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ((), Trial()),
        (("--number", "9", "--share", "0.25", "--way", "by-hand"), Trial(count=9, share=0.25, way="by-hand")),
        (("-c", "1", "--cuts", "3,2", "--loud", "--no-sure"), Trial(1, cuts=(3, 2), loud=True, sure=False)),
    ],
)
def test_a_command_reads_what_is_said(
    said: tuple[str, ...], wanted: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function is given the options, and its own parameters beside them."""
    assert took(monkeypatch, *said) == (wanted, "x")


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (("--number", "10"), "--number"),
        (("--share", "0"), "--share 0: give a number above 0"),
        (("--share", "nan"), "--share nan: give a finite number"),
        (("--way", "none"), "--way"),
        (("--cuts", "3,x"), "--cuts 3,x: give whole numbers from 1"),
        (("--hidden", "1"), "--hidden"),
        (("--inner", "1"), "--inner"),
    ],
)
def test_a_command_refuses_what_the_declaration_does(
    said: tuple[str, ...], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line that names the option as it is written."""
    assert complaint in str(took(monkeypatch, *said))


def took(monkeypatch: pytest.MonkeyPatch, *said: str) -> tuple[Trial, str] | str:
    """What a command with the trial's options was given, or what it said instead."""
    from zbsolve.cli.base import command

    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))
    given: list[tuple[Trial, str]] = []

    @command("trial")
    @with_options(Trial)
    def trial_command(options: Trial, own: str = "x") -> None:
        """A trial."""
        given.append((options, own))

    result = CliRunner().invoke(app, ["trial", *said])
    return given[0] if given else result.output


@pytest.mark.parametrize("options", [RunOptions, ProfileOptions, LayerOptions, Trial])
def test_the_defaults_pass_and_what_lies_outside_does_not(options: type[Options]) -> None:
    """Each bound of each option, one step beyond it; each choice that is none."""
    options().check()
    for name, declared in declarations(options).items():
        words = declared.words
        beyond: list[Any] = [words.above] if words.above is not None else []
        beyond += [words.least - 1] if words.least is not None else []
        beyond += [words.most + 1] if words.most is not None else []
        beyond += [float("nan"), float("inf")] if declared.kind is float else []
        beyond += ["some other"] if declared.choices else []
        beyond += [(), (2, 0)] if declared.kind is tuple else []
        for value in beyond:
            with pytest.raises(InputError, match=f"^{name} is .*: give "):
                options(**{name: value}).check()
            with pytest.raises(InputError, match=f"^{declared.flag} .*: give "):
                options(**{name: value}).check(as_flags=True)


def test_whole_numbers() -> None:
    """From 1, separated by commas."""
    assert integers("3,3,2", "--layers") == (3, 3, 2)
    for text in ("", "3,", "0", "1.5", "a"):
        with pytest.raises(InputError, match=f"^--layers {text}: give whole numbers"):
            integers(text, "--layers")


def test_a_profile_of_layers_takes_its_part() -> None:
    """Every field of a layer profile's options is one of a profile's."""
    options = ProfileOptions(model="m", num_microbatches=3, repeats=2, warmup=0, seed=5, timeout=9.0)
    assert options.of_layers() == LayerOptions("m", 3, 2, 0, 1, "auto", 5, 9.0)
    assert {field.name for field in fields(LayerOptions)} <= {field.name for field in fields(ProfileOptions)}


@pytest.mark.parametrize(("name", "options"), [("run", RunOptions), ("profile", ProfileOptions)])
def test_a_command_has_every_declared_option(name: str, options: type[Options]) -> None:
    """And no other of that name: what is declared nowhere is not asked for."""
    (found,) = (one for one in app.registered_commands if one.name == name)
    assert found.callback is not None
    taken = set(inspect.signature(found.callback).parameters)
    declared = declarations(options)
    assert {one for one in declared if declared[one].words.on_command} <= taken
    assert taken.isdisjoint({one for one in declared if not declared[one].words.on_command})
    assert taken.isdisjoint({"faults", "link_delay", "options"})
