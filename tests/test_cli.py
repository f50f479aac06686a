"""The command line end to end: exit codes, one-line errors, outputs whole or not at all."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from zbsolve import cli
from zbsolve.cli import inputs, running
from zbsolve.cli import names as known_names
from zbsolve.model.instance import Instance, equal_stages, load_instance
from zbsolve.model.simulator import simulate
from zbsolve.plan.plan import Plan, load_plan
from zbsolve.solver import portfolio as solver
from zbsolve.solver.portfolio import certify, solve

ROOT = Path(__file__).resolve().parent.parent
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


def invoke(*arguments: object) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
    """Start the command line as its own process."""
    return subprocess.Popen(
        [sys.executable, "-m", "zbsolve", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        **options,  # type: ignore[call-overload]
    )


def wait_for_line(process: subprocess.Popen[str], *parts: str) -> None:
    """Read a started command's stderr (``--verbose``) until a line has all these parts."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        if all(part in line for part in parts):
            return
        lines.append(line)
    raise AssertionError("".join(lines))


def finish(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a started command."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def one_line(result: Result) -> str:
    """The error line of a failed command; nothing else may be on stderr."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.stderr.startswith("zbsolve: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    """Two equal stages of ones, m = 4, cap 2 (1F1B's own memory)."""
    path = tmp_path / "i.json"
    path.write_text(json.dumps(equal_stages(2, 4, memory_cap=2.0, name="pair").to_json_dict()))
    return path


@pytest.fixture
def plan(tmp_path: Path, instance: Path) -> Path:
    """The solved plan of the instance."""
    path = tmp_path / "p.json"
    solve(load_instance(instance), time_limit=5).plan.save(path)
    return path


# --- help and usage ------------------------------------------------------------------------------


def test_help_names_every_command() -> None:
    """Each command of the contract is listed, with help of its own."""
    text = invoke("--help").stdout
    for name in ("solve", "compare", "check", "show", "export", "import", "profile", "run", "demo"):
        assert re.search(rf"^  {name} ", text, re.MULTILINE)
        assert invoke(name, "--help").exit_code == 0


def test_help_answers_in_under_300_ms_of_processor_time() -> None:
    """The least of five runs, user and system time together, so that a busy machine does not matter."""
    resource = pytest.importorskip("resource")
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        code, out, _ = finish(start("--help"))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert code == 0
        assert "Usage" in out
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(spent) < 0.3


@pytest.mark.parametrize(
    "arguments",
    [
        ("solve",),
        ("frobnicate",),
        ("solve", "x.json", "--objective", "speed"),
        ("solve", "x.json", "--seed", "many"),
        ("run", "p.json", "--steps", "0"),
        ("export", "p.json", "--format", "yaml"),
    ],
)
def test_usage_errors_exit_2(arguments: tuple[str, ...]) -> None:
    """Bad usage is one line that says where the help is."""
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert one_line(result).endswith(" --help\n")
    assert result.stdout == ""


def test_no_command_is_the_help(instance: Path) -> None:
    """The commands on stderr, exit 2: nothing was asked for."""
    result = invoke()
    assert result.exit_code == 2
    assert result.stderr == invoke("--help").stdout


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_limits_are_positive_and_finite(instance: Path, plan: Path, tmp_path: Path, value: str) -> None:
    """A limit that never ends, or is none, is exit 2 in one line before anything starts."""
    for arguments in (
        ("solve", instance, "--time-limit", value),
        ("solve", instance, "--deterministic", "--time-limit", value),
        ("run", plan, "--timeout", value),
        ("profile", "gpt", "-o", tmp_path / "x.json", "--timeout", value),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert "give a positive number of seconds" in one_line(result)
    assert not (tmp_path / "x.json").exists()


def test_profile_refuses_a_bad_cap_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime is not even loaded."""
    monkeypatch.setattr(running, "load_runtime", lambda: pytest.fail("loaded the runtime"))
    result = invoke("profile", "gpt", "-o", tmp_path / "x.json", "--memory-cap", "abc")
    assert result.exit_code == 2
    assert "memory cap 'abc'" in one_line(result)


def test_too_large_for_memory_exits_3(instance: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine cannot hold is the environment's failure, in one line."""

    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("zbsolve.solver.portfolio.solve", full)
    result = invoke("solve", instance)
    assert result.exit_code == 3
    assert "not enough memory" in one_line(result)


def test_version() -> None:
    """The version is the package's."""
    from zbsolve import __version__

    assert invoke("--version").stdout == f"zbsolve {__version__}\n"


# --- solve ---------------------------------------------------------------------------------------


def test_solve_prints_the_certificate_and_writes_the_plan(instance: Path, tmp_path: Path) -> None:
    """p = 2, m = 4, ones, cap 2: 13 is optimal (12 of work on device 1 after one F)."""
    result = invoke("solve", instance, "-o", tmp_path / "p.json", "--time-limit", 10)
    assert result.exit_code == 0, result.output
    assert re.search(r"makespan +13 ms  <- objective", result.stdout)
    assert re.search(r"lower bound +13 ms", result.stdout)
    assert re.search(r"gap +0\.000%", result.stdout)
    assert re.search(r"status +optimal", result.stdout)
    assert "proof" in result.stdout
    # 1F1B: (m + p - 1) * 3 = 15; (15 - 13) / 15 = 13.3 %.
    assert "gain over 1F1B: 13.3% of the step (makespan 13 against 15 ms)" in result.stdout
    assert "100.0%" in result.stdout
    plan = load_plan(tmp_path / "p.json")
    assert plan.status == "optimal"
    assert plan.makespan == pytest.approx(13)


def test_json_is_the_plan_alone_on_stdout(instance: Path, tmp_path: Path) -> None:
    """A pipe gets a plan file and nothing else; the same bytes as -o writes."""
    result = invoke("solve", instance, "--json", "-o", tmp_path / "p.json", "--time-limit", 10)
    assert result.exit_code == 0
    assert result.stdout == (tmp_path / "p.json").read_text()
    assert result.stderr == ""


def test_deterministic_solves_give_equal_bytes(instance: Path) -> None:
    """Same seed, same bytes."""
    first, second = (
        invoke("solve", instance, "--json", "--deterministic", "--seed", 3, "--time-limit", 10)
        for _ in range(2)
    )
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout


def test_memory_cap_option(instance: Path) -> None:
    """Without a cap the plan's instance has none; ``2p`` is twice p M_B = 4 here; a number is itself."""
    caps = {"none": None, "2p": [4.0, 4.0], "3": 3.0}
    for given, expected in caps.items():
        result = invoke("solve", instance, "--memory-cap", given, "--json", "--time-limit", 5)
        assert json.loads(result.stdout)["instance"]["memory_cap"] == expected
    result = invoke("solve", instance, "--memory-cap", "lots")
    assert result.exit_code == 2
    assert "memory cap 'lots'" in one_line(result)


def test_infeasible_cap_exits_1_and_names_the_device(instance: Path) -> None:
    """The answer is no: both devices need 1 and have 0.5."""
    result = invoke("solve", instance, "--memory-cap", "0.5")
    assert result.exit_code == 1
    assert "devices 0-1 need 1 MiB each, have 0.5" in one_line(result)


def test_solve_says_when_1f1b_does_not_fit(instance: Path) -> None:
    """Under a cap of 1 no gain over 1F1B (peak 2) is stated."""
    result = invoke("solve", instance, "--memory-cap", 1, "--time-limit", 5)
    assert result.exit_code == 0
    assert "gain over 1F1B: none to state: 1F1B does not fit the cap: device 0 would need 2" in result.stdout


def test_span_objective_and_named_solver(instance: Path) -> None:
    """The objective is marked, and a baseline's name is a solver."""
    result = invoke("solve", instance, "--objective", "span", "--solver", "1f1b")
    assert result.exit_code == 0, result.output
    assert re.search(r"span +\d+ ms  <- objective", result.stdout)
    assert "no gain" in result.stdout
    result = invoke("solve", instance, "--solver", "magic")
    assert result.exit_code == 2
    assert "'magic'" in one_line(result)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"schema": "zbsolve.instance/1", "num_devices": 0}', ("num_devices",)),
        ('{"schema": "zbsolve.instance/1", "colour": 1}', ("colour", "unknown field")),
        ('{"num_devices": 1}', ("schema", "missing")),
        ("[1, 2", ("line 1", "not JSON")),
        ("\x00", ("line 1",)),
    ],
)
def test_bad_instances_name_file_and_field(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    """Bad input is exit 2 and one line with file, field and fix."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    result = invoke("solve", path)
    assert result.exit_code == 2
    line = one_line(result)
    assert "bad.json" in line
    for part in parts:
        assert part in line


def test_a_missing_file_and_an_unknown_name_are_told_apart() -> None:
    """A path that is missing is a file; a bare name is looked up among the shipped instances."""
    assert "cannot be read" in one_line(invoke("solve", "no/such.json"))
    assert "no shipped instance" in one_line(invoke("solve", "no-such-instance"))
    line = one_line(invoke("solve", "unequal-8-m16-1pp"))
    assert "did you mean unequal-8-m16-1p or " in line
    assert "no such file" in one_line(invoke("solve", ""))


def test_shipped_instances_load_by_name() -> None:
    """Every instance that ships is readable by its bare name."""
    names = known_names.shipped_files()
    assert len(names) == 24 + 9 + 12  # the published cells, the V cells, the unequal profile
    for name in names:
        assert inputs.load_instance(name).num_devices >= 1


# --- outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["missing/p.json", "."])
def test_unwritable_outputs_are_refused_before_the_work(
    instance: Path, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is checked first: the solver is never asked."""
    monkeypatch.setattr(
        "zbsolve.solver.portfolio.solve", lambda *_, **__: pytest.fail("solved before the check")
    )
    result = invoke("solve", instance, "-o", tmp_path / target)
    assert result.exit_code == 2
    assert str(tmp_path) in one_line(result)


def test_a_full_disk_leaves_the_old_plan(instance: Path, tmp_path: Path) -> None:
    """With files limited to 1 KiB the write fails: exit 3, one line, and the old file alone is there."""
    resource = pytest.importorskip("resource")
    out = tmp_path / "out"
    out.mkdir()
    (out / "p.json").write_text("old")
    limit = (1024, 1024)
    process = start(
        "solve",
        instance,
        "-o",
        out / "p.json",
        "--solver",
        "1f1b",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    code, _, err = finish(process)
    assert (code, err.count("\n")) == (3, 1), err
    assert err.startswith("zbsolve: ")
    assert (out / "p.json").read_text() == "old"
    assert [path.name for path in out.iterdir()] == ["p.json"]


def test_interrupt_with_nothing_to_keep_exits_130(instance: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while reading: one line, no traceback."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zbsolve.model.instance.load_instance", interrupted)
    result = invoke("solve", instance)
    assert result.exit_code == 130
    assert one_line(result) == "zbsolve: interrupted\n"


# Sends SIGINT to itself when a module is about to be imported, then runs the command line.
INTERRUPTED_AT = """
import os, signal, sys
module = sys.argv.pop(1)
class Interrupt:
    def find_spec(self, name, *_):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from zbsolve.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "module",
    [
        "zbsolve.cli",
        "typer",
        "zbsolve.cli.planning",
        "zbsolve.model.instance",
        "numpy",
        "zbsolve.solver.portfolio",
    ],
)
def test_an_interrupt_while_modules_are_loaded_is_one_line(instance: Path, module: str) -> None:
    """In the first moments of a command there is nothing to keep: exit 130, and never a traceback."""
    command = [sys.executable, "-c", INTERRUPTED_AT, module, "solve", str(instance)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "zbsolve: interrupted\n")


def hard_instance() -> Instance:
    """Eight unequal stages under a tight cap: not closed in seconds."""
    stages = [
        {"device": d, "t_f": 10.0 + 3.7 * (d % 3), "t_b": 11.0 + 2.9 * (d % 4), "t_w": 7.0 + 1.3 * (d % 2)}
        for d in range(8)
    ]
    return equal_stages(8, 24).with_changes(stages=stages, t_comm=0.7).with_memory_cap("0.6p")


def ignore_interrupts() -> None:
    """What a shell does to a background job before it starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize("before", [None, ignore_interrupts])
def test_interrupt_keeps_the_best_plan(tmp_path: Path, before: Callable[[], None] | None) -> None:
    """Ctrl-C, or kill -INT of a background job, writes the best plan found until then and exits 0."""
    (tmp_path / "i.json").write_text(json.dumps(hard_instance().to_json_dict()))
    process = start(
        "solve",
        tmp_path / "i.json",
        "-o",
        tmp_path / "p.json",
        "--time-limit",
        100,
        "--verbose",
        preexec_fn=before,
    )
    wait_for_line(process, "solving", "makespan", "gap")
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process, timeout=30)
    assert code == 0, err
    assert "best plan found until then" in err
    assert "makespan" in out
    assert invoke("check", tmp_path / "p.json").exit_code == 0


def test_an_interrupt_while_the_plan_is_made_does_not_cost_it(
    instance: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C, or one that comes as the search ends: the plan is made and written all the same."""
    certified = solver._certified

    def interrupted(*arguments: object, **options: object) -> Plan:
        os.kill(os.getpid(), signal.SIGINT)
        return certified(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(solver, "_certified", interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = invoke("solve", instance, "-o", tmp_path / "p.json", "--solver", "heuristic")
    assert result.exit_code == 0, result.output
    assert load_plan(tmp_path / "p.json").makespan == pytest.approx(13)
    assert signal.getsignal(signal.SIGINT) is before


def test_one_interrupt_ends_a_search_within_a_search(tmp_path: Path) -> None:
    """Stages with pairs are first solved as if plain, for half of the limit: Ctrl-C then ends all of it."""
    hard = hard_instance()
    pairing = [
        stage.model_copy(
            update={"t_bw": stage.t_b + stage.t_w, "t_fb": stage.t_f + stage.t_b + stage.t_w - 2}
        )
        for stage in hard.stages
    ]
    hard = hard.with_changes(stages=pairing)
    (tmp_path / "i.json").write_text(json.dumps(hard.to_json_dict()))
    process = start("solve", tmp_path / "i.json", "-o", tmp_path / "p.json", "--time-limit", 100, "--verbose")
    wait_for_line(process, "next phase")  # the search within has phases, the one around it has none
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, timeout=30)
    assert code == 0, err
    assert "Traceback" not in err
    assert err.endswith("zbsolve: interrupted: this is the best plan found until then\n")
    assert invoke("check", tmp_path / "p.json").exit_code == 0


def test_the_readmes_figures_hold() -> None:
    """The example of README.md: 591 ms, proven; 15.8 % of 1F1B's 702 ms."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    out = invoke("solve", ROOT / "docs/unequal-p4.json", "--time-limit", 30).stdout
    shown = [
        line.strip() for line in readme.split("-o plan.json\n    makespan")[1].split("\n\n")[0].splitlines()
    ]
    assert len(shown) == 7
    for line in ("makespan     " + shown[0], *(line for line in shown[1:] if line != "…")):
        assert " ".join(line.split()) in " ".join(out.split())


# --- compare and check ---------------------------------------------------------------------------


def test_compare_lists_baselines_and_the_plan(instance: Path, tmp_path: Path) -> None:
    """Baselines, the solved plan, both bubble rates by name, and the rule of what does not apply."""
    result = invoke("compare", instance, "--time-limit", 5)
    assert result.exit_code == 0, result.output
    for text in ("gpipe", "1f1b", "zb-h1", "zbsolve (", "bubble rate by makespan", "bubble rate by span"):
        assert text in result.stdout
    assert "zb-v (V)" in result.stdout
    assert "13.3% of the step" in result.stdout
    odd = tmp_path / "odd.json"
    odd.write_text(json.dumps(equal_stages(3, 4, memory_cap=3.0).to_json_dict()))
    result = invoke("compare", odd, "--solver", "heuristic")
    assert "not applicable: dualpipe: dualpipe needs p and m even: p is 3, m is 4" in result.stdout


def test_compare_json(plan: Path) -> None:
    """The data of the table, from a plan file without solving again."""
    result = invoke("compare", plan, "--json")
    data = json.loads(result.stdout)
    rows = {row["name"]: row for row in data["rows"]}
    assert rows["1f1b"]["makespan"] == pytest.approx(15)
    assert data["rows"][-1]["makespan"] == pytest.approx(13)
    assert rows["gpipe"]["fits_cap"] is False  # 4 in flight, cap 2
    assert data["status"] == "optimal"
    # m = 4 is under the 2p that the V family's DualPipe needs; m = 4 is 2p for two replicas on 2 devices.
    assert data["not_applicable"] == []


def test_check_accepts_a_valid_plan(plan: Path) -> None:
    """24 tasks (2 stages * 4 * 3); 4 messages each way."""
    result = invoke("check", plan)
    assert result.exit_code == 0
    assert "valid: 24 tasks and 8 messages on 2 devices" in result.stdout


def test_check_lists_each_violation_and_exits_1(plan: Path, tmp_path: Path) -> None:
    """A plan whose first B is moved to the start, and one whose makespan is understated."""
    data = json.loads(plan.read_text())
    action = next(a for a in data["programs"][0]["actions"] if a["op"] == "B")
    action["start"], action["end"] = 0.0, 1.0
    (tmp_path / "moved.json").write_text(json.dumps(data))
    result = invoke("check", tmp_path / "moved.json")
    assert result.exit_code == 1
    assert "dependency: B0." in result.stdout
    assert "one at a time: device 0" in result.stdout
    assert "moved.json: not valid:" in one_line(result)

    data = json.loads(plan.read_text())
    data["makespan"] = 12.0
    (tmp_path / "boast.json").write_text(json.dumps(data))
    result = invoke("check", tmp_path / "boast.json")
    assert result.exit_code == 1
    assert "makespan is stated as 12, the programs give 13" in result.stdout
    for name in (("run", "boast.json"), ("export", "boast.json"), ("compare", "boast.json")):
        assert invoke(name[0], tmp_path / name[1]).exit_code == 1


# --- show, export, import ------------------------------------------------------------------------


def test_show_a_plan(plan: Path, tmp_path: Path) -> None:
    """Text by default; a picture and a viewer's trace by the output's name."""
    result = invoke("show", plan, "--width", 100)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("0 |F0ff")
    assert invoke("show", plan, "-o", tmp_path / "x.svg").exit_code == 0
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")
    assert invoke("show", plan, "-o", tmp_path / "x.trace.json").exit_code == 0
    assert json.loads((tmp_path / "x.trace.json").read_text())["traceEvents"]


def test_show_an_instance(instance: Path, tmp_path: Path) -> None:
    """The stages' table or picture; a timeline is refused."""
    result = invoke("show", instance)
    assert result.exit_code == 0, result.output
    assert "pair: 2 devices, 2 stages, 4 micro-batches" in result.stdout
    assert invoke("show", instance, "-o", tmp_path / "x.png").exit_code == 0
    result = invoke("show", instance, "-o", tmp_path / "x.trace.json")
    assert result.exit_code == 2
    assert "solve it first" in one_line(result)


@pytest.mark.parametrize("name", ["x.json", "x.gif", "x"])
def test_show_refuses_other_formats(plan: Path, tmp_path: Path, name: str) -> None:
    """One line lists what is supported."""
    result = invoke("show", plan, "-o", tmp_path / name)
    assert result.exit_code == 2
    assert "use .html, .png, .svg, .pdf or .trace.json" in one_line(result)


def test_show_refuses_a_file_of_no_known_kind(tmp_path: Path) -> None:
    """The schema says what a file is; without one, the line lists them."""
    (tmp_path / "x.json").write_text("{}")
    result = invoke("show", tmp_path / "x.json")
    assert result.exit_code == 2
    assert "zbsolve.plan/1" in one_line(result)


def test_export_then_import_is_the_same_plan(instance: Path, plan: Path, tmp_path: Path) -> None:
    """A plan through the torch CSV and back has the same orders, times and bound."""
    out = tmp_path / "x.csv"
    assert invoke("export", plan, "--format", "torch-csv", "-o", out).exit_code == 0
    assert out.read_text() == invoke("export", plan).stdout
    result = invoke("import", out, "--instance", instance, "-o", tmp_path / "q.json")
    assert result.exit_code == 0, result.output
    before, after = load_plan(plan), load_plan(tmp_path / "q.json")
    assert after.schedule() == before.schedule()
    assert after.lower_bound == pytest.approx(before.lower_bound)
    assert after.solver.name == "imported from x.csv"
    assert invoke("check", tmp_path / "q.json").exit_code == 0


def test_a_lowered_export_comes_back_and_counts_what_it_leaves_out(
    instance: Path, plan: Path, tmp_path: Path
) -> None:
    """4 micro-batches over one boundary are 4 of each message; stderr says so, and which torch reads it."""
    out = tmp_path / "x.csv"
    result = invoke("export", plan, "--format", "torch-csv-comms", "-o", out)
    assert 'torch 2.10 and later read it with _load_csv(file, format="compute_comms")' in one_line(result)
    result = invoke("import", out, "--instance", instance, "-o", tmp_path / "q.json")
    assert result.exit_code == 0, result.output
    left = "x.csv: left out: 4 SEND_F, 4 RECV_B, 2 REDUCE_GRAD, 4 RECV_F, 4 SEND_B\n"
    assert one_line(result).endswith(left)
    assert load_plan(tmp_path / "q.json").schedule() == load_plan(plan).schedule()


def test_import_errors_have_their_exit_codes(instance: Path, tmp_path: Path) -> None:
    """A bad cell is exit 2; orders that deadlock or overrun the cap are exit 1."""
    csv = tmp_path / "x.csv"
    csv.write_text("0F0x\n1F0\n")
    result = invoke("import", csv, "-i", instance)
    assert result.exit_code == 2
    assert "x.csv: row 0, cell 1: '0F0x'" in one_line(result)

    small = tmp_path / "small.json"
    small.write_text(json.dumps(equal_stages(2, 2, memory_cap=1.0).to_json_dict()))
    csv.write_text("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n")
    result = invoke("import", csv, "-i", small)
    assert result.exit_code == 1
    assert "is over the cap of 1" in one_line(result)

    csv.write_text("0F0,0I0,0W0,0F1,0I1,0W1\n1F1,1I1,1W1,1F0,1I0,1W0\n")
    result = invoke("import", csv, "-i", small)
    assert result.exit_code == 1
    assert "the orders deadlock" in one_line(result)


def test_verbose_shows_the_traceback(tmp_path: Path) -> None:
    """For whoever reports a fault: the place in the code, and still the one line and the exit code."""
    code, _, err = finish(start("check", tmp_path / "none.json", "--verbose"))
    assert code == 2
    assert "Traceback" in err
    assert "zbsolve: " in err.splitlines()[-1]


def test_a_closed_pipe_is_not_an_error(plan: Path) -> None:
    """``zbsolve show p.json | head -1`` is quiet."""
    process = start("show", plan, "--width", 4000)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.wait(timeout=30)


# --- run, profile, demo --------------------------------------------------------------------------


def test_without_torch_one_line_says_how_to_get_it(plan: Path, tmp_path: Path) -> None:
    """Exit 3 and the command to type, for each command that needs torch."""
    code = "import sys; sys.modules['torch'] = None; from zbsolve.cli import main; main()"
    for arguments in (
        ("run", plan),
        ("profile", "gpt", "-o", tmp_path / "i2.json"),
        ("demo", "--out", tmp_path / "d"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
            timeout=60,
        )
        assert done.returncode == 3, done.stderr
        assert done.stderr == 'zbsolve: torch is not installed: pip install "zbsolve[runtime]"\n'
        assert done.stdout == ""


def test_bad_layer_lists_are_refused(plan: Path) -> None:
    """Before anything is loaded."""
    for text in ("3,x", "", "3,,2", "0,4"):
        result = invoke("run", plan, "--layers-per-stage", text)
        assert result.exit_code == 2
        assert "--layers-per-stage" in one_line(result)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan, str]:
    """An emulated run of a small plan: its folder, plan, and what the command printed."""
    folder = tmp_path_factory.mktemp("run")
    instance = equal_stages(2, 3, 10.0, 10.0, 8.0, 0.5)
    plan = solve(instance, time_limit=5).plan
    plan.save(folder / "p.json")
    code, out, err = finish(
        start("run", folder / "p.json", "--emulate", "--steps", 2, "--trace-out", folder / "t.json"), 120
    )
    assert code == 0, err
    return folder, plan, out


@needs_torch
def test_run_prints_predicted_and_measured(emulated: tuple[Path, Plan, str]) -> None:
    """The table op by op, where the time went, and the makespans, labelled emulated."""
    _, plan, out = emulated
    for text in ("op by op", "where the time went", "(emulated", "gradients: not checked"):
        assert text in out
    assert f"predicted {plan.makespan:g} ms" in out


@needs_torch
def test_show_a_measured_run(emulated: tuple[Path, Plan, str], tmp_path: Path) -> None:
    """Alone, over its plan, as a picture, and in the viewers' format; with another plan it is refused."""
    folder, _, _ = emulated
    alone = invoke("show", folder / "t.json", "--width", 100)
    assert alone.exit_code == 0, alone.output
    assert "measured makespan" in alone.stdout
    both = invoke("show", folder / "p.json", "--trace", folder / "t.json", "--width", 100)
    assert both.exit_code == 0, both.output
    assert "0 predicted |" in both.stdout
    assert " 0 measured |" in both.stdout
    for name in ("x.png", "x.trace.json"):
        result = invoke("show", folder / "p.json", "--trace", folder / "t.json", "-o", tmp_path / name)
        assert result.exit_code == 0, result.output
        assert invoke("show", folder / "t.json", "-o", tmp_path / name).exit_code == 0
    instance = equal_stages(2, 3)
    order = solve(instance, time_limit=5).plan.schedule().orders
    certify(instance, simulate(instance, order), "makespan", "other").save(tmp_path / "other.json")
    result = invoke("show", tmp_path / "other.json", "--trace", folder / "t.json")
    assert result.exit_code == 2
    assert "belongs to another plan" in one_line(result)


@needs_torch
@pytest.mark.slow
def test_demo_end_to_end(tmp_path: Path) -> None:
    """The quick demo: gradients equal, every promised file written and valid."""
    code, out, err = finish(start("demo", "--quick", "--out", tmp_path / "d"), timeout=280)
    assert code == 0, err
    for name in ("instance", "plan", "trace", "plan_emulated", "trace_emulated"):
        assert (tmp_path / "d" / f"{name}.json").is_file()
    assert (tmp_path / "d" / "gantt.png").read_bytes().startswith(b"\x89PNG")
    assert invoke("check", tmp_path / "d" / "plan.json").exit_code == 0
    assert "yes" in out
    assert "NO" not in out
