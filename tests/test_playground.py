"""The playground's application: settings, baselines, jobs in processes of their own, downloads, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from zbsolve.errors import InputError
from zbsolve.model.instance import equal_stages
from zbsolve.plan.check import check_plan
from zbsolve.plan.plan import Plan, load_plan
from zbsolve.playground.app import DOWNLOADS, create_app
from zbsolve.playground.settings import Settings, parse_settings

ROOT = Path(__file__).resolve().parent.parent

# Not closed within its limit: what cancelling is for. Too short a limit for machine code to be compiled.
HARD = {"p": 4, "m": 12, "placement": "v", "t_b": 1.3, "t_w": 0.7, "t_comm": 0.1, "cap": "0.6p"}
HARD["time_limit"] = 14


@pytest.fixture
def client() -> Iterator[TestClient]:
    """The application with its clock running."""
    with TestClient(create_app(), base_url="http://127.0.0.1") as client:
        yield client


def events(client: TestClient, key: str) -> list[dict[str, Any]]:
    """All lines of a job; returns when it has ended."""
    text = client.get(f"/api/jobs/{key}/events").text
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]


def baselines(client: TestClient, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of an answer about baselines."""
    answer = client.post("/api/baselines", json=settings)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def of_type(lines: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """Lines of one type by name."""
    return {line["name"]: line for line in lines if line["type"] == kind}


def test_a_form_is_an_instance_whose_chunks_share_the_devices_work() -> None:
    """V placement, v = 2: stages of half the times and memory, devices 0 1 1 0; cap 1p is p M_B = 2."""
    instance = Settings(p=2, m=3, v=2, placement="v", t_f=2.0, mem_b=1.0, cap="1p").to_instance()
    assert [stage.device for stage in instance.stages] == [0, 1, 1, 0]
    assert {(stage.t_f, stage.t_b, stage.mem_b) for stage in instance.stages} == {(1.0, 0.5, 0.5)}
    assert instance.memory_cap == (2.0, 2.0)


def test_v_counts_only_where_there_are_chunks() -> None:
    """Linear: one stage a device whatever v says."""
    assert Settings(p=3, v=4).to_instance().num_stages == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"p": 0}, "settings: p: "),
        ({"speed": 3}, "settings: speed: unknown field"),
        ({"placement": "ring"}, "settings: placement: "),
        ({"time_limit": 1e9}, "settings: time_limit: "),
        ({"t_f": float("nan")}, "settings: t_f: "),
        ([], "settings: "),
    ],
)
def test_bad_settings_name_the_field(data: Any, message: str) -> None:
    """One line, with the field."""
    with pytest.raises(InputError, match=message):
        parse_settings(data)


def test_more_tasks_than_a_page_shows_are_refused() -> None:
    """4096 x 4096 x 3 tasks: said before anything is built."""
    with pytest.raises(InputError, match="50,331,648 tasks: the page shows up to 60,000"):
        Settings(p=4096, m=4096).to_instance()


def test_baselines_come_at_once_with_a_drawing(client: TestClient) -> None:
    """p = 4, m = 8, ones: 1F1B (8 + 3) * 3 = 33, ZB-H1 24 + 3 = 27. The chosen one comes first."""
    lines = baselines(client, {"p": 4, "m": 8, "schedule": "zb-h1"})
    assert [line["type"] for line in lines[:3]] == ["head", "row", "page"]
    assert lines[-1] == {"type": "end"}
    assert (lines[0]["tasks"], lines[1]["name"]) == (96, "zb-h1")
    rows = of_type(lines, "row")
    assert (rows["1f1b"]["makespan"], rows["zb-h1"]["makespan"]) == (33, 27)
    assert rows["zb-h1"]["gain_text"] == "18.2% of the step"
    assert lines[2]["page"]["lanes"][0]["figures"]["makespan"] == 27
    assert list(rows)[-2:] == ["zb-1p", "zb-2p"]
    assert set(rows) | set(of_type(lines, "rule")) == set(lines[0]["names"])


def test_a_schedule_that_does_not_apply_gives_way_to_one_that_does(client: TestClient) -> None:
    """DualPipe wants an even p: another is drawn, and the rule is told."""
    lines = baselines(client, {"p": 3, "schedule": "dualpipe"})
    assert "dualpipe" in of_type(lines, "rule")
    [name] = of_type(lines, "page")
    assert name != "dualpipe"


