"""Tries several ways on from one moment: a microVM gets ready once, and is forked with all that runs in it.

    DSEC_SOCKET=/run/dsec/gateway.sock python examples/forking.py IMAGE [COPIES]

A copy has names, an address, the time and the kernel's random numbers of its own; a program that draws from
a generator in its memory has to seed that again.
"""

from __future__ import annotations

import sys

from libdsec import Client, Sandbox


def tried(way: Sandbox) -> int:
    """What one way on is worth: here, a number that the kernel draws."""
    with way:
        return int(way.exec("od -An -N2 -tu2 /dev/urandom", timeout=30).text)


def best(client: Client, image: str, copies: int) -> int:
    with client.create(image, tier="microvm", memory="256MiB") as box:
        box.exec("echo ready > /tmp/state", timeout=30)  # what takes long, once
        kept = box.checkpoint(keep="1h")
        rewards = [tried(way) for way in box.fork(copies)]
    print("rewards:", rewards)
    with client.create(checkpoint=kept.digest) as again:  # also when the machine above is gone
        print("from the checkpoint:", again.exec("cat /tmp/state", timeout=30).text.strip())
    return max(rewards)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    with Client() as client:
        print("best:", best(client, sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 4))
