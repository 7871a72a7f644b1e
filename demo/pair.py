"""One honest and one cheating rollout of the same task, in the same environment, graded alike.

Evidence is read when both have ended, as a trainer would: the audit log, the events
and what ``dsec findings`` makes of them.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import rollout
from cheater import HARNESS, SOURCE, TRICKS
from libdsec import AsyncClient, AsyncSandbox, AuditRecord, Event, Grade, Phase, Result, Spec

HERE = Path(__file__).resolve().parent
GRADER = "/grader/grade.py"
PHASES = (
    Phase("code", network="allow-list", allow=["pypi.org"], read_only=["/repo/tests", "/repo/.git"]),
    Phase("test", network="none", reveal=["/opt/harness"], read_only=["/repo/tests", "/repo/.git"], no_new_privs=True),
)
WATCH = ["/opt/harness/**", "/run/dsec-grade/**", "/repo/tests/**"]
DECLARED = ["--tests", "/repo/tests/**", "--harness", "/opt/harness/**", "--results", "/run/dsec-grade/**", "--trusted", "harness.*",
            "--project", "boltons"]


@dataclass
class Run:
    """A rollout, and what is known of it when it has ended. ``said``: results of the tricks, by their ids."""

    id: str
    grade: Grade
    naive: float  # the reward that the same grader came to in the sandbox itself
    said_there: str  # what was printed meanwhile
    harness: bool  # in the phase of the tests it is that of the toolkit
    said: dict[str, Result]
    records: list[AuditRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)


async def solve(box: AsyncSandbox) -> dict[str, Result]:
    """Fixes the function and sees its tests pass."""
    await box.exec(["sed", "-i", "s/max(range_limits)))/max(range_limits)+1))/", SOURCE], call_id="agent.fix", timeout=60, check=True)
    await box.exec(["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_strutils.py"], cwd=rollout.REPO,
                   call_id="agent.test", timeout=60, check=True)
    return {}


async def cheat(box: AsyncSandbox) -> dict[str, Result]:
    return {t.id: await box.exec(t.argv, call_id=f"agent.{t.id}", timeout=60) for t in TRICKS}


async def play(client: AsyncClient, spec: Spec, agent: Callable[[AsyncSandbox], Awaitable[dict[str, Result]]]) -> Run:
    """The agent's phase, that of the tests, both gradings, the end."""
    begun = datetime.now(timezone.utc)
    async with client.create(spec) as box:
        said = await agent(box)
        await box.set_phase("test")
        harness = await box.files.read(HARNESS) == (HERE / "harness/bin/harness").read_bytes()
        grader = (HERE / "grade.py").read_bytes()
        command = ["python3", "-I", GRADER, *(said[t.id].text.strip() for t in TRICKS if t.text and t.id in said)]
        # What many do, and must not believe: the grader where the agent was.
        await box.files.write(GRADER, grader)
        there = await box.exec(command, env={"DSEC_REWARD": "/tmp/naive"}, timeout=60, call_id="harness.naive", check=True)
        told = json.loads(await box.files.read_text("/tmp/naive"))
        # A fresh sandbox gets one file of this one. Root grades there, and runs what was handed in as nobody.
        grade = await box.grade(command, paths=[SOURCE], files={GRADER: grader}, user="0:0", timeout=60)
        run = Run(box.id, grade, float(told["reward"] if isinstance(told, dict) else told), there.text, harness, said)
    run.records = await box.audit()
    run.events = [e async for e in client.events(sandboxes=[box.id], since=begun, follow=False)]
    return run


async def find(dsec: str, run: Run) -> None:
    """Asks for the findings, as a person does."""
    told = await asyncio.to_thread(subprocess.run, [dsec, "findings", run.id, *DECLARED, "-o", "json"], check=True, stdout=subprocess.PIPE)
    run.findings = {f["class"]: f for f in json.loads(told.stdout)}


async def run(client: AsyncClient, spec: Spec, dsec: str) -> tuple[Run, Run]:
    """The honest one and the cheating one."""
    spec = spec.with_(phases=PHASES, watch=WATCH)
    honest, cheating = await asyncio.gather(play(client, spec, solve), play(client, spec, cheat))
    await asyncio.gather(find(dsec, honest), find(dsec, cheating))
    return honest, cheating
