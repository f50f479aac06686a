"""The benchmark and the judge of certificates: rows, summaries, known figures, contradictions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import zbsolve.benchmark.run
from zbsolve import cli
from zbsolve.benchmark.known import (
    Best,
    Known,
    contradictions,
    digest,
    improved,
    load_known,
    save_known,
    shipped_path,
)
from zbsolve.benchmark.random_instances import random_instance
from zbsolve.benchmark.rows import Row, summarise
from zbsolve.benchmark.run import run_cases, run_plain
from zbsolve.benchmark.suites import SUITES, Case, make_cases
from zbsolve.bounds.catalogue import ARGUMENTS, best_bound
from zbsolve.errors import InputError
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.plan.actions import COMPUTE_OPS
from zbsolve.plan.certificate import Proof
from zbsolve.plan.plan import Plan
from zbsolve.report.bench_tables import COLUMNS, cells, markdown_section, plain_line, write_markdown
from zbsolve.solver.portfolio import solve
from zbsolve.solver.state import LIMIT_KEPT_TASKS
from zbsolve.solver.verify import reverify

EMPTY = Known(schema="zbsolve.known/1", source="tests", instances={})
SMALL = equal_stages(2, 3, name="small")


def invoke(*arguments: object) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def small_plan(instance: Instance = SMALL) -> Plan:
    """p = 2, m = 3, all ones, no cap: 3 * 3 of work, and device 1 starts after one F: makespan 10."""
    plan = solve(instance, time_limit=5).plan
    assert (plan.cost, plan.status) == (10.0, "optimal")
    return plan


def best(cost: float, bound: float) -> Best:
    """An entry of known.json."""
    return Best(
        cost=cost,
        cost_by="somebody",
        cost_version="0",
        cost_date="2026-01-01",
        bound=bound,
        proof=Proof(method="two windows", statement="because"),
        bound_version="0",
        bound_date="2026-01-01",
    )


def known_with(instance: Instance, entry: Best) -> Known:
    """A known.json with one entry, of the makespan."""
    data = {"digest": digest(instance), "best": {"makespan": entry.model_dump()}}
    return Known.model_validate(
        {"schema": "zbsolve.known/1", "source": "tests", "instances": {instance.name: data}}
    )


# --- re-deriving bounds ----------------------------------------------------------------------------


def test_a_combinatorial_bound_is_re_derived() -> None:
    """Makespan 10 of p = 2, m = 3 comes out again, with the method and device that give it."""
    outcome = reverify(small_plan())
    assert outcome.confirmed
    assert outcome.violation is None
    assert outcome.derived.value == pytest.approx(10)
    assert outcome.sentence.startswith("bound re-verified: 10 ms (")


def test_a_lower_stated_bound_holds_too() -> None:
    """A bound below what can be derived is true; the higher one is named."""
    plan = small_plan().model_copy(update={"lower_bound": 8.0, "gap": 0.2, "status": "feasible"})
    outcome = reverify(plan)
    assert outcome.confirmed
    assert "gives 10" in outcome.sentence


def raised(plan: Plan, method: str) -> dict[str, Any]:
    """Data of a plan whose last task starts 2 late (makespan 12), its bound raised from 10 to 11 by hand."""
    data = plan.to_json_dict()
    actions = [action for program in data["programs"] for action in program["actions"]]
    last = max(actions, key=lambda action: (action["end"], action["op"] == "W"))
    last["start"] += 2
    last["end"] += 2
    spans = []
    for program in data["programs"]:
        compute = [action for action in program["actions"] if action["op"] in COMPUTE_OPS]
        spans.append(max(a["end"] for a in compute) - min(a["start"] for a in compute))
    return data | {
        "makespan": 12.0,
        "span": max(spans),
        "status": "feasible",
        "lower_bound": 11.0,
        "gap": 1 / 12,
        "bound_proof": {"method": method, "statement": "trust me"},
    }


@pytest.mark.parametrize("method", ["two windows", "one machine", "memory area"])
def test_check_refuses_a_bound_raised_by_hand(method: str, tmp_path: Path) -> None:
    """Optimum 10, a plan of cost 12, its bound raised to 11 in a combinatorial method's name: exit 1."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps(raised(small_plan(), method)))
    result = invoke("check", path)
    assert result.exit_code == 1
    expected = f"bound: lower_bound is stated as 11 by {method}, which this instance does not give"
    assert expected in result.stdout
    assert "1 violation" in result.stderr


