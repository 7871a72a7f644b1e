"""The client: one per process is enough, for any number of sandboxes and commands."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import os
import random
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence, TypeVar

import httpx

from . import _wire as w
from ._endpoint import Endpoint, find
from ._images import AsyncImages, AsyncTemplates
from ._layers import AsyncLayers
from ._mux import Mux
from ._sandbox import AsyncSandbox
from ._transport import Transport, error_of_detail, new_key
from ._wire import Json
from .calls import Call, CallResult
from .errors import DsecError, NotEnough, Unavailable
from .types import Checkpoint, Diff, Event, Info, Node, SandboxInfo, Spec

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._spec_fields import SpecFields

T = TypeVar("T")

CREATE_SILENCE = 600.0  # seconds in which at least one creation of many ends
PAGE = 1000


class _State:
    """Connections; they belong to one process and one event loop."""

    def __init__(self, endpoint: Endpoint, timeout: float, retries: int, patience: float) -> None:
        self.transport = Transport(endpoint, timeout, retries)
        self.mux = Mux(self.transport, patience)
        self.tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=10)
        await self.mux.close()
        await self.transport.close()


class Creating:
    """A sandbox in the making: await it, or use it as ``async with``."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, AsyncSandbox]]) -> None:
        self._make = make
        self._made: AsyncSandbox | None = None

    def __await__(self) -> Generator[Any, None, AsyncSandbox]:
        return self._make().__await__()

    async def __aenter__(self) -> AsyncSandbox:
        self._made = await self._make()
        return self._made

    async def __aexit__(self, *exc: Any) -> None:
        if self._made:
            await self._made.__aexit__(*exc)


