"""A bounded queue of bytes between an event loop and a thread that wants plain files."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import deque
from typing import AsyncIterator, Callable, TypeVar

T = TypeVar("T")

PIECE = 256 << 10
DEPTH = 8  # pieces waiting


class Gone(Exception):
    """The other side has left."""


class Pipe(io.RawIOBase):
    """One direction. The thread uses it as a file; the loop pushes or pulls."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        self._lock = threading.Condition()
        self._pieces: deque[bytes] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._gone = False
        self._rest = b""

    def _tell(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._moved.set)
        except RuntimeError:
            pass  # the loop is closed, nobody waits

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will be written. From either side."""
        with self._lock:
            self._ended, self._error = True, self._error or error
            self._lock.notify_all()
        self._tell()

    def leave(self) -> None:
        """Nothing more will be read. From either side."""
        with self._lock:
            self._gone = True
            self._lock.notify_all()
        self._tell()

    # In the thread.

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        raw = bytes(data)  # type: ignore[call-overload]
        with self._lock:
            self._lock.wait_for(lambda: len(self._pieces) < DEPTH or self._gone)
            if self._gone:
                raise Gone
            self._pieces.append(raw)
        self._tell()
        return len(raw)

    def take(self) -> bytes:
        """The next piece; empty at the end."""
        with self._lock:
            self._lock.wait_for(lambda: bool(self._pieces) or self._ended)
            if not self._pieces:
                if self._error:
                    raise self._error
                return b""
            piece = self._pieces.popleft()
        self._tell()
        return piece

    def read(self, size: int = -1) -> bytes:
        pieces = [self._rest]
        have = len(self._rest)
        while size < 0 or have < size:
            piece = self.take()
            if not piece:
                break
            pieces.append(piece)
            have += len(piece)
        data = b"".join(pieces)
        out, self._rest = (data, b"") if size < 0 else (data[:size], data[size:])
        return out

    # In the loop.

    async def push(self, piece: bytes) -> bool:
        """False when nobody reads any more."""
        while True:
            self._moved.clear()
            with self._lock:
                if self._gone:
                    return False
                if len(self._pieces) < DEPTH:
                    self._pieces.append(piece)
                    self._lock.notify_all()
                    return True
            await self._moved.wait()

    async def pull(self) -> bytes:
        """The next piece; empty at the end."""
        while True:
            self._moved.clear()
            with self._lock:
                if self._pieces:
                    piece = self._pieces.popleft()
                    self._lock.notify_all()
                    return piece
                if self._ended:
                    if self._error:
                        raise self._error
                    return b""
            await self._moved.wait()


async def from_thread(work: Callable[[Pipe], None]) -> AsyncIterator[bytes]:
    """What work writes into the pipe, in its own thread."""
    pipe = Pipe()

    def run() -> None:
        try:
            work(pipe)
        except Gone:
            return
        except BaseException as e:
            pipe.end(e)
        else:
            pipe.end()

    threading.Thread(target=run, name="dsec-tree", daemon=True).start()
    try:
        while piece := await pipe.pull():
            yield piece
    finally:
        pipe.leave()


async def in_thread(pieces: AsyncIterator[bytes], work: Callable[[Pipe], T]) -> T:
    """The result of work, which reads pieces from the pipe in its own thread."""
    pipe = Pipe()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work(pipe)
        except BaseException as e:
            error = e
        pipe.leave()
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            pass

    threading.Thread(target=run, name="dsec-tree", daemon=True).start()
    try:
        async for piece in pieces:
            if piece and not await pipe.push(piece):
                break
    except BaseException as e:
        pipe.end(e)
        await asyncio.wait([done])
        done.exception()
        raise
    pipe.end()
    return await done
