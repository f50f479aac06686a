"""Solves that run beside the page, each in a process of its own, and what each has said so far."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

from zbsolve.errors import EnvironmentFailedError, InputError
from zbsolve.model.instance import Instance
from zbsolve.plan.plan import Plan, parse_plan

logger = logging.getLogger(__name__)

MOST_RUNNING = 2
MOST_KEPT = 20
# After a cancel a search may finish its current step; it is asked again and again, then ended by force.
PATIENCE = 30.0
REMINDER = 0.5
LONGEST_LINE = 2**28


@dataclass
class Job:
    """One solve: its lines so far (``progress``, then ``done`` or ``error``), and its plan at the end."""

    key: str
    instance: Instance
    objective: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    plan: Plan | None = None
    process: asyncio.subprocess.Process | None = None
    cancelled: bool = False
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def running(self) -> bool:
        """Whether the last line is still to come."""
        return not self.lines or self.lines[-1]["type"] == "progress"

    async def say(self, line: dict[str, Any]) -> None:
        """Add a line and wake whoever listens."""
        self.lines.append(line)
        async with self.news:
            self.news.notify_all()

    async def listen(self) -> AsyncIterator[dict[str, Any]]:
        """Every line from the first on, as they come; ends with the job."""
        heard = 0
        while True:
            while heard < len(self.lines):
                heard += 1
                yield self.lines[heard - 1]
            if not self.running:
                return
            async with self.news:
                while heard == len(self.lines):
                    await self.news.wait()


class JobBoard:
    """The jobs of one server: a few run at a time, the latest finished ones are kept for downloads."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, key: str) -> Job | None:
        """A job by its key."""
        return self._jobs.get(key)

    async def start(self, instance: Instance, objective: str, solver: str, time_limit: float) -> Job:
        """Start a solve; raises ``InputError`` while as many as allowed are running."""
        if sum(job.running for job in self._jobs.values()) >= MOST_RUNNING:
            raise InputError(f"{MOST_RUNNING} solves are running: wait for one or cancel it")
        job = Job(secrets.token_urlsafe(9), instance, objective)
        self._jobs[job.key] = job
        for key in [key for key, old in self._jobs.items() if not old.running][: len(self._jobs) - MOST_KEPT]:
            del self._jobs[key]
        order = {
            "instance": instance.to_json_dict(),
            "objective": objective,
            "solver": solver,
            "time_limit": time_limit,
        }
        self._keep(self._run(job, json.dumps(order).encode()))
        return job

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task and hold on to it: the loop alone would not."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: Job, order: bytes) -> None:
        try:
            job.process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "zbsolve.playground.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=LONGEST_LINE,
                start_new_session=True,  # Ctrl-C in the terminal is the server's to handle
            )
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(order)
            process.stdin.close()
            async for text in process.stdout:
                await self._hear(job, json.loads(text))
            await process.wait()
        except OSError as error:
            await job.say({"type": "error", "message": f"the solver did not start ({error.strerror})"})
        if job.running:
            said = "cancelled" if job.cancelled else "the solver died: is there enough memory?"
            await job.say({"type": "error", "message": said})

    async def _hear(self, job: Job, line: dict[str, Any]) -> None:
        if line["type"] == "done":
            job.plan = plan = await asyncio.to_thread(parse_plan, line.pop("plan"), "plan")
            line["interrupted"] |= job.cancelled  # CP-SAT ends on the signal without a word
            line |= {
                "status": plan.status,
                "cost": plan.cost,
                "bound": plan.lower_bound,
                "gap": plan.gap,
                "found_by": plan.solver.name,
                "proved_by": plan.bound_proof.method,
                "seconds": plan.solver.seconds or 0.0,
            }
        await job.say(line)

    async def cancel(self, job: Job) -> None:
        """Ask the search to stop and keep its best plan; end it by force when it does not listen."""
        if job.running and not job.cancelled:
            job.cancelled = True
            self._keep(self._end(job))

    async def _end(self, job: Job) -> None:
        for _ in range(round(PATIENCE / REMINDER)):
            if not job.running:
                return
            if job.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    job.process.send_signal(signal.SIGINT)
            await asyncio.sleep(REMINDER)
        self._kill(job)

    def _kill(self, job: Job) -> None:
        if job.process is not None and job.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                job.process.kill()

    async def close(self) -> None:
        """End every search that still runs, and wait until its process is gone."""
        while any(job.running for job in self._jobs.values()):  # some may only be starting
            for job in self._jobs.values():
                self._kill(job)
            await asyncio.sleep(0.05)
        await asyncio.gather(*self._tasks, return_exceptions=True)


def finished_plan(job: Job) -> Plan:
    """The plan of a finished job; raises ``EnvironmentFailedError`` when there is none."""
    if job.plan is None:
        raise EnvironmentFailedError("this solve has no plan (yet)")
    return job.plan
