#!/usr/bin/env python3
"""The same rollouts in plain containers and behind gVisor, through libdsec only.

    isolated.py --base TAG --workspace TAG --toolkit TAG [--n 20]

The Spec differs in one argument. Prints what each kind of sandbox is told about its
kernel, what it took and what became of it; exits with 1 if anything was not as expected.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, field

import rollout
from libdsec import AsyncClient, AsyncSandbox, DsecError, Spec, Unsupported

AT_ONCE = 4


@dataclass
class Report:
    isolation: str
    kernel: str = ""
    created: list[float] = field(default_factory=list)
    commands: list[float] = field(default_factory=list)
    solved: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def spec_of(isolation: str, args: argparse.Namespace) -> Spec:
    return Spec(args.base, layers=[args.workspace, args.toolkit], isolation=isolation, oom="sandbox", cpu=1, memory="512MiB",
                pids=256, disk="256MiB")


async def one(client: AsyncClient, args: argparse.Namespace, report: Report, turn: asyncio.Semaphore) -> None:
    want = report.isolation or "namespaces"
    async with turn:
        begun = time.monotonic()
        async with client.create(spec_of(report.isolation, args)) as box:
            report.created.append(time.monotonic() - begun)
            info = box.info
            if info.isolated != want:
                report.wrong.append(f"{box.id} is isolated by {info.isolated}, asked for {want}")
            await timed(report.commands, box)
            try:
                begun = time.monotonic()
                outcome = await rollout.run("solve", box)
                report.solved.append(time.monotonic() - begun)
                if outcome.verdict != "completed":
                    report.wrong.append(f"{box.id}: {outcome}")
            except (rollout.Unexpected, DsecError) as e:
                report.wrong.append(f"{box.id}: {e}")


async def timed(into: list[float], box: AsyncSandbox) -> None:
    begun = time.monotonic()
    await box.exec(["true"], timeout=60, check=True)
    into.append(time.monotonic() - begun)


async def look(client: AsyncClient, args: argparse.Namespace, report: Report) -> None:
    """What the kernel says of itself inside, and a stop in the middle of work."""
    async with client.create(spec_of(report.isolation, args)) as box:
        report.kernel = (await box.exec("cat /proc/version", timeout=60, check=True)).text.strip()
        await box.files.write("/root/kept", b"over a stop")
        await box.stop()
        await box.start_again()
        if await box.files.read("/root/kept") != b"over a stop":
            report.wrong.append("a file was not kept over a stop")


async def refusal(client: AsyncClient, args: argparse.Namespace, report: Report) -> None:
    """What it cannot give is refused and named, not left out."""
    try:
        async with client.create(spec_of("gvisor", args).with_(oom="exec")) as box:
            report.wrong.append(f"{box.id} was created with what gvisor cannot give")
    except Unsupported as e:
        print(f"refused, as it should be: {e}")


def times(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    return f"{statistics.median(ordered) * 1000:.0f} ms, slowest {ordered[-1] * 1000:.0f} ms"


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("base", "workspace", "toolkit"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--n", type=int, default=20)
    args = parser.parse_args()
    reports = [Report(""), Report("gvisor")]
    async with AsyncClient() as client:
        for report in reports:
            turn = asyncio.Semaphore(AT_ONCE)
            await look(client, args, report)
            await asyncio.gather(*(one(client, args, report, turn) for _ in range(args.n)))
            if len(report.solved) != args.n:
                report.wrong.append(f"{len(report.solved)} of {args.n} rollouts solved their task")
        await refusal(client, args, reports[1])
    for report in reports:
        print(f"\nisolation {report.isolation or 'namespaces'}")
        print(f"  kernel inside     {report.kernel}")
        print(f"  create            {times(report.created)} ({AT_ONCE} at a time)")
        print(f"  a command         {times(report.commands)}")
        print(f"  a rollout         {times(report.solved)}")
        print(f"  solved            {len(report.solved)} of {args.n}")
        for wrong in report.wrong:
            print(f"  WRONG             {wrong}")
    return 1 if any(r.wrong for r in reports) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