class AsyncClient:
    """Speaks to a dsec gateway.

    ``where`` is a URL or the path of a unix socket; without it the environment is
    asked: DSEC_SOCKET, DSEC_URL with DSEC_API_KEY, /run/dsec/gateway.sock, the
    context of the dsec command. ``timeout``: seconds without an answer to a call.
    ``retries``: how often a call is repeated (with the same key) whose outcome is
    unknown or that was refused for now. ``patience``: seconds without a server
    after which those who wait for commands are told.

    Making one connects nothing. It may be used from several event loops and after
    a fork: each gets connections of its own.
    """

    endpoint: Endpoint

    def __init__(self, where: str | None = None, api_key: str | None = None, *, timeout: float = 60.0,
                 retries: int = 6, patience: float = 60.0) -> None:
        self.endpoint = find(where, api_key)
        self.timeout = timeout
        self.retries = retries
        self.patience = patience
        self._states: dict[tuple[int, int], tuple[asyncio.AbstractEventLoop, _State]] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.endpoint.socket or self.endpoint.url}>"

    def _state(self) -> _State:
        loop = asyncio.get_running_loop()
        key = (os.getpid(), id(loop))
        found = self._states.get(key)
        if found is None or found[0] is not loop:
            # What another process or a finished loop had is left alone, not closed: it is not ours to close.
            self._states = {k: v for k, v in self._states.items() if k[0] == key[0] and not v[0].is_closed()}
            found = loop, _State(self.endpoint, self.timeout, self.retries, self.patience)
            self._states[key] = found
        return found[1]

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections of this event loop. Commands and sandboxes live on."""
        found = self._states.pop((os.getpid(), id(asyncio.get_running_loop())), None)
        if found:
            await found[1].close()

    # What the other parts of the library use.

    async def _call(self, method: str, request: Json, *, timeout: float | None = None, idempotent: bool = True) -> Json:
        return await self._state().transport.call(method, request, timeout=timeout, idempotent=idempotent)

    @asynccontextmanager
    async def _stream(self, method: str, request: Json, silence: float | None = None) -> AsyncIterator[AsyncIterator[Json]]:
        async with self._state().transport.stream(method, request, silence) as messages:
            yield messages

    @asynccontextmanager
    async def _raw(self, verb: str, path: str, params: Mapping[str, Any], *, content: Any = None,
                   read_timeout: float | None = None) -> AsyncIterator[httpx.Response]:
        async with self._state().transport.raw(verb, path, params, content=content, read_timeout=read_timeout) as r:
            yield r

    def _framed(self, r: httpx.Response) -> AsyncIterator[bytes]:
        return self._state().transport.framed(r)

    async def _retry(self, attempt: Callable[[], Awaitable[T]], idempotent: bool = True) -> T:
        return await self._state().transport.retry(attempt, idempotent)

    async def _pause(self, tried: int) -> None:
        await asyncio.sleep(min(0.1 * 2**tried, 3.0) * random.uniform(0.5, 1.5))

    def _background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs work that nobody awaits; ``close`` gives it 10 s."""
        state = self._state()

        async def quietly() -> None:
            try:
                await work
            except DsecError:
                pass  # lifetimes clean up what this could not

        task = asyncio.get_running_loop().create_task(quietly())
        state.tasks.add(task)
        task.add_done_callback(state.tasks.discard)

    # Sandboxes.

    def create(self, spec: Spec | str = "", **fields: Unpack[SpecFields]) -> Creating:
        """Creates a sandbox and waits until it runs.

        ``spec`` is a Spec or the image; fields of Spec may follow. With ``checkpoint=digest`` there is
        no image: it goes on from there. Await it, or use
        it as ``async with client.create(…) as sandbox``.
        """
        wanted = _spec(spec, fields)
        if not wanted.call_id:
            wanted = wanted.with_(call_id=new_key())

        async def create() -> AsyncSandbox:
            answer = await self._call("Sandboxes/Create", {"spec": wanted.wire()}, timeout=CREATE_SILENCE)
            return AsyncSandbox(self, SandboxInfo.from_wire(w.message(answer, "sandbox") or {}))

        async def delete(creating: asyncio.Future[AsyncSandbox]) -> None:
            await (await creating).delete()

        async def make() -> AsyncSandbox:
            creating = asyncio.ensure_future(create())
            try:
                return await asyncio.shield(creating)
            except asyncio.CancelledError:
                self._background(delete(creating))  # nobody would know of it
                raise

        return Creating(make)

    async def create_many(self, specs: Spec | Sequence[Spec], count: int | None = None, *, min_count: int = 0,
                          call_id: str = "") -> AsyncIterator[AsyncSandbox | DsecError]:
        """Creates many sandboxes; each comes when it is ready, in any order.

        ``specs`` is several, or one and its ``count``. What comes is a sandbox or the
        error why there is none; ``index`` of either is the number of its spec, and
        one bad spec fails only itself. If fewer than ``min_count`` can be made,
        NotEnough is raised as soon as that is certain; those that came are the
        caller's. What was made but not yet taken when the iteration is left is deleted.
        """
        one = isinstance(specs, Spec)
        wanted = [specs] if isinstance(specs, Spec) else list(specs)
        if not one and count is not None:
            raise ValueError("count goes with one spec")
        total = (1 if count is None else count) if one else len(wanted)
        if total <= 0:
            return
        request: Json = {"specs": [s.wire() for s in wanted], "call_id": call_id or new_key()}
        if one:
            request["count"] = total
        burst = _Burst(self, request, total, min_count)
        try:
            async with aclosing(burst.run()) as results:
                async for got in results:
                    yield got
        finally:
            burst.leave()

    async def connect(self, id: str) -> AsyncSandbox:
        """The sandbox of an id, from any process. NotFound if there never was one."""
        return AsyncSandbox(self, await self.get(id))

    async def get(self, id: str) -> SandboxInfo:
        """What is known of a sandbox, also after its end."""
        answer = await self._call("Sandboxes/Get", {"id": id})
        return SandboxInfo.from_wire(w.message(answer, "sandbox") or {})

    async def checkpoint(self, digest: str) -> Checkpoint:
        """What is known of a checkpoint of this project, whichever node made it."""
        return Checkpoint.from_wire(await self._call("Sandboxes/FindCheckpoint", {"digest": digest}))

    async def diff(self, id: str, most: int = 0) -> Diff:
        """What the disk of a sandbox differs in from its layers, also of one that failed and whose disk is kept."""
        request = w.drop_empty({"id": id, "most": most})
        return Diff.from_wire(await self._call("Sandboxes/Changes", request, timeout=1800.0))

    async def debug(self, id: str) -> AsyncSandbox:
        """Opens the disk of a sandbox in a new one, without network: of one that failed as it was kept, else as it is now.

        Delete the new one when you have seen enough; after a day it goes by itself.
        """
        was = await self.get(id)
        digest = was.kept.digest if was.kept else ""
        if not digest:
            packed = await self._call("Sandboxes/Commit", {"id": id, "call_id": new_key()}, timeout=1800.0)
            digest = w.string(packed, "digest")
        s = was.spec
        return await self.create(Spec(
            digest, tier=s.tier, env=s.env, user=s.user, workdir=s.workdir, network="none", cpu=s.cpu, memory=s.memory,
            pids=s.pids, disk=s.disk, lifetime=86400.0, retention=60.0, profile=s.profile, labels={"dsec.debug": id}))

    async def list(self, *, states: Sequence[str] = (), labels: Mapping[str, str] | None = None, rollout_key: str = "",
                   all: bool = False) -> builtins.list[SandboxInfo]:
        """Sandboxes, newest first; with ``all`` those that ended too, from their records."""
        request = w.drop_empty({"states": list(states), "labels": dict(labels or {}), "rollout_key": rollout_key,
                                "all": all, "page_size": PAGE})
        found: builtins.list[SandboxInfo] = []
        while True:
            answer = await self._call("Sandboxes/List", request)
            found += [SandboxInfo.from_wire(m) for m in w.messages(answer, "sandboxes")]
            request["page"] = w.string(answer, "next_page")
            if not request["page"]:
                return found

    async def events(self, *, sandboxes: Sequence[str] = (), labels: Mapping[str, str] | None = None,
                     rollout_key: str = "", since: datetime | None = None, types: Sequence[str] = (), follow: bool = True,
                     on_live: Callable[[Sequence[str]], None] | None = None) -> AsyncIterator[Event]:
        """What happens to sandboxes, from ``since`` (else now) on, until the iteration is left.

        A broken connection is opened again where it was; no event comes twice.
        ``on_live`` is called once: what had happened before has come, what follows
        happens now; it gets the nodes that could not be asked for what had. Without
        ``follow`` the iteration ends there, with Unavailable if there are such nodes.
        """
        seen: dict[str, int] = {}
        failures = 0
        absent: builtins.list[str] | None = None  # None: the past has not come yet
        filter_ = w.drop_empty({"sandboxes": list(sandboxes), "labels": dict(labels or {}), "rollout_key": rollout_key,
                                "types": list(types)})
        while True:
            if since is not None:
                filter_["since"] = w.timestamp(since)
            try:
                async with self._stream("Events/Open", {"session": new_key(), "events": filter_}, 30.0) as frames:
                    async for frame in frames:
                        failures = 0
                        live = w.message(frame, "live")
                        if live is not None:
                            absent = w.strings(live, "absent")
                            if on_live:
                                on_live(absent)
                                on_live = None
                            if not follow:
                                break
                        m = w.message(frame, "event")
                        if not m:
                            continue
                        event = Event.from_wire(m)
                        since = event.time or since
                        if event.seq > seen.get(event.sandbox, 0):
                            seen[event.sandbox] = event.seq
                            yield event
            except DsecError as e:
                failures += 1
                if not e.retryable or failures > self.retries:
                    raise
            if absent is not None and not follow:
                if absent:
                    raise Unavailable("read past events of node", ", ".join(absent), "it does not answer")
                return
            await self._pause(failures)

    # Stateless calls.

    async def call(self, call: Call, **fields: Any) -> CallResult:
        """Makes a stateless call; fields of Call may follow.

        Whatever the call itself does is in the result; an exception says that the platform
        could not, or that the call cannot be made as it is. The same ``call_id`` again gives the same result for ten minutes.
        """
        return await self._called(call.with_(**fields) if fields else call, 0)

    async def _called(self, call: Call, index: int) -> CallResult:
        wait = (call.wall or 10) + (call.compile_time or 30) + 660
        return CallResult.from_wire(await self._call("Functions/Call", call.wire(), timeout=wait), index)

    async def map(self, call: Call, inputs: Iterable[bytes | str | Mapping[str, Any]], *, concurrency: int = 64) -> AsyncIterator[CallResult | DsecError]:
        """Makes the call for each input, at most ``concurrency`` at a time, and gives the results as they come.

        An input is bytes or text for stdin, or a mapping of fields of Call. What comes is a CallResult, or the
        error why there is none; ``index`` of either is the number of its input. Inputs are taken as they are needed. Calls at
        work when the iteration is left are ended.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency of {concurrency}")
        rest = enumerate(inputs)

        async def one(index: int, given: bytes | str | Mapping[str, Any]) -> CallResult | DsecError:
            try:
                return await self._called(call.given(given).with_(call_id=f"{call.call_id}.{index}" if call.call_id else ""), index)
            except DsecError as e:
                e.index = index
                return e

        working = {asyncio.ensure_future(one(i, v)) for i, v in itertools.islice(rest, concurrency)}
        try:
            while working:
                done, working = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
                for i, v in itertools.islice(rest, len(done)):
                    working.add(asyncio.ensure_future(one(i, v)))
                for d in done:
                    yield d.result()
        finally:
            for left in working:
                left.cancel()
            await asyncio.gather(*working, return_exceptions=True)

    # The server.

    @property
    def layers(self) -> AsyncLayers:
        return AsyncLayers(self)

    @property
    def images(self) -> AsyncImages:
        return AsyncImages(self)

    @property
    def templates(self) -> AsyncTemplates:
        return AsyncTemplates(self)

    async def info(self) -> Info:
        return Info.from_wire(await self._call("System/Info", {}))

    async def nodes(self) -> builtins.list[Node]:
        answer = await self._call("System/Nodes", {})
        return [Node.from_wire(m) for m in w.messages(answer, "nodes")]


def _spec(spec: Spec | str, fields: Mapping[str, Any]) -> Spec:
    if isinstance(spec, str):
        return Spec(spec, **fields)
    return spec.with_(**fields) if fields else spec


class _Burst:
    """One create_many: survives broken streams, and deletes what nobody took."""

    def __init__(self, client: AsyncClient, request: Json, total: int, min_count: int) -> None:
        self._client = client
        self._request = request
        self._total = total
        self._min = min_count
        self._seen: set[int] = set()
        self._made = 0
        self._errors: list[DsecError] = []

    async def run(self) -> AsyncGenerator[AsyncSandbox | DsecError, None]:
        async with aclosing(self._results()) as results:
            async for got in results:
                if isinstance(got, AsyncSandbox):
                    self._made += 1
                else:
                    self._errors.append(got)
                yield got
                if self._total - len(self._errors) < self._min:
                    raise NotEnough(self._min, self._made, self._errors)

    async def _results(self) -> AsyncGenerator[AsyncSandbox | DsecError, None]:
        tried = 0
        while len(self._seen) < self._total:
            try:
                async with self._client._stream("Sandboxes/CreateMany", self._request, CREATE_SILENCE) as answers:
                    async for m in answers:
                        got = self._take(m)
                        if got is not None:
                            tried = 0
                            yield got
                if len(self._seen) >= self._total:
                    return
            except DsecError as e:
                if not e.retryable or tried >= self._client.retries:
                    raise
            tried += 1
            await self._client._pause(tried)

    def _take(self, m: Json) -> AsyncSandbox | DsecError | None:
        index = w.integer(m, "index")
        if index in self._seen:
            return None
        self._seen.add(index)
        error, sandbox = w.message(m, "error"), w.message(m, "sandbox")
        if sandbox:
            return AsyncSandbox(self._client, SandboxInfo.from_wire(sandbox), index)
        e = error_of_detail(error or {})
        e.index = index
        return e

    def leave(self) -> None:
        """Left before the end: the same call with the same key tells what else was made."""
        if len(self._seen) < self._total:
            self._client._background(self._delete_rest())

    async def _delete_rest(self) -> None:
        async for got in self._results():
            if isinstance(got, AsyncSandbox):
                await got.delete()
