"""A progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time


class Progress:
    """One line that is drawn again; off a terminal a line at each tenth and at the end."""

    def __init__(self, what: str, total: int) -> None:
        self.what = what
        self.total = max(total, 1)
        self.done = 0
        self._tty = sys.stdout.isatty()
        self._begun = time.monotonic()
        self._drawn = 0.0
        self._tenth = 0
        self._note = ""

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def __exit__(self, *exc: object) -> None:
        self._draw(last=True)
        if self._tty:
            print()

    def step(self, note: str = "") -> None:
        self.done += 1
        self._note = note
        self._draw()

    def _draw(self, last: bool = False) -> None:
        now = time.monotonic()
        share = min(self.done / self.total, 1.0)
        took = now - self._begun
        if self._tty:
            if not last and now - self._drawn < 0.05:
                return
            self._drawn = now
            width = 30
            bar = "█" * int(share * width) + "·" * (width - int(share * width))
            print(f"\r{self.what:<22} {bar} {self.done:>4}/{self.total} {took:6.1f} s  {self._note:<32.32}",
                  end="", flush=True)
            return
        tenth = int(share * 10)
        if tenth > self._tenth or last and self.done < self.total:
            self._tenth = tenth
            print(f"{self.what}: {self.done}/{self.total} after {took:.1f} s", flush=True)
