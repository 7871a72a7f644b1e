"""The screen of a sandbox that is a machine: what it shows, and what a person would do at it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from . import _wire as w
from ._transport import new_key
from ._wire import Json

if TYPE_CHECKING:
    from ._client import AsyncClient

__all__ = ["Screenshot"]

Region = tuple[int, int, int, int]
Point = tuple[int, int]
CALL_TIMEOUT = 600.0


@dataclass(frozen=True)
class Screenshot:
    """``png`` is a picture of ``region`` (x, y, width, height) of a screen of ``width`` by ``height`` pixels."""

    png: bytes
    region: Region
    width: int
    height: int

    @classmethod
    def from_wire(cls, m: Json) -> Screenshot:
        r = w.message(m, "region") or {}
        return cls(w.data(m, "png"), (w.integer(r, "x"), w.integer(r, "y"), w.integer(r, "width"), w.integer(r, "height")),
                   w.integer(m, "width"), w.integer(m, "height"))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the picture to a file here."""
        target = Path(path)
        target.write_bytes(self.png)
        return target


class AsyncScreen:
    """The screen of a sandbox. Positions are pixels, from the left and the top.

    What an action makes of the screen comes when it comes: take pictures until it is there.
    Raises Unsupported where the tier, or the machine, has no screen.
    """

    def __init__(self, client: AsyncClient, sandbox: str) -> None:
        self._client = client
        self._sandbox = sandbox

    async def screenshot(self, region: Region | None = None) -> Screenshot:
        """What it shows now; ``region``: x, y, width, height of a part."""
        request: Json = {"id": self._sandbox}
        if region is not None:
            request["region"] = dict(zip(("x", "y", "width", "height"), region, strict=True))
        return Screenshot.from_wire(await self._client._call("Screens/Screenshot", request))

    async def move(self, x: int, y: int) -> None:
        """Moves the pointer."""
        await self._act({"kind": "move", "x": x, "y": y})

    async def click(self, x: int, y: int, button: str = "left", count: int = 1) -> None:
        """Clicks there, ``count`` times with "left", "middle" or "right"."""
        await self._act({"kind": "click", "x": x, "y": y, "button": button, "count": count})

    async def double_click(self, x: int, y: int) -> None:
        """Clicks there twice."""
        await self.click(x, y, count=2)

    async def drag(self, start: Point, end: Point, button: str = "left") -> None:
        """Moves from one point to another with a button held."""
        await self._act({"kind": "drag", "x": start[0], "y": start[1], "to_x": end[0], "to_y": end[1], "button": button})

    async def scroll(self, x: int, y: int, down: int = 0, right: int = 0) -> None:
        """Turns the wheel there; negative steps go up and left."""
        await self._act({"kind": "scroll", "x": x, "y": y, "dx": right, "dy": down})

    async def keys(self, *keys: str) -> None:
        """Presses keys in order and lets them go in reverse: ``keys("ctrl", "alt", "t")``."""
        await self._act({"kind": "keys", "keys": list(keys)})

    async def type(self, text: str, compose: bool = False) -> None:
        """Types on a US keyboard.

        ``compose`` types what that has no key for as Ctrl+Shift+U, its number and Space, which
        GTK, IBus and some other programs understand; without it that is Unsupported.
        """
        await self._act({"kind": "text", "text": text, "compose": compose})

    async def act(self, actions: Sequence[dict[str, Any]]) -> None:
        """Several actions in one call, each as the methods here make them: ``{"kind": "click", "x": 1, "y": 2}``."""
        await self._act(*actions)

    async def _act(self, *actions: Json) -> None:
        await self._client._call("Screens/Act", {"id": self._sandbox, "actions": [w.drop_empty(a) for a in actions], "call_id": new_key()},
                                 timeout=CALL_TIMEOUT)
