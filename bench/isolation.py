#!/usr/bin/env python3
"""What isolation "gvisor" and the tier "microvm" cost beside a plain container, in rounds that take turns.

    isolation.py --base TAG [--rounds 3] [--each 10] [--state DIR]

Prints the medians as bench/RESULTS.md has them. Root, on the machine of the node: the
memory is read from /proc of the processes of a sandbox.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from libdsec import Client, Sandbox, Spec

KINDS = ("", "gvisor", "microvm")
NAMES = {"": "container", "gvisor": "gvisor", "microvm": "microvm"}
WORK = {
    "system calls: dd of 200,000 bytes, one at a time": "dd if=/dev/zero of=/dev/null bs=1 count=200000 2>/dev/null",
    "processes: 200 of /bin/true, from a shell": "i=0; while [ $i -lt 200 ]; do /bin/true; i=$((i+1)); done",
    "files: 2,000 made, read and removed": "mkdir /root/w; cd /root/w; i=0; while [ $i -lt 2000 ]; do echo x > $i; read y < $i; i=$((i+1)); done; rm -r /root/w",
    "a tree: every name and size of /usr": "find /usr -size +0 | wc -l >/dev/null",
    "python: start, import of 9 modules": "python3 -c 'import json, re, asyncio, email, http.client, sqlite3, unittest, xml.etree.ElementTree, decimal'",
    "processor: python, a sum of 3,000,000": "python3 -c 'print(sum(range(3000000)), sum(i * i for i in range(1500000)))' >/dev/null",
}


def sandbox_pids(box: Sandbox) -> set[int]:
    """The processes in any control group of the sandbox."""
    out = set()
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            try:
                if box.id in (proc / "cgroup").read_text():
                    out.add(int(proc.name))
            except OSError:
                pass  # it has ended
    return out


def pss(box: Sandbox) -> float:
    """MiB of all its processes, what they share counted once among those who do."""
    total = 0
    for pid in sandbox_pids(box):
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
        except OSError:
            pass
    return total / 1024


def spec(base: str, isolation: str) -> Spec:
    tier, isolation = ("microvm", "") if isolation == "microvm" else ("container", isolation)
    return Spec(base, tier=tier, isolation=isolation, oom="sandbox", cpu=2, memory="1GiB", pids=256, disk="512MiB")


def timed(box: Sandbox, script: str) -> float:
    begun = time.monotonic()
    box.exec(script, timeout=300, check=True)
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--each", type=int, default=10)
    args = parser.parse_args()
    rows: dict[str, dict[str, list[float]]] = {}

    def note(row: str, isolation: str, value: float) -> None:
        rows.setdefault(row, {k: [] for k in KINDS})[isolation].append(value)

    with Client() as client:
        for kind in KINDS:  # what is made once: shells, the image in one file
            with client.create(spec(args.base, kind)) as box:
                box.exec(["true"], check=True)
        for _ in range(args.rounds):
            for kind in KINDS:
                measure(client, args, kind, note)
    print("| | " + " | ".join(NAMES[k] for k in KINDS) + " |\n|---|" + "---|" * len(KINDS))
    for row, by in rows.items():
        unit, factor = ("MiB", 1) if "PSS" in row else ("ms", 1000)
        medians = {k: statistics.median(v) * factor for k, v in by.items() if v}
        cells = [f"{medians[k]:.1f} {unit}" if k in medians else "" for k in KINDS]
        if plain := medians.get(""):
            cells = [cells[0], *(f"{cell}, {medians[k] / plain:.1f}x" for cell, k in zip(cells[1:], KINDS[1:]))]
        print(f"| {row} | " + " | ".join(cells) + " |")


def measure(client: Client, args: argparse.Namespace, kind: str, note) -> None:  # type: ignore[no-untyped-def]
    for _ in range(args.each):
        begun = time.monotonic()
        with client.create(spec(args.base, kind)) as box:
            note("create", kind, time.monotonic() - begun)
            box.exec(["true"], check=True)
            note("create and a first command", kind, time.monotonic() - begun)
            note("a command more", kind, timed(box, "true"))
    boxes = [client.create(spec(args.base, kind)) for _ in range(5)]
    try:
        for box in boxes if kind else []:  # those of a container made from a shell are not found by its id
            note("PSS of an idle one of 5, no command yet", kind, pss(box))
    finally:
        for box in boxes:
            box.delete()
    with client.create(spec(args.base, kind)) as box:
        for row, script in WORK.items():
            note(row, kind, timed(box, script))
        begun = time.monotonic()
        box.stop()
        note("stop", kind, time.monotonic() - begun)
        begun = time.monotonic()
        box.start_again()
        note("start again", kind, time.monotonic() - begun)


if __name__ == "__main__":
    main()
