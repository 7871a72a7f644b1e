"""The rollouts of the demo: what an agent does in its sandbox.

The agent is scripted, there is no model behind it, but it acts on what it sees:
it finds the function and its tests, reads the failure, edits through the file
API and looks at the tests again.
"""

from __future__ import annotations

import asyncio
import json
import re
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from typing import Any

from libdsec import AsyncSandbox, ExecTimeout, OutputLimitExceeded, SandboxGone

REPO = "/repo"
HARNESS = "/opt/harness/bin/harness"
FUNCTION = "parse_int_list"
TEST = "tests/test_strutils.py::test_parse_int_list"
TASK = "parse_int_list('5-8') gives [5, 6, 7]; it should give [5, 6, 7, 8]"

KINDS = ("solve", "hang", "flood", "oom")
# What the record of a sandbox says after a rollout of a kind.
CAUSE = {"solve": "completed", "hang": "agent_timeout", "flood": "agent_error", "oom": "oom"}
OOM_MEMORY = "128MiB"


class Unexpected(Exception):
    """A rollout went otherwise than its kind does."""


@dataclass
class Outcome:
    """What a rollout came to. ``verdict`` is the cause its owner stops the sandbox with; empty if it has ended."""

    verdict: str
    detail: str


async def run(kind: str, box: AsyncSandbox) -> Outcome:
    return await {"solve": solve, "hang": hang, "flood": flood, "oom": exhaust}[kind](box)


async def solve(box: AsyncSandbox) -> Outcome:
    """Looks at the repository, sees the test fail, fixes the function, sees it pass."""
    path, line = (await grep(box, rf"def {FUNCTION}\(", "."))[0]
    tests = sorted({f"tests/{p}" for p, _ in await grep(box, rf"\b{FUNCTION}\(", "tests")})
    before = await run_tests(box, tests)
    if before["failed"] != [TEST]:
        raise Unexpected(f"before the fix {before['failed']} fail, want {TEST}")

    shown = await box.exec([HARNESS, "read", path, "--lines", f"{line}:{line + 40}"], cwd=REPO, timeout=60, check=True)
    found = re.search(r"range\(min\((\w+)\), max\(\1\)\)", shown.text)
    if not found:
        raise Unexpected(f"no range without its end in {path}")
    text = await box.files.read_text(f"{REPO}/{path}")
    name = found.group(1)
    await box.files.write(f"{REPO}/{path}", text.replace(found.group(0), f"range(min({name}), max({name})+1)"))

    after = await run_tests(box, tests, "--junit", "/tmp/out/junit.xml")
    if after["failed"] or after["passed"] != before["passed"] + 1:
        raise Unexpected(f"after the fix: {after}")
    changed = await box.exec(["git", "-c", "safe.directory=*", "diff", "--name-only"], cwd=REPO, timeout=60, check=True)
    if changed.text.split() != [path]:
        raise Unexpected(f"changed {changed.text.split()}, want {path} only")
    return Outcome("completed", f"{await passed_in_artifact(box)} tests pass")


async def passed_in_artifact(box: AsyncSandbox) -> int:
    """Collects the report on this side and counts in it."""
    report = await box.artifacts(["/tmp/out/*.xml"])
    if len(report) != 1:
        raise Unexpected(f"{len(report)} reports collected, want 1")
    cases = [c for c in xml.fromstring(report[0].read()).iter("testcase") if not len(c)]
    return len(cases)


async def hang(box: AsyncSandbox) -> Outcome:
    """Waits for what never comes; the timeout ends it and all it started."""
    try:
        await box.exec("echo waiting for the server; setsid sleep 1000 & wait", timeout=3)
    except ExecTimeout as e:
        if e.result.text != "waiting for the server\n":
            raise Unexpected(f"output before the timeout: {e.result.text!r}") from e
        left = await box.exec("cat /proc/[0-9]*/comm", timeout=60)
        if "sleep" in left.text:
            raise Unexpected("a process outlived the timeout") from e
        return Outcome("agent_timeout", "hung, killed with all it started")
    raise Unexpected("no timeout")


async def flood(box: AsyncSandbox) -> Outcome:
    """Prints without end."""
    try:
        await box.exec(["yes", "all work and no play"], timeout=60, on_limit="kill", output_limit="1MiB")
    except OutputLimitExceeded as e:
        if len(e.result.stdout) > 1 << 20 or not e.result.stdout.startswith(b"all work"):
            raise Unexpected(f"{len(e.result.stdout)} bytes kept") from e
        return Outcome("agent_error", f"flooded its output, {len(e.result.stdout) >> 10} KiB kept")
    raise Unexpected("no output limit")


async def exhaust(box: AsyncSandbox) -> Outcome:
    """Takes more memory than there is; with oom="sandbox" that is the end of the sandbox."""
    try:
        result = await box.exec(["python3", "-c", "x = [bytearray(1 << 20) for _ in range(100_000)]"], timeout=60)
        if not result.oom:
            raise Unexpected(f"no OOM kill: {result.status}, exit code {result.exit_code}")
        for _ in range(100):  # the command's end may be told before that of the sandbox
            if not (await box.refresh()).live:
                return Outcome("", "exhausted its memory")
            await asyncio.sleep(0.1)
    except SandboxGone:
        return Outcome("", "exhausted its memory")
    raise Unexpected("the sandbox outlived an OOM kill")


async def grep(box: AsyncSandbox, pattern: str, directory: str) -> list[tuple[str, int]]:
    found = await box.exec([HARNESS, "grep", pattern, directory], cwd=REPO, timeout=60, check=True)
    hits = [line.split(":", 2) for line in found.text.splitlines()]
    return [(path, int(number)) for path, number, _ in hits]


async def run_tests(box: AsyncSandbox, paths: list[str], *more: str) -> dict[str, Any]:
    result = await box.exec([HARNESS, "test", *paths, *more], cwd=REPO, timeout=300)
    if result.status != "exited" or result.exit_code not in (0, 1):
        raise Unexpected(f"tests did not run: exit code {result.exit_code}: {result.stderr.text[-400:]}")
    report: dict[str, Any] = json.loads(result.text)
    return report