def test_check_says_whose_word_a_bound_is(tmp_path: Path) -> None:
    """The same bound in an exact model's name: no formula refutes it, so it is said to be unchecked."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps(raised(small_plan(), "cpsat model")))
    result = invoke("check", path)
    assert result.exit_code == 0, result.stdout
    assert (
        "bound not re-derived here: 11 ms stated by cpsat model; the combinatorial bound gives 10"
        in result.stdout
    )


def test_check_says_that_the_bound_is_re_verified(tmp_path: Path) -> None:
    """An honest plan: exit 0 and the bound's confirmation."""
    path = tmp_path / "p.json"
    small_plan().save(path)
    result = invoke("check", path)
    assert result.exit_code == 0
    assert "bound re-verified: 10 ms" in result.stdout


def test_a_proof_that_gives_less_than_stated_is_refuted() -> None:
    """lower_bound 10 with a proof of value 9: the file contradicts itself."""
    proof = Proof(method="two windows", statement="", value=9.0)
    outcome = reverify(small_plan().model_copy(update={"bound_proof": proof}))
    assert outcome.violation is not None
    assert "its own proof gives 9" in outcome.violation.message


# --- known.json --------------------------------------------------------------------------------------


def test_the_shipped_figures_are_consistent() -> None:
    """Each bound is at most each cost, and what is known is of the instance that ships."""
    known = load_known(shipped_path())
    cases = [case for suite in ("published", "published-v", "unequal") for case in make_cases(suite)]
    assert len(cases) == 2 * (24 + 9 + 12)
    names = {case.instance.name for case in cases}
    for name, entry in known.instances.items():
        assert name in names or name.startswith("random-")
        for objective, figures in (entry.best or {}).items():
            assert figures.bound <= figures.cost * (1 + 1e-6), (name, objective)
    for case in cases:
        entry = known.instances.get(case.instance.name)
        if entry is None:
            continue
        if entry.best:
            assert entry.digest == digest(case.instance), f"{case.instance.name} has changed"
        figures, published = (
            known.best(case.instance, case.objective),
            known.published(case.instance, case.objective),
        )
        if figures is not None and published is not None:
            assert figures.bound <= published.cost + published.rounding


def test_known_combinatorial_bounds_are_derived_again() -> None:
    """What known.json has from a formula must come out of today's formulas, or one of the two is unsound."""
    known = load_known(shipped_path())
    combinatorial = {argument.name for argument in ARGUMENTS if not argument.rests_on_lags}
    derived = 0
    for case in (case for suite in ("published", "unequal") for case in make_cases(suite)):
        figures = known.best(case.instance, case.objective)
        if figures is None or figures.proof.method not in combinatorial:
            continue
        bound = best_bound(case.instance, case.objective)
        assert figures.bound <= bound.value * (1 + 1e-6), (case.instance.name, case.objective)
        derived += 1
    assert derived >= 60


def test_published_rates_and_costs_agree() -> None:
    """1.5B, m = 24, 1p: bubble rate 0.1585 by span of 24 * (18.522 + 18.086 + 9.337) = 1102.68 of work.

    1102.68 / (1 - 0.1585) = 1310.375; the published cost is 1310.405, within the rate's four decimals.
    """
    known = load_known(shipped_path())
    (case,) = make_cases("published", ["zb-1.5B-m24-1p"], ["span"])
    published = known.published(case.instance, "span")
    assert published is not None
    assert published.cost == pytest.approx(1310.405)
    assert published.schedule == "zb-1p"
    rate = 1 - case.instance.device_work(0) / published.cost
    assert rate == pytest.approx(0.1585, abs=0.5e-4)
    (case,) = make_cases("published-v", ["zbv-p16-m48"], ["span"])
    published = known.published(case.instance, "span")
    assert published is not None
    # 48 micro-batches, two stages: 96 * 38.463 = 3692.448 of work; over 1 - 0.0697 that is 3969.0948.
    assert published.cost == pytest.approx(3969.0948)
    assert known.published(case.instance, "makespan") is None


