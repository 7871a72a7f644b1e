"""The one event stream of a client: ends and output of all its commands come here.

A command is subscribed in the call that starts it. When the stream breaks, it
is opened again and every command still waited for is subscribed again with the
offsets that were received, so nothing is lost that the node still keeps.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from dataclasses import dataclass
from typing import Any, AsyncIterator, Coroutine

from . import _wire as w
from ._transport import Transport, cancelled, error_of_detail
from ._wire import Json
from .errors import DsecError, NotFound, Unavailable

WINDOW = 256 << 10  # bytes in flight for each stream of a command
SPARE = 1 << 20  # bytes kept here of a stream that nobody reads
BATCH = 1000


@dataclass(frozen=True)
class Ended:
    """How a command ended, as it came."""

    result: Json
    stdout: Json | None = None
    stderr: Json | None = None


class Feed:
    """One output stream of one command between the event stream and its reader.

    While a reader is attached, or nobody has decided anything yet, unread bytes
    hold the command back. Once the caller only waits, or reads only the other
    stream, the oldest unread bytes beyond SPARE are let go.
    """

    def __init__(self, offset: int, sub: Sub) -> None:
        self.received = offset  # end of what came
        self.consumed = offset  # end of what was read or let go
        self.acked = offset
        self.dropped = 0
        self.eof = False
        self.error: DsecError | None = None
        self.reading = False
        self.lossy = False
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._news = asyncio.Event()
        self._sub = sub

    def push(self, offset: int, data: bytes, eof: bool) -> None:
        if offset < self.received:
            data = data[self.received - offset:]
        elif data and offset > self.received:
            self.dropped += offset - self.received
            self.received = offset
        if data:
            self.received += len(data)
            self._chunks.append(data)
            self._held += len(data)
        self.eof = self.eof or eof
        if self.lossy and not self.reading:
            self._let_go()
        self._news.set()

    def fail(self, error: DsecError) -> None:
        if not self.eof:
            self.error = self.error or error
        self._news.set()

    def spare_other(self) -> None:
        """This stream is read now: the other one, if nobody reads it, must not hold the command back."""
        other = self._sub.stderr if self is self._sub.stdout else self._sub.stdout
        if not other.reading:
            other.give_up()

    def give_up(self) -> None:
        """Nobody reads this stream for now: do not let it hold the command back."""
        if not self.lossy:
            self.lossy = True
            self._let_go()

    def _let_go(self) -> None:
        while self._held > SPARE:
            data = self._chunks.popleft()
            self._held -= len(data)
            self.dropped += len(data)
        self._acknowledge(self.received)

    def _acknowledge(self, upto: int) -> None:
        self.consumed = max(self.consumed, upto)
        if self.consumed - self.acked >= WINDOW // 4 and not self.eof:
            self.acked = self.consumed
            self._sub.mux.ack(self._sub)

    async def next(self) -> bytes:
        """The next piece; empty at the end."""
        while not self._chunks:
            if self.eof:
                return b""
            if self.error:
                raise self.error
            self._news.clear()
            await self._news.wait()
        data = self._chunks.popleft()
        self._held -= len(data)
        self._acknowledge(self.received - self._held)
        return data


class Sub:
    """A command that is waited for. Modes: exit, kept, stream."""

    def __init__(self, mux: Mux, sandbox: str, exec_id: str, mode: str, offsets: tuple[int, int] = (0, 0)) -> None:
        self.mux = mux
        self.sandbox = sandbox
        self.exec_id = exec_id
        self.mode = mode
        self.started = False
        self.broken_at: float | None = None  # when the node was first found to be away
        self.stdout = Feed(offsets[0], self)
        self.stderr = Feed(offsets[1], self)
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.ended.add_done_callback(lambda f: f.cancelled() or f.exception())  # may be nobody's business

    @property
    def key(self) -> tuple[str, str]:
        return self.sandbox, self.exec_id

    @property
    def done(self) -> bool:
        return self.ended.done() and (self.mode != "stream" or (self.stdout.eof and self.stderr.eof))

    def wire(self) -> Json:
        m: Json = {"mode": self.mode}
        if self.mode == "stream":
            m.update(stdout_offset=self.stdout.received, stderr_offset=self.stderr.received, window=WINDOW)
        return m

    def end(self, ended: Ended) -> None:
        if not self.ended.done():
            self.ended.set_result(ended)

    def fail(self, error: DsecError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
        self.stdout.fail(error)
        self.stderr.fail(error)


class Mux:
    """Opens the stream when the first command needs it and keeps it until closed."""

    def __init__(self, transport: Transport, patience: float) -> None:
        self._transport = transport
        self._patience = patience  # seconds without a server before waiters are told
        self._subs: dict[tuple[str, str], Sub] = {}
        self._current: str | None = None
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._why: DsecError | None = None
        self._unacked: set[Sub] = set()
        self._acker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def current(self) -> str | None:
        """The session that is open now."""
        return self._current

    def add(self, sub: Sub) -> None:
        self._subs[sub.key] = sub

    def remove(self, sub: Sub) -> None:
        if self._subs.get(sub.key) is sub:
            del self._subs[sub.key]

    async def session(self) -> str:
        """The open session; opens one if there is none."""
        while self._current is None:
            if self._reader is None or self._reader.done():
                self._why = None
                self._changed.clear()
                self._reader = asyncio.get_running_loop().create_task(self._run())
            await self._changed.wait()
            if self._why is not None:
                raise self._why
            if self._current is None:
                self._changed.clear()
        return self._current

    async def subscribe(self, subs: list[Sub]) -> None:
        """Subscribes commands that run already; what cannot be is told to each of them."""
        for at in range(0, len(subs), BATCH):
            batch = [s for s in subs[at:at + BATCH] if not s.done]
            while batch:
                session = await self.session()
                execs = [{"sandbox": s.sandbox, "exec": s.exec_id, **s.wire()} for s in batch]
                try:
                    await self._transport.call("Events/Subscribe", {"session": session, "execs": execs})
                    break
                except NotFound:
                    if self._current == session:
                        raise

    async def unsubscribe(self, sub: Sub) -> None:
        """Takes a command that still runs off the stream."""
        self.remove(sub)
        if self._current and sub.started and not sub.done:
            await self._transport.call("Events/Unsubscribe", {
                "session": self._current, "execs": [{"sandbox": sub.sandbox, "exec": sub.exec_id}]})

    def ack(self, sub: Sub) -> None:
        self._unacked.add(sub)
        if self._acker is None or self._acker.done():
            self._acker = asyncio.get_running_loop().create_task(self._send_acks())

    async def close(self) -> None:
        tasks = [t for t in (self._reader, self._acker, *self._tasks) if t is not None]
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for s in list(self._subs.values()):
            s.fail(cancelled("exec", s.sandbox))
        self._subs.clear()

    async def _send_acks(self) -> None:
        while self._unacked:
            batch = [self._unacked.pop() for _ in range(min(BATCH, len(self._unacked)))]
            session = self._current
            if session is None:
                return  # the next subscription tells the offsets
            acks = [{"sandbox": s.sandbox, "exec": s.exec_id, "stdout_offset": s.stdout.consumed,
                     "stderr_offset": s.stderr.consumed} for s in batch]
            try:
                await self._transport.call("Events/Ack", {"session": session, "acks": acks})
            except DsecError:
                pass  # a session that breaks is opened again by its reader

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        lost_at: float | None = None
        tried = 0
        while True:
            try:
                async with self._transport.stream("Events/Open", {"session": secrets.token_hex(16)}, 30.0) as stream:
                    async for frame in stream:
                        lost_at, tried = None, 0
                        self._dispatch(frame)
                error: DsecError = Unavailable("follow commands", "", "the event stream ended")
            except DsecError as e:
                error = e if e.retryable else _fatal(e)
            lost_at = loop.time() if lost_at is None else lost_at
            self._current = None
            self._changed.clear()
            if not self._subs or not error.retryable or loop.time() - lost_at > self._patience:
                self._break_off(error)
                return
            await asyncio.sleep(min(0.05 * 2**tried, 2.0))
            tried = min(tried + 1, 10)

    def _break_off(self, error: DsecError) -> None:
        self._why = error
        self._changed.set()
        for s in list(self._subs.values()):
            s.fail(error)
            self.remove(s)

    def _dispatch(self, frame: Json) -> None:
        for kind, value in frame.items():
            if kind == "hello":
                self._opened(w.string(value, "session"))
            elif kind == "output":
                self._output(value)
            elif kind == "ended":
                sub = self._subs.get((w.string(value, "sandbox"), w.string(value, "exec")))
                if sub:
                    sub.end(Ended(w.message(value, "result") or {}, w.message(value, "stdout"),
                                  w.message(value, "stderr")))
                    self._settle(sub)
            elif kind == "error" and w.string(value, "exec"):
                self._broken(value)

    def _opened(self, session: str) -> None:
        self._current = session
        self._changed.set()
        again = [s for s in self._subs.values() if s.started and not s.done]
        if again:
            self._later(self._again(again, 0.0))

    def _broken(self, m: Json) -> None:
        """One subscription ended early: its node is away, or it cannot be followed."""
        sub = self._subs.get((w.string(m, "sandbox"), w.string(m, "exec")))
        if not sub or sub.done:
            return
        now = asyncio.get_running_loop().time()
        error = error_of_detail(w.message(m, "error") or {})
        sub.broken_at = sub.broken_at or now
        if error.retryable and now - sub.broken_at < self._patience:
            if sub.started:
                self._later(self._again([sub], 0.2))
            return
        sub.fail(error)
        self.remove(sub)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self, subs: list[Sub], delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            await self.subscribe(subs)
        except DsecError as e:
            for s in subs:
                s.fail(e)
                self.remove(s)

    def _output(self, m: Json) -> None:
        sub = self._subs.get((w.string(m, "sandbox"), w.string(m, "exec")))
        chunk = w.message(m, "chunk")
        if sub and chunk:
            feed = sub.stderr if w.string(chunk, "stream") == "stderr" else sub.stdout
            sub.broken_at = None
            feed.push(w.integer(chunk, "offset"), w.data(chunk, "data"), w.boolean(chunk, "eof"))
            self._settle(sub)

    def _settle(self, sub: Sub) -> None:
        if sub.done:
            self.remove(sub)


def _fatal(e: DsecError) -> DsecError:
    e.retryable = False
    return e


async def read_feed(feed: Feed) -> AsyncIterator[bytes]:
    """Reads a stream to its end; while this iterator is open the command waits for it."""
    feed.reading = True
    feed.spare_other()
    try:
        while True:
            data = await feed.next()
            if not data:
                return
            yield data
    finally:
        feed.reading = False
