"""The web application: the page, baselines at once, solves with live progress, downloads.

Requests that change something must be JSON, which a page of another site cannot send without asking first,
and the host named must be one that the server was started for: so no other site can use it by way of the
browser. Errors that a user can mend are one line with status 400.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from zbsolve.baselines import BASELINES
from zbsolve.baselines.comparison import baseline_row, reference_cost, scheduled
from zbsolve.errors import InputError, ZbsolveError
from zbsolve.files.documents import require_schema
from zbsolve.model.instance import SCHEMA as INSTANCE_SCHEMA
from zbsolve.model.instance import Instance, parse_instance
from zbsolve.plan.plan import SCHEMA as PLAN_SCHEMA
from zbsolve.plan.plan import Plan
from zbsolve.playground.jobs import Job, JobBoard, finished_plan
from zbsolve.playground.settings import Settings, parse_settings
from zbsolve.report.html import page, read, viewer_script
from zbsolve.report.viewer_data import page_data, plan_lane, schedule_lane
from zbsolve.solver.portfolio import SOLVERS, require_known

MOST_BYTES = 8_000_000
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEARTBEAT = 15.0


def create_app(hosts: tuple[str, ...] = ("localhost", "127.0.0.1")) -> Starlette:
    """The application, answering to these host names only."""
    board = JobBoard()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await board.close()

    app = Starlette(
        routes=[
            Route("/", _page),
            Route("/static/{name}", _static),
            Route("/api/choices", _choices),
            Route("/api/baselines", _baselines, methods=["POST"]),
            Route("/api/instance", _instance, methods=["POST"]),
            Route("/api/jobs", _start, methods=["POST"]),
            Route("/api/jobs/{key}/events", _events),
            Route("/api/jobs/{key}/cancel", _cancel, methods=["POST"]),
            Route("/api/jobs/{key}/page", _solved_page),
            Route("/api/jobs/{key}/files/{name}", _download),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
        exception_handlers={ZbsolveError: _one_line},
        lifespan=lifespan,
    )
    app.state.board = board
    return app


async def _one_line(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": " ".join(str(error).split())}, status_code=400)


# --- the page ------------------------------------------------------------------------------------


def _asset(name: str) -> str:
    return files("zbsolve.playground").joinpath("static", name).read_text(encoding="utf-8")


async def _page(_: Request) -> Response:
    headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}
    return HTMLResponse(_asset("playground.html"), headers=headers)


STATIC: dict[str, tuple[Callable[[], str], str]] = {
    "viewer.js": (viewer_script, "text/javascript"),
    "viewer.css": (lambda: read("viewer.css"), "text/css"),
    "playground.js": (lambda: _asset("playground.js"), "text/javascript"),
    "curve.js": (lambda: _asset("curve.js"), "text/javascript"),
    "playground.css": (lambda: _asset("playground.css"), "text/css"),
}


async def _static(request: Request) -> Response:
    found = STATIC.get(request.path_params["name"])
    if found is None:
        return JSONResponse({"error": "no such file"}, status_code=404)
    make, kind = found
    return Response(make(), media_type=kind, headers={"X-Content-Type-Options": "nosniff"})


async def _choices(_: Request) -> Response:
    schedules = [{"name": b.name, "summary": b.summary, "source": b.source} for b in BASELINES.values()]
    defaults = Settings().model_dump(exclude_none=True)
    return JSONResponse({"schedules": schedules, "solvers": [*SOLVERS, *BASELINES], "defaults": defaults})


# --- baselines and instances ---------------------------------------------------------------------


async def _body(request: Request) -> Any:
    """JSON of a request, of bounded size."""
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        raise InputError("send JSON (content type application/json)")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BYTES:
            raise InputError(f"more than {MOST_BYTES // 1_000_000} MB: use the command line for this one")
    try:
        return json.loads(data)
    except ValueError as error:
        raise InputError(f"not JSON ({error}): give an instance or a plan file of zbsolve") from None
    except RecursionError:
        raise InputError("nested too deeply for a file of zbsolve: give another") from None


async def _baselines(request: Request) -> Response:
    """JSON lines: sizes, the chosen schedule's drawing, and a row or a rule a schedule, as they are found.

    Most schedules take no time; the automatic ones search, and come last.
    """
    settings = parse_settings(await _body(request))
    instance = await run_in_threadpool(settings.to_instance)
    return StreamingResponse(_baseline_lines(settings, instance), media_type="application/x-ndjson")


async def _baseline_lines(settings: Settings, instance: Instance) -> AsyncIterator[str]:
    objective = settings.objective
    reference, reason = await run_in_threadpool(reference_cost, instance, objective)
    names = [*BASELINES, *(() if settings.n is None else (f"interleaved:{settings.n}",))]
    head = {
        "type": "head",
        "names": names,
        "oneFOneB": reason,
        "tasks": instance.num_tasks,
        "unit": instance.time_unit,
        "memoryUnit": instance.memory_unit,
    }
    yield json.dumps(head) + "\n"
    undrawn = True
    # The chosen one first, those that search last.
    for name in sorted(names, key=lambda name: (name != settings.schedule, BASELINES[name].automatic)):
        try:
            found = await run_in_threadpool(scheduled, name, instance, objective)
        except ZbsolveError as error:
            yield json.dumps({"type": "rule", "name": name, "rule": str(error)}) + "\n"
            continue
        row = await run_in_threadpool(baseline_row, name, instance, objective, found, reference)
        yield (
            json.dumps({"type": "row", **asdict(row), "label": row.label, "gain_text": row.gain_text}) + "\n"
        )
        if undrawn:
            timed_on, schedule, _ = found
            lane = await run_in_threadpool(schedule_lane, timed_on, schedule, name, objective)
            yield json.dumps({"type": "page", "name": name, "page": page_data([lane], instance.name)}) + "\n"
            undrawn = False
    yield json.dumps({"type": "end"}) + "\n"


def _baseline_lane(instance: Instance, name: str, objective: str) -> dict[str, Any]:
    timed_on, schedule, _ = scheduled(name, instance, objective)
    return schedule_lane(timed_on, schedule, name, objective)


async def _instance(request: Request) -> Response:
    """A file that the user loads: an instance, or a plan for its instance."""
    data = await _body(request)
    where = request.query_params.get("name", "file")[:80]
    if require_schema(data, where, INSTANCE_SCHEMA, PLAN_SCHEMA) == PLAN_SCHEMA:
        data, where = data.get("instance"), f"{where}: instance"
    instance = parse_instance(data, where)
    Settings(instance=instance.to_json_dict()).to_instance()
    return JSONResponse({"instance": instance.to_json_dict(), "tasks": instance.num_tasks})


# --- solving -------------------------------------------------------------------------------------


def _board(request: Request) -> JobBoard:
    board: JobBoard = request.app.state.board
    return board


def _job(request: Request) -> Job:
    job = _board(request).get(request.path_params["key"])
    if job is None:
        raise InputError("this solve is no longer kept: start it again")
    return job


async def _start(request: Request) -> Response:
    settings = parse_settings(await _body(request))
    require_known(settings.solver)
    instance = await run_in_threadpool(settings.to_instance)
    job = await _board(request).start(instance, settings.objective, settings.solver, settings.time_limit)
    return JSONResponse({"key": job.key})


async def _events(request: Request) -> Response:
    """The job's lines as server-sent events, from the first on; a comment now and then keeps it open."""
    job = _job(request)

    async def stream() -> AsyncIterator[str]:
        lines = job.listen()
        pending = asyncio.ensure_future(anext(lines, None))
        try:
            while True:
                done, _ = await asyncio.wait({pending}, timeout=HEARTBEAT)
                if not done:
                    yield ": still searching\n\n"
                    continue
                line = pending.result()
                if line is None:
                    return
                yield f"data: {json.dumps(line)}\n\n"
                pending = asyncio.ensure_future(anext(lines, None))
        finally:
            pending.cancel()

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