def test_an_entry_never_gets_worse() -> None:
    """Cost and bound are taken one by one, each only where it is better."""
    plan = small_plan()  # cost and bound 10
    assert improved(known_with(SMALL, best(10.0, 10.0)), plan, "d").best(SMALL, "makespan") == best(
        10.0, 10.0
    )
    better_cost = improved(known_with(SMALL, best(9.0, 8.0)), plan, "today").best(SMALL, "makespan")
    assert better_cost is not None
    assert (better_cost.cost, better_cost.cost_date) == (9.0, "2026-01-01")
    assert (better_cost.bound, better_cost.bound_date) == (10.0, "today")
    both = improved(known_with(SMALL, best(12.0, 8.0)), plan, "today").best(SMALL, "makespan")
    assert both is not None
    assert (both.cost, both.bound, both.status) == (10.0, 10.0, "optimal")
    new = improved(EMPTY, plan, "today")
    assert new.best(SMALL, "makespan") == both.model_copy(update={"cost_by": plan.solver.name})
    assert new.best(SMALL, "span") is None


def test_an_entry_of_a_changed_instance_is_ignored() -> None:
    """Another hop under the same name: what was known says nothing, and is replaced."""
    changed = equal_stages(2, 3, t_comm=0.5, name="small")
    known = known_with(SMALL, best(1.0, 1.0))
    assert known.best(changed, "makespan") is None
    plan = solve(changed, time_limit=5).plan
    assert list(contradictions(known, plan)) == []
    entry = improved(known, plan, "today").best(changed, "makespan")
    assert entry is not None
    assert entry.cost == plan.cost


def test_known_figures_survive_the_file(tmp_path: Path) -> None:
    """Written and read again they are equal; the shipped file keeps its layout."""
    path = tmp_path / "known.json"
    known = known_with(SMALL, best(12.0, 8.0))
    save_known(path, known)
    assert load_known(path) == known
    save_known(path, load_known(shipped_path()))
    assert path.read_bytes() == shipped_path().read_bytes()
    path.write_text('{"schema": "zbsolve.known/1", "source": "", "instances": {"a": {"bets": {}}}}')
    with pytest.raises(InputError, match=r"known.json: instances.a.bets: unknown field"):
        load_known(path)


@pytest.mark.parametrize(
    ("cost", "bound", "says"),
    [(20.0, 10.5, "cost 10 (found by"), (9.5, 8.0, "cost 9.5 (known, 2026-01-01: found by somebody)")],
)
def test_contradictions_name_both_sides(cost: float, bound: float, says: str) -> None:
    """The optimum is 10: a known bound of 10.5 and a known cost of 9.5 are both impossible."""
    (sentence,) = contradictions(known_with(SMALL, best(cost, bound)), small_plan())
    assert sentence.startswith("small, makespan: ")
    assert says in sentence
    assert sentence.endswith("one of them is wrong")
    assert list(contradictions(known_with(SMALL, best(10.0, 10.0)), small_plan())) == []


# --- suites and rows -----------------------------------------------------------------------------------


def test_suites() -> None:
    """24 cells, 9 of V, 12 unequal, 60 random and 6 large, twice each; numbers are sorted as numbers."""
    sizes = {suite: len(make_cases(suite)) for suite in (*SUITES, "all")}
    assert sizes == {
        "published": 48,
        "published-v": 18,
        "unequal": 24,
        "random": 120,
        "v-memory": 72,
        "large": 12,
        "all": 294,
    }
    models = dict.fromkeys(case.instance.name.split("-")[1] for case in make_cases("published"))
    assert list(models) == ["1.5B", "6.2B", "14.6B", "28.3B"]
    with pytest.raises(InputError, match="suite 'x' is not known: use one of published, "):
        make_cases("x")
    with pytest.raises(InputError, match="--only nothing: the suite 'unequal' has no such instance"):
        make_cases("unequal", ["nothing"])