def test_the_number_of_consecutive_micro_batches_is_one_more_schedule(client: TestClient) -> None:
    """Loop, p = 4, m = 8, N = 8: interleaved breadth-first, drawn by its name; 7 wants m to be a multiple."""
    settings = {"placement": "loop", "n": 8, "schedule": "interleaved:8"}
    page = of_type(baselines(client, settings), "page")["interleaved:8"]["page"]
    assert page["lanes"][0]["name"] == "interleaved:8"
    rules = of_type(baselines(client, {**settings, "n": 7}), "rule")
    assert "m is 8, N is 7" in rules["interleaved:7"]["rule"]


def test_a_solve_streams_its_progress_and_can_be_downloaded(client: TestClient, tmp_path: Path) -> None:
    """p = 2, m = 4, cap 2: 13, proven; every form of the plan can be had, and the plan is valid."""
    started = client.post("/api/jobs", json={"p": 2, "m": 4, "cap": "2", "mem_w": 1.0, "time_limit": 20})
    key = started.json()["key"]
    lines = events(client, key)
    assert {line["type"] for line in lines[:-1]} == {"progress"}
    done = lines[-1]
    assert (done["type"], done["cost"], done["bound"], done["status"]) == ("done", 13, 13, "optimal")
    assert not done["interrupted"]
    drawing = client.get(f"/api/jobs/{key}/page", params={"against": "1f1b"}).json()
    assert [lane["figures"]["makespan"] for lane in drawing["lanes"]] == [13, 15]
    begins = {
        "plan.json": b"{",
        "plan.csv": b"0F0,",
        "plan.png": b"\x89PNG",
        "plan.svg": b"<?xml",
        "plan.trace.json": b'{"traceEvents"',
        "plan.html": b"<!doctype html>",
    }
    assert begins.keys() == DOWNLOADS.keys()
    for name, begin in begins.items():
        answer = client.get(f"/api/jobs/{key}/files/{name}")
        assert answer.status_code == 200
        assert answer.content.startswith(begin)
        assert name in answer.headers["content-disposition"]
    (tmp_path / "p.json").write_bytes(client.get(f"/api/jobs/{key}/files/plan.json").content)
    plan: Plan = load_plan(tmp_path / "p.json")
    assert check_plan(plan) == []
    assert client.get(f"/api/jobs/{key}/files/plan.exe").status_code == 400


def test_a_cancelled_solve_keeps_its_best_plan(client: TestClient) -> None:
    """Cancelled right after its first line, a search ends well before its limit, with a plan."""
    began = time.monotonic()
    key = client.post("/api/jobs", json=HARD).json()["key"]
    board = client.app.state.board  # type: ignore[attr-defined]
    while not board.get(key).lines:
        assert time.monotonic() - began < 30
        time.sleep(0.05)
    assert client.post(f"/api/jobs/{key}/cancel", json={}).json() == {"cancelled": True}
    done = events(client, key)[-1]
    assert done["type"] == "done"
    assert done["interrupted"]
    assert done["gap"] > 0
    assert done["seconds"] < 10
    assert client.get(f"/api/jobs/{key}/files/plan.json").status_code == 200


def cancel_after(
    client: TestClient, settings: dict[str, Any], seconds: float
) -> tuple[dict[str, Any], float]:
    """Let a solve run so long, cancel it: its last line, and how long that took to come."""
    key = client.post("/api/jobs", json=settings).json()["key"]
    board = client.app.state.board  # type: ignore[attr-defined]
    while not any(line["seconds"] for line in board.get(key).lines):
        time.sleep(0.05)  # its own clock starts when the libraries are loaded
    time.sleep(seconds)
    assert board.get(key).running, board.get(key).lines[-1]
    asked = time.monotonic()
    client.post(f"/api/jobs/{key}/cancel", json={})
    last = events(client, key)[-1]
    return last, time.monotonic() - asked


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [8.0, 16.0, 24.0, 40.0])
def test_a_long_search_in_machine_code_ends_when_it_is_cancelled(client: TestClient, seconds: float) -> None:
    """In policy search, in both annealings and in CP-SAT, 60 s allowed: soon, and with the best plan."""
    hard = {"p": 8, "m": 32, "placement": "v", "t_b": 1.3, "t_w": 0.7, "t_comm": 0.1, "cap": "0.8p"}
    last, took = cancel_after(client, {**hard, "time_limit": 60}, seconds)
    assert last["type"] == "done"
    assert last["interrupted"]
    assert 0 < last["gap"] < 0.1
    assert took < 4.5  # 0.1 to 2 s with nothing else to do; while CP-SAT presolves on a busy machine 3.3