async def _cancel(request: Request) -> Response:
    await _body(request)
    await _board(request).cancel(_job(request))
    return JSONResponse({"cancelled": True})


async def _solved_page(request: Request) -> Response:
    """The drawing of the solved plan; with ``?against=NAME`` a baseline beside it."""
    job = _job(request)
    plan = finished_plan(job)
    against = request.query_params.get("against")
    return JSONResponse(await run_in_threadpool(_solved_data, job.instance, plan, against))


def _solved_data(instance: Instance, plan: Plan, against: str | None) -> dict[str, Any]:
    lanes = [plan_lane(plan, f"solved ({plan.solver.name})")]
    if against in BASELINES:
        lanes.append(_baseline_lane(instance, against, plan.objective))
    return page_data(lanes, instance.name)


async def _download(request: Request) -> Response:
    """The plan in one of its forms, as a file."""
    plan, name = finished_plan(_job(request)), request.path_params["name"]
    if name not in DOWNLOADS:
        raise InputError(f"{name}: choose one of {', '.join(DOWNLOADS)}")
    make, kind = DOWNLOADS[name]
    content = await run_in_threadpool(make, plan)
    return Response(
        content, media_type=kind, headers={"Content-Disposition": f'attachment; filename="{name}"'}
    )


def _csv(plan: Plan) -> str:
    from zbsolve.plan.torch_csv import export_torch_csv

    return export_torch_csv(plan.instance, plan.schedule()).text


def _chrome_trace(plan: Plan) -> str:
    from zbsolve.report.chrome_trace import chrome_trace

    return json.dumps(chrome_trace(plan))


def _picture(suffix: str) -> Callable[[Plan], bytes]:
    def draw(plan: Plan) -> bytes:
        from zbsolve.report.figures import plan_picture

        return plan_picture(plan, suffix)

    return draw


DOWNLOADS: dict[str, tuple[Callable[[Plan], str | bytes], str]] = {
    "plan.json": (Plan.to_json, "application/json"),
    "plan.csv": (_csv, "text/csv"),
    "plan.png": (_picture(".png"), "image/png"),
    "plan.svg": (_picture(".svg"), "image/svg+xml"),
    "plan.trace.json": (_chrome_trace, "application/json"),
    "plan.html": (lambda plan: page(page_data([plan_lane(plan, "plan")], plan.instance.name)), "text/html"),
}
