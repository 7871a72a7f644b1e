"""A relay before the server whose connections can be cut or stopped."""

from __future__ import annotations

import asyncio


class Proxy:
    """Listens at a socket and relays to another; ``connections`` counts those that were made."""

    def __init__(self, path: str, target: str) -> None:
        self.path = path
        self.connections = 0
        self.peak = 0
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flow = asyncio.Event()
        self._flow.set()
        self._refuse = False

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()
        for t in self._tasks:
            t.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Breaks every open connection off."""
        for w in list(self._open):
            w.transport.abort()

    def stop(self) -> None:
        """Passes nothing on any more, and does not say so."""
        self._flow.clear()

    def refuse(self, refuse: bool) -> None:
        """Cuts new connections at once."""
        self._refuse = refuse

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._refuse:
            writer.transport.abort()
            return
        up_reader, up_writer = await asyncio.open_unix_connection(self._target)
        mine = {writer, up_writer}
        self._open |= mine
        self.peak = max(self.peak, len(self._open) // 2)
        tasks = [asyncio.create_task(self._copy(reader, up_writer)), asyncio.create_task(self._copy(up_reader, writer))]
        self._tasks |= set(tasks)
        await asyncio.wait(tasks)
        self._tasks -= set(tasks)
        self._open -= mine

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._flow.wait()
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.transport.abort() if target.transport.is_closing() else target.close()
