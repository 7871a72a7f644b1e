"""Calls a WebAssembly module (WASI preview 1) once for each line, and says what each call used.

    GOOS=wasip1 GOARCH=wasm go build -o tool.wasm tool.go   # any compiler that has WASI does
    seq 1 1000 | DSEC_SOCKET=/run/dsec/gateway.sock python examples/modules.py tool.wasm

A module has no image and needs none: its memory, its standard input and what is said here is all that it sees.
``fuel`` bounds the instructions of a call, so that the limit is the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from libdsec import Call, CallResult, Client


def run(client: Client, module: bytes, lines: Iterable[str]) -> int:
    call = Call(wasm=module, wall=5, memory="64MiB", fuel=1_000_000_000)
    failed = 0
    for r in client.map(call, lines, concurrency=16):
        if isinstance(r, CallResult):
            print(r.index, r.verdict, f"{r.wall * 1000:.1f} ms", f"{r.fuel} instructions", r.text.rstrip(), sep="\t")
        else:
            print(r.index, r, sep="\t")
        failed += not (isinstance(r, CallResult) and r.ok)
    return failed


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with Client() as client:
        sys.exit(1 if run(client, Path(sys.argv[1]).read_bytes(), sys.stdin) else 0)
