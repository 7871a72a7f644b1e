#!/usr/bin/env python3
"""Hundreds of agent rollouts in sandboxes, through libdsec only.

    demo.py --base TAG --workspace TAG --toolkit TAG [--socket PATH] [--n 200] [--layer-dir DIR]

Creates N sandboxes in one burst, runs a software-engineering rollout in each, a
few of which hang, flood their output or exhaust their memory on purpose, and
prints what happened. Exits with 1 if anything was not as expected.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import residency
import rollout
from libdsec import AsyncClient, AsyncSandbox, DsecError, Layer, Spec
from progress import Progress

HERE = Path(__file__).resolve().parent
LABEL = {"demo": "rollouts"}
ALONE = 20  # creations one at a time


@dataclass
class Report:
    """What was measured, and what was not as expected."""

    n: int
    layers: list[Layer]
    kinds: Counter[str] = field(default_factory=Counter)
    alone: list[float] = field(default_factory=list)  # seconds from create to the end of a first command
    burst: list[float] = field(default_factory=list)  # the same in the burst, from its request
    created_in: float = 0.0
    memory: float = 0.0  # bytes of host memory for each live sandbox
    rollouts_in: float = 0.0
    causes: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # kind, outcome, cause
    touched: int = -1
    on_disk: int = 0
    wrong: list[str] = field(default_factory=list)


def plan(n: int, odd: int) -> list[str]:
    """The kind of each rollout: ``odd`` of every bad kind, spread, the rest solve the task."""
    kinds = ["solve"] * n
    bad = [k for k in rollout.KINDS if k != "solve" for _ in range(odd)][:max(0, n - 1)]
    for i, kind in enumerate(bad):
        kinds[(i + 1) * n // (len(bad) + 1)] = kind
    return kinds


def spec_of(kind: str, args: argparse.Namespace) -> Spec:
    spec = Spec(args.base, layers=[args.workspace, args.toolkit], cpu=1, memory=args.memory, pids=256, disk="256MiB",
                labels={**LABEL, "kind": kind})
    return spec.with_(memory=rollout.OOM_MEMORY, oom="sandbox") if kind == "oom" else spec


async def check_task(client: AsyncClient, args: argparse.Namespace, report: Report) -> None:
    """The named test, and only it, fails in the workspace; with the patch undone everything passes."""
    print("checking the task: all tests before and after the fix, in a sandbox", flush=True)
    async with client.create(spec_of("solve", args)) as box:
        before = await rollout.run_tests(box, [])
        await box.files.write("/tmp/break.patch", (HERE / "break.patch").read_bytes())
        await box.exec(["git", "-c", "safe.directory=*", "apply", "-R", "/tmp/break.patch"], cwd=rollout.REPO,
                       timeout=60, check=True)
        after = await rollout.run_tests(box, [])
    if before["failed"] != [rollout.TEST] or after["failed"]:
        report.wrong.append(f"the task is not what it should be: before {before['failed']}, after {after['failed']}")
    print(f"  before: {before['passed']} pass, {rollout.TEST} fails; after: {after['passed']} pass", flush=True)


async def first_command(box: AsyncSandbox) -> None:
    await box.exec(["true"], timeout=120, check=True)


async def create_alone(client: AsyncClient, args: argparse.Namespace, report: Report) -> None:
    """One at a time, as a newcomer meets it."""
    for _ in range(ALONE):
        begun = time.monotonic()
        async with client.create(spec_of("solve", args)) as box:
            await first_command(box)
            report.alone.append(time.monotonic() - begun)


async def create_burst(client: AsyncClient, args: argparse.Namespace, kinds: list[str],
                       report: Report) -> list[AsyncSandbox]:
    """All at once; each runs its first command as soon as it is there."""
    boxes: list[AsyncSandbox] = []
    firsts: list[asyncio.Task[None]] = []
    before = residency.memory_used()
    begun = time.monotonic()

    async def first(box: AsyncSandbox) -> None:
        await first_command(box)
        report.burst.append(time.monotonic() - begun)

    with Progress("creating sandboxes", len(kinds)) as bar:
        async for got in client.create_many([spec_of(k, args) for k in kinds]):
            if isinstance(got, AsyncSandbox):
                boxes.append(got)
                firsts.append(asyncio.create_task(first(got)))
            else:
                report.wrong.append(f"create sandbox {got.index}: {got}")
            bar.step()
        report.created_in = time.monotonic() - begun
        for error in await asyncio.gather(*firsts, return_exceptions=True):
            if error is not None:
                report.wrong.append(f"first command: {error}")
    if boxes:
        report.memory = (residency.memory_used() - before) / len(boxes)
    return boxes


async def run_rollouts(client: AsyncClient, args: argparse.Namespace, boxes: list[AsyncSandbox], kinds: list[str],
                       report: Report) -> None:
    gate = asyncio.Semaphore(args.concurrency)
    begun = time.monotonic()

    async def one(box: AsyncSandbox, bar: Progress) -> None:
        kind = kinds[box.index or 0]
        async with gate:
            try:
                outcome = await rollout.run(kind, box)
                if outcome.verdict:
                    await box.stop(cause=outcome.verdict)
                note = f"{kind}: {outcome.detail}"
            except (rollout.Unexpected, DsecError) as e:
                report.wrong.append(f"{kind} in {box.id}: {e}")
                note = f"{kind}: {e}"
            await end(client, box, kind, report)
            bar.step(note)

    with Progress("running rollouts", len(boxes)) as bar:
        await asyncio.gather(*(one(b, bar) for b in boxes))
    report.rollouts_in = time.monotonic() - begun


async def end(client: AsyncClient, box: AsyncSandbox, kind: str, report: Report) -> None:
    """Deletes it and reads from its record how it ended."""
    try:
        await box.delete()
        info = await client.get(box.id)
    except DsecError as e:
        report.wrong.append(f"end {box.id}: {e}")
        return
    if info.result is None:
        report.wrong.append(f"{box.id} is {info.state} and has no result")
        return
    report.kinds[kind] += 1
    report.causes[kind, info.result.outcome, info.result.cause] += 1
    if info.result.cause != rollout.CAUSE[kind]:
        report.wrong.append(f"{kind} in {box.id} ended {info.result.cause}, want {rollout.CAUSE[kind]}: "
                            f"{'; '.join(info.result.evidence)}")


async def demo(args: argparse.Namespace) -> Report:
    async with AsyncClient(args.socket or None) as client:
        layers = [await client.layers.inspect(ref) for ref in (args.base, args.workspace, args.toolkit)]
        report = Report(args.n, layers)
        dropped = args.layer_dir is not None and residency.drop_caches()
        await check_task(client, args, report)
        await create_alone(client, args, report)
        kinds = plan(args.n, args.odd if args.odd >= 0 else max(1, args.n // 50))
        boxes = await create_burst(client, args, kinds, report)
        await run_rollouts(client, args, boxes, kinds, report)
        if dropped:
            files = residency.layer_files(Path(args.layer_dir), [layer.digest for layer in layers])
            report.touched = sum(residency.resident(f) for f in files)
            report.on_disk = sum(f.stat().st_size for f in files)
        left = await client.list(labels=LABEL)
        if left:
            report.wrong.append(f"{len(left)} sandboxes are left")
    for kind in rollout.KINDS:
        if report.kinds[kind] != kinds.count(kind):
            report.wrong.append(f"{report.kinds[kind]} of {kinds.count(kind)} rollouts of kind {kind} have ended")
    return report


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def table(report: Report) -> list[tuple[str, str]]:
    def times(values: list[float]) -> str:
        return f"p50 {quantile(values, 0.5) * 1000:.0f} ms, p99 {quantile(values, 0.99) * 1000:.0f} ms"

    image = sum(layer.meta_size + layer.data_size for layer in report.layers)
    made = len(report.burst)
    rows = [("sandboxes", f"{made} of {report.n}"),
            ("creates", f"{made / report.created_in:.0f}/s" if report.created_in else "none"),
            ("create → first command", f"{times(report.alone)} (one at a time)"),
            ("", f"{times(report.burst)} (in the burst of {report.n}, from its request)"),
            ("rollouts", f"{sum(report.kinds.values())} in {report.rollouts_in:.1f} s"),
            ("host memory", f"{report.memory / 2**20:.2f} MiB for each live sandbox" if report.memory > 0 else
             "not measured: the rest of this machine gave back more meanwhile")]
    if report.touched >= 0:
        size = report.on_disk or image
        rows.append(("image touched", f"{report.touched / 2**20:.1f} of {size / 2**20:.1f} MiB "
                     f"({100 * report.touched / max(size, 1):.1f} %)"))
    else:
        rows.append(("image", f"{image / 2**20:.1f} MiB (what was touched needs root and --layer-dir)"))
    for i, ((kind, outcome, cause), count) in enumerate(sorted(report.causes.items(), key=lambda c: -c[1])):
        rows.append(("outcome, cause" if i == 0 else "", f"{count:>4} × {outcome}, {cause} ({kind})"))
    return rows


def show(report: Report) -> None:
    rows = table(report)
    width = max(len(value) for _, value in rows)
    print(f"┌{'─' * 26}┬{'─' * (width + 2)}┐")
    for name, value in rows:
        print(f"│ {name:<24} │ {value:<{width}} │")
    print(f"└{'─' * 26}┴{'─' * (width + 2)}┘")
    for line in report.wrong[:20]:
        print(f"not as expected: {line}", file=sys.stderr)
    if len(report.wrong) > 20:
        print(f"and {len(report.wrong) - 20} more", file=sys.stderr)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--socket", default="", help="unix socket or URL of the gateway (default: as libdsec finds it)")
    p.add_argument("--base", required=True, help="tag or digest of the base layer")
    p.add_argument("--workspace", required=True, help="… of the workspace, placed at /repo")
    p.add_argument("--toolkit", required=True, help="… of the harness, placed at /opt/harness")
    p.add_argument("--n", type=int, default=200, help="sandboxes (default 200)")
    p.add_argument("--odd", type=int, default=-1, help="rollouts of each bad kind (default n/50, at least 1)")
    p.add_argument("--concurrency", type=int, default=4 * (os.cpu_count() or 1), help="rollouts at the same time")
    p.add_argument("--memory", default="256MiB", help="memory limit of a sandbox")
    p.add_argument("--layer-dir", help="layer store of the server on this machine, to see what was touched (root)")
    args = p.parse_args()
    if args.n < 1:
        p.error("--n must be at least 1")
    report = asyncio.run(demo(args))
    show(report)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
