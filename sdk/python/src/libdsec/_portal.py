"""An event loop in a thread of its own, for code without one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from typing import Any, AsyncIterator, Awaitable, Callable, Iterator, TypeVar

T = TypeVar("T")


class Portal:
    """Runs coroutines for threads that wait. After a fork the child gets a loop of its own."""

    def __init__(self) -> None:
        self._pid = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._pid != os.getpid():  # the first use here, or the first after a fork: then no other thread lives
            self._lock, self._loop, self._thread = threading.Lock(), None, None
            self._pid = os.getpid()
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="libdsec", daemon=True)
                self._thread.start()
            return self._loop

    def run(self, work: Awaitable[T]) -> T:
        """The result of work. An interrupted wait (ctrl-C) cancels it."""
        loop = self._running()
        if threading.current_thread() is self._thread:
            raise RuntimeError("a plain libdsec call from libdsec's own event loop would wait for itself")
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(_coroutine(work), loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, work: AsyncIterator[T], wrap: Callable[[T], Any] | None = None) -> Iterator[Any]:
        """What an asynchronous iterator gives; left early, it is closed."""
        try:
            while True:
                try:
                    item = self.run(work.__anext__())
                except StopAsyncIteration:
                    return
                yield wrap(item) if wrap else item
        finally:
            close = getattr(work, "aclose", None)
            if close is not None:
                self.run(close())

    def stop(self) -> None:
        """Ends the loop; a later use starts another."""
        if self._pid != os.getpid():
            return
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _coroutine(work: Awaitable[T]) -> T:
    return await work