def test_large_steps_are_within_what_the_limit_is_kept_for() -> None:
    """60,000 tasks is the largest: 3 * 4 * 5,000; the limit holds up to 65,536."""
    sizes = [case.instance.num_tasks for case in make_cases("large", objectives=("span",))]
    assert sizes[0] == max(sizes) == 60_000 <= LIMIT_KEPT_TASKS


@pytest.mark.parametrize(
    ("limit", "seconds", "kept"), [(2, 3.0, True), (2, 3.1, False), (20, 24.0, True), (20, 24.1, False)]
)
def test_a_row_says_whether_its_limit_was_kept(limit: float, seconds: float, kept: bool) -> None:
    """2 s may be 3, 20 s may be 24; the summary counts them and names the most of a limit taken."""
    late, quick = row(0.1, time_limit=limit, seconds=seconds), row(0.0, time_limit=10.0, seconds=1.0)
    assert late.limit_kept is kept
    (summary,) = summarise([late, quick])
    assert (summary.limits_kept, summary.most_of_limit) == (1 + kept, seconds / limit)


def row(gap: float, **changes: Any) -> Row:
    """A row with a gap, of cost 100."""
    fields: dict[str, Any] = {
        "suite": "s",
        "instance": f"i{gap:g}",
        "objective": "span",
        "cost": 100.0,
        "bound": 100.0 * (1 - gap),
        "gap": gap,
        "status": "optimal" if gap == 0 else "feasible",
        "found_by": "heuristic",
        "proven_by": "two windows",
        "statement": "",
        "seconds": 1.0,
        "published": None,
        "published_rounding": None,
        "published_schedule": None,
        "one_f_one_b": None,
        "one_f_one_b_reason": "1F1B does not fit the cap: device 0 would need 2 MiB, has 1",
        "heuristic": 100.0,
    }
    return Row(**(fields | changes))


def test_summaries() -> None:
    """Gaps 0, 0, 0.001, 0.004, 0.02: median 0.001, nearest-rank 90th percentile the fifth of five, 0.02."""
    rows = [
        row(0.02, published=99.9, published_rounding=0.05),
        row(0.0, published=99.9, published_rounding=0.2),
        row(0.0, published=125.0, published_rounding=0.05, one_f_one_b=200.0, one_f_one_b_reason=""),
        row(0.004),
        row(0.001),
    ]
    (summary,) = summarise(rows)
    assert (summary.rows, summary.optimal) == (5, 2)
    assert (summary.within_01_percent, summary.within_05_percent) == (3, 4)
    assert (summary.median_gap, summary.p90_gap, summary.max_gap) == (0.001, 0.02, 0.02)
    assert summary.worst == "i0.02, span"
    # 100 is above 99.95 (worse), within 99.9 + 0.2 (neither), below 125 (better).
    assert (summary.published, summary.worse_than_published, summary.better_than_published) == (3, 1, 1)
    assert summary.median_one_f_one_b_gain == 0.5
    assert rows[2].published_gain == pytest.approx(0.2)


def test_cells_say_why_there_is_no_1f1b() -> None:
    """Where 1F1B is over the cap its column says so instead of a cost."""
    texts = dict(zip((column.title for column in COLUMNS), cells(row(0.0)), strict=False))
    assert texts["1F1B"] == "does not fit"
    assert texts["published"] == "-"


def test_every_row_is_held_against_what_is_known() -> None:
    """A planted bound above the optimum is found by the run itself."""
    cases = [Case("tests", SMALL, "makespan")]
    report = run_cases(cases, known_with(SMALL, best(20.0, 10.5)), time_limit=5, date="d")
    assert len(report.contradictions) == 1
    (only,) = report.rows
    assert (only.cost, only.gap, only.optimal) == (10.0, 0.0, True)
    # 1F1B with fused backwards of 2: 3 * 3 of work and device 1's first F, then B of 2 on device 0: 12.
    assert only.one_f_one_b == 12.0
    assert only.one_f_one_b_gain == pytest.approx(1 / 6)


