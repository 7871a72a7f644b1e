"""Watching a directory of a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, AsyncGenerator, AsyncIterator

from . import _wire as w
from ._wire import Json
from .errors import Unavailable
from .types import Change

if TYPE_CHECKING:
    from ._client import AsyncClient


class AsyncWatch:
    """Changes below a directory, from ``files.watch``. ``op`` lost: some were missed, list again."""

    def __init__(self, client: AsyncClient, request: Json) -> None:
        self._path = w.string(request, "path")
        self._answers = _answers(client, request)
        self._changes = _changes(self._answers)

    async def __aenter__(self) -> AsyncWatch:
        """Waits until the watch is in place."""
        if await anext(self._answers, None) is None:
            raise Unavailable("watch", self._path, "it ended before it began")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._answers.aclose()

    def __aiter__(self) -> AsyncIterator[Change]:
        return self._changes


async def _answers(client: AsyncClient, request: Json) -> AsyncGenerator[Change, None]:
    """What the server says, beginning with that it watches."""
    async with client._stream("Files/Watch", request) as answers:
        async for m in answers:
            if w.string(m, "op"):
                yield Change(w.string(m, "path"), w.string(m, "op"))


async def _changes(answers: AsyncGenerator[Change, None]) -> AsyncGenerator[Change, None]:
    try:
        async for change in answers:
            if change.op != "watching":
                yield change
    finally:
        await answers.aclose()
