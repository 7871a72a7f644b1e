"""The function tier: commands, snippets and modules, a judged batch, and calls that try to leave something.

It fails if a verdict is not what it should be, or if anything of a call is seen by another.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import subprocess
import sys
import time
from pathlib import Path

from libdsec import AsyncClient, Call
from libdsec.errors import DsecError

SUM = Call(python="import sys; print(sum(int(x) for x in sys.stdin.read().split()))")
LEFT = "import os; print(sorted(os.listdir('/tmp')), sorted(os.listdir('/dev/shm')), len([p for p in os.listdir('/proc') if p.isdigit()]))"
LEAVE = "import os, time\nopen('/tmp/left', 'w'); open('/dev/shm/left', 'w')\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)"


async def verdicts(client: AsyncClient, base: str) -> list[str]:
    module = (Path(__file__).parent.parent / "bench" / "hello.wasm").read_bytes()
    wrong = []
    for what, call, want in [
        ("a command", Call(base, ["sh", "-c", "echo $((6 * 7))"], expect="42"), "ok"),
        ("a wrong answer", Call(base, ["echo", "41"], expect="42"), "wrong_answer"),
        ("a snippet", SUM.with_(image=base, stdin="1 2 3", expect="6"), "ok"),
        ("an exception", Call(base, python="1/0"), "runtime_error"),
        ("an endless loop", Call(base, python="while True: pass", wall=1), "time_limit"),
        ("too much memory", Call(base, python="bytearray(1 << 30)"), "memory_limit"),
        ("endless output", Call(base, ["yes"], output="64KiB"), "output_limit"),
        ("a fork bomb", Call(base, ["sh", "-c", "b() { b | b & }; (b) & while :; do :; done"], wall=1), "time_limit"),
        ("no compiler", Call(base, ["./a"], compile=["cc-of-nobody", "a.c"]), "compile_error"),
        ("a module", Call(wasm=module, expect="hello"), "ok"),
        ("too little fuel", Call(wasm=module, fuel=5), "fuel_limit"),
    ]:
        r = await client.call(call)
        print(f"  {what:<18} {r.verdict:<14} {r.backend:<7} {r.wall * 1000:8.1f} ms  {r.memory / (1 << 20):7.1f} MiB  {r.detail}")
        if r.verdict != want:
            wrong.append(f"{what}: {r.verdict}, want {want}: {r.stderr.decode(errors='replace')[-300:]}")
    return wrong


async def batch(client: AsyncClient, base: str, n: int) -> list[str]:
    begun, seen, containers, wrong = time.monotonic(), collections.Counter[str](), set[str](), []
    first = 0.0
    async for r in client.map(SUM.with_(image=base), (f"{i} {i}" for i in range(n)), concurrency=32):
        first = first or time.monotonic() - begun
        if isinstance(r, DsecError):
            wrong.append(f"input {r.index}: {r}")
            continue
        seen[r.verdict] += 1
        containers.add(r.container)
        if r.text != f"{2 * r.index}\n":
            wrong.append(f"input {r.index}: {r.text!r}")
    took = time.monotonic() - begun
    print(f"  {n} calls in {took:.1f} s ({n / took:.0f}/s), the first result after {first * 1000:.0f} ms, in {len(containers)} containers: {dict(seen)}")
    return wrong


async def traces(client: AsyncClient, base: str) -> list[str]:
    clean = (await client.call(Call(base, python=LEFT))).text
    for _ in range(20):
        await client.call(Call(base, python=LEAVE))
        seen = (await client.call(Call(base, python=LEFT))).text
        if seen != clean:
            return [f"a call sees {seen!r} of the one before, first it was {clean!r}"]
    print(f"  20 calls left files and processes; the next ones saw {clean.strip()}")
    return []


async def demo(args: argparse.Namespace) -> list[str]:
    async with AsyncClient() as client:
        print("verdicts")
        wrong = await verdicts(client, args.base)
        print("a batch")
        wrong += await batch(client, args.base, args.n)
        print("traces")
        wrong += await traces(client, args.base)
    said = subprocess.run([args.dsec, "call", "--image", args.base, "--code", "print('from the command line')"], capture_output=True, text=True)
    print(" ", said.stdout.strip())
    return wrong if said.returncode == 0 else wrong + [said.stderr]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--base", required=True, help="tag of the image")
    p.add_argument("--dsec", default="dsec")
    p.add_argument("--n", type=int, default=10_000, help="calls of the batch")
    wrong = asyncio.run(demo(p.parse_args()))
    for line in wrong[:20]:
        print("not as expected:", line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
