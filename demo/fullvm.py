"""A machine with a screen: boots it, runs commands in it, clicks a button, types, and goes back to before.

What is said to be on the screen was seen there: pictures are compared, and what the program on it
says of itself. Pictures are kept in ``--out``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Callable

from libdsec import Client, Sandbox, Screenshot

BUTTON = (40, 40, 320, 100)
FIELD = (40, 180, 900, 60)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--image", required=True)
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    client = Client()
    begun = time.monotonic()
    say = lambda text: print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)  # noqa: E731
    with client.create(a.image, tier="fullvm", cpu=2, memory="384M", disk="2G", network="none") as box:
        say(f"a machine has booted: {box.exec('uname -sr; cat /proc/1/comm').text.split()}")
        box.files.write("/root/note", b"from outside")
        say(f"a file that was written from outside: {box.exec('cat /root/note').text!r}")
        until("the program on the screen has its devices", lambda: "USB_Tablet" in shown(box) and "USB_Keyboard" in shown(box))
        first = keep(box, a.out / "fullvm-1-before.png")
        before = box.screen.screenshot(BUTTON).png
        box.mark("before")
        say(f"a mark was set; the screen has {first.width} by {first.height} pixels")
        box.screen.click(200, 90)
        until("the button shows the click", lambda: "clicks=1" in shown(box) and box.screen.screenshot(BUTTON).png != before)
        say("a click changed the button")
        empty = box.screen.screenshot(FIELD).png
        box.screen.type("Hello from libdsec: caf\u00e9", compose=True)
        until("the text is on the screen", lambda: "caf\u00e9" in shown(box) and box.screen.screenshot(FIELD).png != empty)
        keep(box, a.out / "fullvm-2-after.png")
        say(f"what was typed is there: {shown(box).split('text=')[1].strip()!r}")
        began = time.monotonic()
        box.revert("before")
        took = time.monotonic() - began
        until("the screen is what it was", lambda: keep(box, a.out / "fullvm-3-reverted.png").png == first.png)
        say(f"going back took {took:.2f} s, and the screen is what it was, byte for byte: {'clicks=0' in shown(box)}")
        say(f"its console ends: {box.console().strip().splitlines()[-1]!r}")
    say(f"the machine is gone; pictures: {a.out}/fullvm-*.png")
    return 0


def shown(box: Sandbox) -> str:
    return box.exec("cat /run/screen").text


def keep(box: Sandbox, path: Path) -> Screenshot:
    shot = box.screen.screenshot()
    shot.save(path)
    return shot


def until(what: str, so: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not so():
        if time.monotonic() > end:
            raise SystemExit(f"demo: not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