def test_ctrl_c_keeps_the_rows_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in the second case: the first stays, and the report says that it is partial."""
    real = zbsolve.benchmark.run.solve
    seen = []

    def interrupted(instance: Instance, **options: Any) -> Any:
        seen.append(instance.name)
        if instance.name == "second":
            raise KeyboardInterrupt
        return real(instance, **options)

    monkeypatch.setattr(zbsolve.benchmark.run, "solve", interrupted)
    names = ("first", "second", "third")
    cases = [Case("tests", equal_stages(2, 2, name=name), "makespan") for name in names]
    report = run_cases(cases, EMPTY, time_limit=5, date="d")
    assert report.interrupted
    assert [only.instance for only in report.rows] == ["first"]
    assert "third" not in seen
    assert report.to_json_dict()["planned"] == 3
    assert "Interrupted after 1 of 3 rows." in markdown_section(report, "tests")


def test_the_first_plan_alone() -> None:
    """``solver="heuristic"``: nothing later improves what the row's own column of heuristics says."""
    instance = equal_stages(4, 9, 2.0, 3.0, 1.0, 0.7, memory_cap=3.0)
    cases = [Case("tests", instance, "makespan")]
    (only,) = run_cases(cases, EMPTY, time_limit=5, date="d", solver="heuristic").rows
    first = solve(instance, solver="heuristic").plan
    assert (only.cost, only.heuristic, only.found_by) == (first.cost, first.cost, first.solver.name)


def test_plain_models_run_or_say_why_not() -> None:
    """All three prove 10 on the small instance; 16 stages and 64 micro-batches are too many for a MILP."""
    runs = list(run_plain(SMALL, "makespan", 10.0, 0))
    assert [run.solver for run in runs] == ["cpsat", "milp-highs", "milp-cbc"]
    for run in runs:
        if run.skipped is None:
            assert run.cost == pytest.approx(10.0)
            assert run.bound == pytest.approx(10.0)
    assert any(run.solver == "cpsat" and run.skipped is None for run in runs)
    runs = list(run_plain(equal_stages(16, 200), "makespan", 0.5, 0))
    assert [plain_line(run) for run in runs] == [
        "  plain cpsat: skipped: 9600 tasks are over 8000",
        "  plain milp-highs: skipped: 9600 tasks are over 1000",
        "  plain milp-cbc: skipped: 9600 tasks are over 1000",
    ]


# --- Markdown and the command ----------------------------------------------------------------------------


def test_a_section_is_replaced_in_place(tmp_path: Path) -> None:
    """The rest of the file stays; a lost mark is refused, and the file is left alone."""
    path = tmp_path / "benchmarks.md"
    path.write_text("# Mine\n\nintroduction\n")
    report = run_cases([Case("tests", SMALL, "makespan")], EMPTY, time_limit=5, date="d")
    write_markdown(path, report)
    once = path.read_text()
    assert once.startswith("# Mine\n\nintroduction\n\n<!-- bench tests: begin -->\n## tests\n")
    assert markdown_section(report, "tests") in once
    path.write_text(once + "\nafter\n")
    write_markdown(path, report)
    assert path.read_text() == once + "\nafter\n"
    broken = once.replace("<!-- bench tests: end -->", "")
    path.write_text(broken)
    with pytest.raises(InputError, match="marks"):
        write_markdown(path, report)
    assert path.read_text() == broken


