"""A command that runs in a sandbox, followed and steered from here."""

from __future__ import annotations

import asyncio
import codecs
import signal as signals
from typing import TYPE_CHECKING, AsyncIterator

from . import _wire as w
from ._mux import Ended, Feed, Sub, read_feed
from ._transport import new_key
from ._wire import Json
from .errors import CommandBlamed, CommandFailed, ExecTimeout, OutputLimitExceeded, SandboxGone
from .types import Result

if TYPE_CHECKING:
    from ._sandbox import AsyncSandbox

STDIN_PIECE = 256 << 10


class AsyncOutputStream:
    """One output stream of a running command; iterate it for bytes as they come.

    While it is iterated, a reader that is slow slows the command down instead of
    losing output. It can be read once; ``offset`` is where the next byte is.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    @property
    def offset(self) -> int:
        """Bytes of the stream before what will be read next; attach there to go on."""
        return self._feed.received - self._feed._held

    @property
    def dropped(self) -> int:
        """Bytes that were lost because nobody read in time."""
        return self._feed.dropped

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in read_feed(self._feed):
            yield data

    async def text(self) -> AsyncIterator[str]:
        """Text as it comes. A character is never cut in two; what is not UTF-8 becomes U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        async for data in read_feed(self._feed):
            piece = decoder.decode(data)
            if piece:
                yield piece
        rest = decoder.decode(b"", final=True)
        if rest:
            yield rest

    async def lines(self) -> AsyncIterator[str]:
        """Lines without their end; the last one also when it has no end."""
        rest = ""
        async for piece in self.text():
            *whole, rest = (rest + piece).split("\n")
            for line in whole:
                yield line
        if rest:
            yield rest

    async def read(self) -> bytes:
        """Everything to the end."""
        pieces = [data async for data in read_feed(self._feed)]
        return b"".join(pieces)


class AsyncProcess:
    """A command in a sandbox. It outlives this object and its connection: see ``AsyncSandbox.attach``."""

    stdout: AsyncOutputStream
    stderr: AsyncOutputStream

    def __init__(self, sandbox: AsyncSandbox, sub: Sub, written: int = 0) -> None:
        self._sandbox = sandbox
        self._sub = sub
        self._written: int | None = written
        self._result: Result | None = None
        self.stdout = AsyncOutputStream(sub.stdout)
        self.stderr = AsyncOutputStream(sub.stderr)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.exec_id} in {self._sandbox.id}>"

    @property
    def exec_id(self) -> str:
        """Names the command in its sandbox."""
        return self._sub.exec_id

    def _name(self, **more: object) -> Json:
        return {"sandbox": self._sandbox.id, "exec": self.exec_id, **more}

    async def _call(self, method: str, request: Json) -> Json:
        return await self._sandbox.client._call(f"Commands/{method}", request)

    async def write(self, data: bytes | str) -> None:
        """Feeds stdin (the command was started with ``stdin=True``); waits while the command does not read."""
        await self._write(data, close=False)

    async def _write(self, data: bytes | str, close: bool) -> None:
        raw = data.encode() if isinstance(data, str) else bytes(data)
        for at in range(0, max(len(raw), 1 if close else 0), STDIN_PIECE):
            piece = raw[at:at + STDIN_PIECE]
            request = self._name(data=w.b64(piece), close=close and at + STDIN_PIECE >= len(raw))
            if self._written is not None:
                request["offset"] = self._written
            answer = await self._sandbox.client._call("Commands/WriteStdin", request, timeout=3600.0,
                                                      idempotent=self._written is not None)
            self._written = w.integer(answer, "offset")

    async def close_stdin(self) -> None:
        """The command sees the end of its stdin."""
        await self._call("CloseStdin", self._name(call_id=new_key()))

    async def resize(self, rows: int, cols: int) -> None:
        """Changes the size of the terminal (of a command with ``pty``)."""
        await self._call("Resize", self._name(size={"rows": rows, "cols": cols}, call_id=new_key()))

    async def signal(self, number: int) -> None:
        """Sends a signal to the main process. IllegalState after its end."""
        await self._call("Signal", self._name(signal=int(number), call_id=new_key()))

    async def terminate(self) -> None:
        """SIGTERM to the main process."""
        await self.signal(signals.SIGTERM)

    async def kill(self) -> bool:
        """Ends the command and everything it started. False if it had ended."""
        answer = await self._call("Kill", self._name(call_id=new_key()))
        return w.boolean(answer, "killed")

    async def wait(self, check: bool = False) -> Result:
        """The result with the kept output, when the command has ended.

        Unlike ``exec`` it raises for a timeout or an output limit only with
        ``check``: look at ``status``. SandboxGone if the sandbox ended meanwhile.
        Output that nobody reads is let go from now on, beyond 1 MiB.
        """
        if self._result is None:
            for feed in (self._sub.stdout, self._sub.stderr):
                if not feed.reading:
                    feed.give_up()
            ended = await _ended(self._sub)
            self._result = await finish(self._sandbox, self.exec_id, ended)
        if check:
            raise_for(self._sandbox.id, self._result, check=True)
        return self._result

    async def detach(self) -> None:
        """Stops following; the command runs on and its output is kept within its limits."""
        await self._sandbox.client._state().mux.unsubscribe(self._sub)

    async def release(self) -> None:
        """Forgets an ended command and its kept output on the node."""
        await self._call("Release", self._name(call_id=new_key()))

    async def __aenter__(self) -> AsyncProcess:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Kills the command if it still runs."""
        if self._sub.ended.done():
            return
        try:
            await self.kill()
        except SandboxGone:
            pass


async def _ended(sub: Sub) -> Ended:
    """Like awaiting the future, but cancelling the waiter does not cancel it."""
    return await asyncio.shield(sub.ended)


async def finish(sandbox: AsyncSandbox, exec_id: str, ended: Ended) -> Result:
    """The result of an ended command, its kept output fetched if it did not come along."""
    stdout, stderr = ended.stdout, ended.stderr
    if stdout is None and stderr is None and _wrote(ended.result):
        kept = await sandbox.client._call("Commands/Kept", {"sandbox": sandbox.id, "exec": exec_id})
        stdout, stderr = w.message(kept, "stdout"), w.message(kept, "stderr")
    result = Result.from_wire(exec_id, ended.result, stdout, stderr)
    if result.status in ("killed", "lost"):
        info = await sandbox.client.get(sandbox.id)
        if not info.live or info.state == "stopping" or result.status == "lost":
            gone = SandboxGone("exec", sandbox.id, f"the sandbox is {info.state}")
            gone.result, gone.exec_result = info.result, result
            raise gone
    return result


def _wrote(result: Json) -> bool:
    return any(w.integer(w.message(result, s) or {}, "total") for s in ("stdout", "stderr"))


def raise_for(sandbox: str, result: Result, check: bool) -> None:
    """Raises what a result stands for."""
    if result.status == "timeout":
        raise ExecTimeout(sandbox, result)
    if result.status == "output_limit":
        raise OutputLimitExceeded(sandbox, result)
    if check and not result.ok:
        raise (CommandBlamed if result.blame else CommandFailed)(sandbox, result)