def test_a_search_that_is_interrupted_again_and_again_keeps_its_plan() -> None:
    """A signal every 10 ms from before the search to after its end: one stops it, none does more."""
    order = {
        "instance": Settings(**{**HARD, "m": 24}).to_instance().to_json_dict(),
        "objective": "makespan",
        "solver": "auto",
        "time_limit": 60,
    }
    command = [sys.executable, "-m", "zbsolve.playground.worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(order))
        process.stdin.close()
        first = json.loads(process.stdout.readline())
        assert first["type"] == "progress"
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(process.stdout.read)
            while process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(0.01)
        last = json.loads(rest.result().splitlines()[-1])
    assert (last["type"], last["interrupted"]) == ("done", True)
    assert process.returncode == 0


def test_only_a_few_solves_run_at_once_and_closing_ends_them() -> None:
    """The third is refused in one line; when the server ends, no process is left."""
    with TestClient(create_app(), base_url="http://127.0.0.1") as client:
        keys = [client.post("/api/jobs", json=HARD).json()["key"] for _ in range(2)]
        third = client.post("/api/jobs", json=HARD)
        assert third.status_code == 400
        assert "2 solves are running" in third.json()["error"]
        board = client.app.state.board  # type: ignore[attr-defined]
        began = time.monotonic()
        while not all(board.get(key).process for key in keys):
            assert time.monotonic() - began < 30
            time.sleep(0.05)
        processes = [board.get(key).process.pid for key in keys]
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_what_cannot_be_solved_says_why(client: TestClient) -> None:
    """A cap of 0 holds nothing; an unknown solver is named; a lost key is told."""
    key = client.post("/api/jobs", json={"cap": "0"}).json()["key"]
    [line] = events(client, key)
    assert line["type"] == "error"
    assert "devices 0-3 need 1 MiB each, have 0" in line["message"]
    assert client.get(f"/api/jobs/{key}/page").status_code == 400
    refused = client.post("/api/jobs", json={"solver": "magic"})
    assert refused.status_code == 400
    assert "solver 'magic' is not known: use one of auto, " in refused.json()["error"]
    refused = client.post("/api/jobs", json={"cap": "lots"})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("memory cap 'lots': give a number of memory units")
    assert client.get("/api/jobs/nothing/events").json() == {
        "error": "this solve is no longer kept: start it again"
    }


def test_loaded_files_are_instances_or_plans(client: TestClient) -> None:
    """An instance comes back as it is, a plan as its instance, anything else as one line with its name."""
    instance = equal_stages(2, 4, name="mine")
    answer = client.post("/api/instance?name=i.json", json=instance.to_json_dict())
    assert answer.json()["instance"]["name"] == "mine"
    plan = {"schema": "zbsolve.plan/1", "instance": instance.to_json_dict()}
    assert client.post("/api/instance", json=plan).json()["tasks"] == 24
    headers = {"Content-Type": "application/json"}
    for text, message in (
        ("{", "not JSON"),
        ("[" * 5000, "nested too deeply"),
        ("{}", "bad.json: schema: missing"),
        ('{"schema": "zbsolve.trace/1"}', "bad.json: is a trace, not an instance or a plan"),
        ('{"schema": "zbsolve.cluster/1"}', "bad.json: is a cluster, not an instance or a plan"),
        ('{"traceEvents": []}', "bad.json: is a Chrome trace"),
        ("[]", "bad.json: not a JSON object: give an instance or a plan"),
        ('{"schema": "zbsolve.plan/1"}', "bad.json: instance: not a JSON object"),
        (json.dumps({**instance.to_json_dict(), "num_devices": 3}), "bad.json: device 2 of 3 holds no stage"),
    ):
        answer = client.post("/api/instance?name=bad.json", content=text, headers=headers)
        assert answer.status_code == 400
        assert message in answer.json()["error"]
    for path in ("/api/jobs", "/api/baselines"):
        answer = client.post(path, json={"instance": plan})
        assert answer.status_code == 400
        assert answer.json()["error"] == "instance: is a plan, not an instance: give an instance"
    answer = client.post("/api/instance", content=b" " * 9_000_000, headers=headers)
    assert "more than 8 MB" in answer.json()["error"]


def test_other_sites_cannot_use_it(client: TestClient) -> None:
    """A form of another page sends no JSON; a name that merely resolves to this machine is refused."""
    answer = client.post("/api/jobs", content="{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert "send JSON" in answer.json()["error"]
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    page = client.get("/")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/app.py").status_code == 404


def test_the_command_says_where_it_listens_and_ends_on_ctrl_c() -> None:
    """Loopback, a free port, exit 0."""
    command = [sys.executable, "-m", "zbsolve", "playground", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("playground: http://127.0.0.1:")
        taken = line.split(":")[3].split("/")[0]
        clash = subprocess.run(
            [*command[:-1], taken], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60
        )
        assert clash.returncode == 2
        assert clash.stderr.count("\n") == 1
        assert f"--port {taken}: cannot listen there" in clash.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