def test_the_command_on_one_cell(tmp_path: Path) -> None:
    """1.5B, m = 24, 1p: proven at the published 1310.405; figures, results and Markdown are written."""
    out, known, markdown = tmp_path / "r.json", tmp_path / "k.json", tmp_path / "b.md"
    save_known(known, EMPTY.model_copy(update={"instances": dict(load_known(shipped_path()).instances)}))
    options = ("--objective", "makespan", "--time-limit", 5, "--known", known, "--update-known")
    result = invoke("bench", "--only", "zb-1.5B-m24-1p", *options, "-o", out, "--markdown", markdown)
    assert result.exit_code == 0, result.stderr
    assert "[1/1] zb-1.5B-m24-1p, makespan" in result.stderr
    assert "published: 1 of 1 proven optimal" in result.stdout
    assert "worse on 0 of 1" in result.stdout
    data = json.loads(out.read_text())
    assert data["schema"] == "zbsolve.bench/1"
    (only,) = data["rows"]
    assert only["cost"] == pytest.approx(1310.405)
    assert only["status"] == "optimal"
    assert "| zb-1.5B-m24-1p | makespan | 1,310.405 |" in markdown.read_text()
    command = "zbsolve bench --suite published --only zb-1.5B-m24-1p --time-limit 5 --objective makespan"
    assert f"`{command}`" in markdown.read_text()
    assert data["command"] == command
    (case,) = make_cases("published", ["zb-1.5B-m24-1p"], ["makespan"])
    entry = load_known(known).best(case.instance, "makespan")
    assert entry is not None
    assert entry.status == "optimal"


def test_the_command_fails_loudly_on_a_contradiction(tmp_path: Path) -> None:
    """A planted bound of 1311, above the optimum of 1310.405: exit 1, both proofs shown, no file changed."""
    (case,) = make_cases("published", ["zb-1.5B-m24-1p"], ["makespan"])
    known = tmp_path / "k.json"
    save_known(known, known_with(case.instance, best(2000.0, 1311.0)))
    before = known.read_text()
    options = ("--objective", "makespan", "--time-limit", 5, "--known", known, "--update-known")
    result = invoke("bench", "--only", "zb-1.5B-m24-1p", *options)
    assert result.exit_code == 1
    assert "CONTRADICTION: zb-1.5B-m24-1p, makespan: cost 1310.405 (found by" in result.stdout
    assert "bound 1311 (known, 2026-01-01: two windows: because): one of them is wrong" in result.stdout
    assert "zbsolve: 1 pair of cost and bound contradicts each other: see above" in result.stderr
    assert known.read_text() == before


def test_the_readmes_results_are_those_of_the_benchmark() -> None:
    """Counts and worst gap of README.md's last row, from the section that the command wrote."""
    root = Path(__file__).resolve().parent.parent
    section = (
        (root / "docs/benchmarks.md").read_text(encoding="utf-8").partition("<!-- bench published: end")[0]
    )
    counts = re.search(r"published: (\d+) of (\d+) proven optimal, (\d+) within 0.1 %, (\d+) within", section)
    worst = re.search(r"worst ([\d.]+)% \(", section)
    against = re.search(r"worse on (\d+) of 48, better on (\d+)", section)
    assert counts is not None
    assert worst is not None
    assert against is not None
    optimal, rows, tenth, half = counts.groups()
    shown = [rows, optimal, tenth, half, f"{worst[1]} %", *against.groups()]
    row = "| **all** | " + " | ".join(f"**{text}**" for text in shown) + " |"
    assert row in (root / "README.md").read_text(encoding="utf-8")


def test_bad_options_are_one_line() -> None:
    """Unknown suite, unknown instance, no time: exit 2 before anything is solved."""
    for options in (("--suite", "x"), ("--only", "x"), ("--time-limit", "0"), ("-o", "/no/such/r.json")):
        result = invoke("bench", *options)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
        assert result.stdout == ""


def test_a_random_case_solves(tmp_path: Path) -> None:
    """The smallest random instance by the command, with every plain model beside it."""
    small = min(
        (random_instance(seed) for seed in range(60)), key=lambda i: i.num_stages * i.num_microbatches
    )
    out = tmp_path / "r.json"
    options = ("--suite", "random", "--only", small.name, "--objective", "span", "--time-limit", 1)
    result = invoke("bench", *options, "--versus-plain", "-o", out)
    assert result.exit_code == 0, result.stdout
    (only,) = json.loads(out.read_text())["rows"]
    assert only["bound"] <= only["cost"]
    assert [run["solver"] for run in only["plain"]] == ["cpsat", "milp-highs", "milp-cbc"]
    assert result.stdout.count("  plain ") == 3
