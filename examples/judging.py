"""Judges a program on its tests: compiled once, then one stateless call for each test.

    DSEC_SOCKET=/run/dsec/gateway.sock python examples/judging.py gcc:14
"""

from __future__ import annotations

import sys

from libdsec import Call, CallResult, Client

SOURCE = """
#include <stdio.h>
int main(void) { long a, b; scanf("%ld %ld", &a, &b); printf("%ld\\n", a + b); }
"""
TESTS = [("1 2", "3"), ("40 2", "42"), ("-1 1", "0")]


def judge(client: Client, image: str) -> dict[int, str]:
    compiled = client.call(Call(image, ["true"], compile=["gcc", "-O2", "-o", "main", "main.c"], files={"main.c": SOURCE}, outputs=["main"]))
    if not compiled.ok:
        return {i: compiled.verdict for i in range(len(TESTS))}
    run = Call(image, ["sh", "-c", "chmod 755 main && ./main"], files={"main": compiled.files["main"]}, wall=2, cpu_time=1, memory="64MiB")
    results = client.map(run, ({"stdin": given, "expect": want} for given, want in TESTS), concurrency=8)
    return {r.index: r.verdict if isinstance(r, CallResult) else str(r) for r in results if r.index is not None}


if __name__ == "__main__":
    with Client() as client:
        if len(sys.argv) != 2:
            sys.exit("usage: judging.py IMAGE  (an image with gcc)")
        for number, verdict in sorted(judge(client, sys.argv[1]).items()):
            print(number, verdict)
