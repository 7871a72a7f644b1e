#!/usr/bin/env python3
"""Hundreds of agent rollouts in sandboxes, through libdsec only.

    demo.py --base TAG --workspace TAG --toolkit TAG [--tier container] [--socket PATH] [--dsec PATH] [--n 200] [--again 20]

Gives the layers back to object storage, creates N sandboxes in one burst, runs a
software-engineering rollout in each, a few of which hang, flood their output or
exhaust their memory on purpose; gives the layers back again and runs a few more,
for which what the first ones read is brought ahead; and once more with the base
repacked in the order in which it is read. Then an honest and a cheating rollout beside
each other. On another tier than containers there is one round, and then copies of a
running sandbox: what needs phases or layers that are read in part is left out. Prints what
happened, and exits with 1 if anything was not as expected.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pair
import residency
import rollout
import verdict
from libdsec import AsyncClient, AsyncSandbox, DsecError, Layer, Spec
from progress import Progress

HERE = Path(__file__).resolve().parent
LABEL = {"demo": "rollouts"}
ALONE = 20  # creations one at a time
FEW_ALONE = 5  # likewise, of virtual machines
COPIES = 4  # of one that runs


@dataclass
class Reads:
    """What a round read of the layers whose data come on demand. Bytes and seconds."""

    data: int = 0
    touched: int = 0
    requests: int = 0
    fetched: int = 0
    plain: int = 0
    stalls: int = 0
    stalled: float = 0.0
    failures: int = 0


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
    reads: Reads = field(default_factory=Reads)
    wrong: list[str] = field(default_factory=list)


def plan(n: int, odd: int) -> list[str]:
    """The kind of each rollout: ``odd`` of every bad kind, spread, the rest solve the task."""
    kinds = ["solve"] * n
    bad = [k for k in rollout.KINDS if k != "solve" for _ in range(odd)][:max(0, n - 1)]
    for i, kind in enumerate(bad):
        kinds[(i + 1) * n // (len(bad) + 1)] = kind
    return kinds


def spec_of(kind: str, args: argparse.Namespace) -> Spec:
    spec = Spec(args.base, tier=args.tier, layers=[args.workspace, args.toolkit], cpu=1, memory=args.memory, pids=256, disk="256MiB",
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
    for _ in range(ALONE if args.tier == "container" else FEW_ALONE):
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


async def give_back(client: AsyncClient, layers: list[Layer]) -> None:
    """Has the machine keep nothing of the layers' data, neither on its disk nor, if we may, in its memory."""
    freed = 0
    for layer in layers:
        freed += await client.layers.evict(layer.digest)
    residency.drop_caches()
    print(f"gave {freed / 2**20:.1f} MiB of layers back: they come from object storage as they are read", flush=True)


async def measure(client: AsyncClient, report: Report) -> None:
    """What of the layers that were not here was touched and fetched, while they are still mounted."""
    ours = {part.digest for layer in report.layers for part in layer.layers or (layer,)}
    for layer in await client.layers.on_demand():
        if layer.served and layer.digest in ours:
            r = report.reads
            report.reads = Reads(r.data + layer.data_size, r.touched + max(0, layer.touched), r.requests + layer.requests,
                                 r.fetched + layer.fetched, r.plain + layer.plain, r.stalls + layer.stalls,
                                 r.stalled + layer.stalled, r.failures + layer.failures)
    if report.reads.failures:
        report.wrong.append(f"{report.reads.failures} reads of layers failed")


async def run_round(client: AsyncClient, args: argparse.Namespace, kinds: list[str], report: Report) -> None:
    await give_back(client, report.layers)
    boxes = await create_burst(client, args, kinds, report)
    await run_rollouts(client, args, boxes, kinds, report)
    await measure(client, report)
    for kind in rollout.KINDS:
        if report.kinds[kind] != kinds.count(kind):
            report.wrong.append(f"{report.kinds[kind]} of {kinds.count(kind)} rollouts of kind {kind} have ended")


async def demo(args: argparse.Namespace) -> tuple[list[Report], tuple[pair.Run, pair.Run] | None]:
    async with AsyncClient(args.socket or None) as client:
        layers = [await client.layers.inspect(ref) for ref in (args.base, args.workspace, args.toolkit)]
        report = Report(args.n, layers)
        await check_task(client, args, report)
        await create_alone(client, args, report)
        await run_round(client, args, plan(args.n, args.odd if args.odd >= 0 else max(1, args.n // 50)), report)
        if args.tier != "container":
            await copy_running(client, args, report)
            return await none_left(client, [report]), None
        reports = [report, Report(args.again, layers)]
        await run_round(client, args, plan(args.again, 0), reports[-1])
        if not layers[0].layers:  # of an image of several layers each would be repacked
            args.base = (await client.layers.repack(args.base)).digest
            reports.append(Report(args.again, [await client.layers.inspect(args.base), *layers[1:]]))
            await run_round(client, args, plan(args.again, 0), reports[-1])
        print("one honest and one cheating rollout", flush=True)
        both = None
        try:
            both = await pair.run(client, spec_of("solve", args), args.dsec)
        except (DsecError, subprocess.CalledProcessError) as e:
            report.wrong.append(f"honest and cheating: {e}")
        return await none_left(client, reports), both


async def none_left(client: AsyncClient, reports: list[Report]) -> list[Report]:
    left = await client.list(labels=LABEL)
    if left:
        reports[0].wrong.append(f"{len(left)} sandboxes are left")
    return reports


async def copy_running(client: AsyncClient, args: argparse.Namespace, report: Report) -> None:
    """Copies a sandbox in which a Python waits; each copy draws another UUID."""
    draw = "import os, time, uuid\nwhile not os.path.exists('/tmp/go'): time.sleep(0.05)\nprint(uuid.uuid4(), flush=True)\ntime.sleep(600)"
    async with client.create(spec_of("solve", args)) as box:
        await box.exec(["sh", "-c", 'python3 -c "$1" >/tmp/drawn 2>&1 </dev/null & sleep 2', "sh", draw], timeout=60, check=True)
        begun = time.monotonic()
        copies = await box.fork(COPIES)
        took = time.monotonic() - begun
        drawn = await asyncio.gather(*(drawn_in(b) for b in (box, *copies)))
        for b in copies:
            await b.delete()
    if len(set(drawn)) != COPIES + 1:
        report.wrong.append(f"copies drew the same: {drawn}")
    print(f"{COPIES} copies of a sandbox in which a Python was waiting: {took:.1f} s; each drew a UUID of its own, as {drawn[0]}", flush=True)


async def drawn_in(box: AsyncSandbox) -> str:
    r = await box.exec(["sh", "-c", "touch /tmp/go; until grep -q - /tmp/drawn; do sleep 0.1; done; cat /tmp/drawn"], timeout=60, check=True)
    return r.text.strip()


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def times(values: list[float]) -> str:
    return f"p50 {quantile(values, 0.5) * 1000:.0f} ms, p99 {quantile(values, 0.99) * 1000:.0f} ms"


def read_rows(name: str, r: Reads) -> list[tuple[str, str]]:
    def mib(n: int) -> str:
        return f"{n / 2**20:.1f} MiB"

    return [(name, f"touched {mib(r.touched)} of {mib(r.data)} ({100 * r.touched / max(r.data, 1):.1f} %)"),
            ("", f"fetched {mib(r.plain)} ({mib(r.fetched)} compressed): {r.plain / max(r.touched, 1):.2f} × touched"),
            ("", f"{r.requests} requests; reads that waited: {r.stalls}, {r.stalled:.2f} s in all")]


def table(report: Report, more: list[Report]) -> list[tuple[str, str]]:
    made = len(report.burst)
    rows = [("sandboxes", f"{made} of {report.n}"),
            ("creates", f"{made / report.created_in:.0f}/s" if report.created_in else "none"),
            ("create → first command", f"{times(report.alone)} (one at a time)"),
            ("", f"{times(report.burst)} (in the burst of {report.n}, from its request)"),
            ("rollouts", f"{sum(report.kinds.values())} in {report.rollouts_in:.1f} s"),
            ("host memory", f"{report.memory / 2**20:.2f} MiB for each live sandbox" if report.memory > 0 else
             "not measured: the rest of this machine gave back more meanwhile")]
    rows += read_rows("layers, on demand", report.reads)
    causes = report.causes.copy()
    for r, how in zip(more, ("with a trace", "repacked")):
        rows += read_rows(f"{r.n} more, {how}", r.reads)
        causes += r.causes
    for i, ((kind, outcome, cause), count) in enumerate(sorted(causes.items(), key=lambda c: -c[1])):
        rows.append(("outcome, cause" if i == 0 else "", f"{count:>4} × {outcome}, {cause} ({kind})"))
    return rows


def show(reports: list[Report]) -> list[str]:
    """Prints the table; returns what is not as expected."""
    rows = table(reports[0], reports[1:])
    width = max(len(value) for _, value in rows)
    print(f"┌{'─' * 26}┬{'─' * (width + 2)}┐")
    for name, value in rows:
        print(f"│ {name:<24} │ {value:<{width}} │")
    print(f"└{'─' * 26}┴{'─' * (width + 2)}┘")
    return [line for r in reports for line in r.wrong]


def complain(wrong: list[str]) -> int:
    """Says what is not as expected; the status to exit with."""
    for line in wrong[:20]:
        print(f"not as expected: {line}", file=sys.stderr)
    if len(wrong) > 20:
        print(f"and {len(wrong) - 20} more", file=sys.stderr)
    return 1 if wrong else 0


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--socket", default="", help="unix socket or URL of the gateway (default: as libdsec finds it)")
    p.add_argument("--dsec", default="dsec", help="the dsec program, for its findings (default: that of PATH)")
    p.add_argument("--base", required=True, help="tag or digest of the base layer")
    p.add_argument("--workspace", required=True, help="… of the workspace, placed at /repo")
    p.add_argument("--toolkit", required=True, help="… of the harness, placed at /opt/harness")
    p.add_argument("--tier", default="container", help="isolation of the sandboxes (default container)")
    p.add_argument("--n", type=int, default=200, help="sandboxes (default 200)")
    p.add_argument("--again", type=int, default=20, help="sandboxes of each later round (default 20)")
    p.add_argument("--odd", type=int, default=-1, help="rollouts of each bad kind (default n/50, at least 1)")
    p.add_argument("--concurrency", type=int, default=4 * (os.cpu_count() or 1), help="rollouts at the same time")
    p.add_argument("--memory", default="256MiB", help="memory limit of a sandbox")
    args = p.parse_args()
    if args.n < 1 or args.again < 1:
        p.error("--n and --again must be at least 1")
    reports, both = asyncio.run(demo(args))
    wrong = show(reports)
    return complain(wrong + verdict.show(*both) if both else wrong)


if __name__ == "__main__":
    sys.exit(main())
