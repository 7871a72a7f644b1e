"""HTTP to the gateway: Connect calls by hand, raw bodies, retries.

A call that changes something carries its key (call_id), so that it is repeated
when nobody knows whether it took effect. Few connections: unary calls share a
small number of them and wait for their turn here.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import uuid
from contextlib import asynccontextmanager
from typing import Any, AsyncIterator, Awaitable, Callable, Mapping, TypeVar, cast

import httpx

from . import _frames as frames
from . import _wire as w
from ._endpoint import Endpoint
from ._wire import Json
from .errors import Canceled, DsecError, Internal, SandboxGone, Timeout, Unavailable, from_class
from .types import SandboxResult

T = TypeVar("T")

UNARY_CONNECTIONS = 24
BULK_CONNECTIONS = 64

# What a status without a body of ours means; the rest is internal.
_STATUS_CLASS = {400: "invalid", 401: "unauthenticated", 403: "permission_denied", 404: "not_found",
                 409: "conflict", 413: "invalid", 416: "invalid", 429: "resource_exhausted",
                 502: "unavailable", 503: "unavailable", 504: "timeout", 507: "no_space"}
_CODE_CLASS = {"canceled": "canceled", "invalid_argument": "invalid", "deadline_exceeded": "timeout",
               "not_found": "not_found", "already_exists": "already_exists", "permission_denied": "permission_denied",
               "resource_exhausted": "resource_exhausted", "failed_precondition": "illegal_state",
               "aborted": "conflict", "unimplemented": "unsupported", "unavailable": "unavailable",
               "data_loss": "corrupt", "unauthenticated": "unauthenticated"}


def new_key() -> str:
    """An idempotency key; also the id of an exec."""
    return uuid.uuid4().hex


def error_of_detail(d: Json) -> DsecError:
    """The exception of an ErrorDetail message."""
    kind = from_class(w.string(d, "class"))
    e = kind(w.string(d, "op") or "call", w.string(d, "object"), w.string(d, "message"),
             retryable=w.boolean(d, "retryable") or kind.retryable_class, retry_after=w.number(d, "retry_after"))
    if isinstance(e, SandboxGone):
        result = w.message(d, "result")
        e.result = SandboxResult.from_wire(result) if result else None
    return e


def error_of_connect(m: Json, op: str) -> DsecError:
    """The exception of a Connect error object."""
    for d in w.messages(m, "details"):
        debug = w.message(d, "debug")
        if w.string(d, "type") == "dsec.v1.ErrorDetail" and debug and debug.get("class"):
            return error_of_detail(debug)
    kind = from_class(_CODE_CLASS.get(w.string(m, "code"), "internal"))
    return kind(op, "", w.string(m, "message") or w.string(m, "code"))


def error_of_response(status: int, headers: Mapping[str, str], body: bytes, op: str) -> DsecError:
    """The exception of an HTTP answer that is not a success."""
    e: DsecError
    try:
        m = json.loads(body)
    except ValueError:
        m = None
    if isinstance(m, dict) and m.get("code"):
        e = error_of_connect(cast(Json, m), op)
    else:
        text = body[:200].decode("utf-8", "replace").strip()
        e = from_class(_STATUS_CLASS.get(status, "internal"))(op, "", f"HTTP {status} {text}".strip())
    if not e.retry_after:
        try:
            e.retry_after = float(headers.get("retry-after", "0"))
        except ValueError:
            pass
    return e


class NotSent(Unavailable):
    """No connection was made, so nothing can have happened."""


def error_of_httpx(e: Exception, op: str, where: str) -> DsecError:
    """The exception of a broken or silent connection to a socket or URL."""
    text = str(e) or type(e).__name__
    if isinstance(e, (httpx.ConnectError, httpx.ConnectTimeout)):
        return NotSent(op, where, f"connect: {text}; is dsec up there?")
    if isinstance(e, httpx.TimeoutException):
        return Timeout(op, where, f"no answer in time ({type(e).__name__}); the outcome is unknown")
    if isinstance(e, (httpx.TransportError, frames.FrameError)):
        return Unavailable(op, where, f"connection broke: {text}")
    return Internal(op, "", text)


class Lanes:
    """A bounded number of HTTP clients of one connection each.

    One that was left in the middle of an exchange is closed, not used again: the
    connection pool of httpx loses a connection when its user is cancelled.
    """

    def __init__(self, make: Callable[[], httpx.AsyncClient], most: int) -> None:
        self._make = make
        self._idle: list[httpx.AsyncClient] = []
        self._gate = asyncio.Semaphore(most)
        self._closed = False

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[httpx.AsyncClient]:
        async with self._gate:
            client = self._idle.pop() if self._idle else self._make()
            whole = False
            try:
                yield client
                whole = True
            except DsecError:
                whole = True  # an answer, or a connection that httpx has closed itself
                raise
            finally:
                if whole and not self._closed:
                    self._idle.append(client)
                else:
                    await client.aclose()

    async def close(self) -> None:
        self._closed = True
        idle, self._idle = self._idle, []
        for client in idle:
            await client.aclose()


class Transport:
    """The connections of one client in one process and event loop."""

    def __init__(self, endpoint: Endpoint, timeout: float, retries: int) -> None:
        self.endpoint = endpoint
        self.where = endpoint.socket or endpoint.url
        self.timeout = timeout
        self.retries = retries
        # Loading the certificates takes 10 ms: once, and only where they are used.
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if endpoint.url.startswith("https:") else False
        self._unary = Lanes(self._client, UNARY_CONNECTIONS)
        self._bulk = Lanes(self._client, BULK_CONNECTIONS)

    def _headers(self) -> dict[str, str]:
        key = self.endpoint.api_key
        return {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=20)
        transport = httpx.AsyncHTTPTransport(uds=self.endpoint.socket or None, verify=self._tls, limits=limits)
        return httpx.AsyncClient(transport=transport, base_url=self.endpoint.url, headers=self._headers(),
                                 timeout=self._timeout(self.timeout), trust_env=False)

    def _timeout(self, read: float | None) -> httpx.Timeout:
        return httpx.Timeout(read, connect=min(10.0, self.timeout), write=max(60.0, self.timeout), pool=None)

    async def close(self) -> None:
        await self._unary.close()
        await self._bulk.close()

    async def retry(self, attempt: Callable[[], Awaitable[T]], idempotent: bool = True) -> T:
        """Runs attempt until it succeeds, fails for good, or was repeated often enough."""
        tried = 0
        while True:
            try:
                return await attempt()
            except DsecError as e:
                refused = isinstance(e, NotSent) or e.class_ == "resource_exhausted"
                if not e.retryable or not (idempotent or refused) or tried >= self.retries:
                    raise
                backoff: float = min(0.1 * 2**tried, 3.0) * random.uniform(0.5, 1.5)
                await asyncio.sleep(max(e.retry_after, backoff))
                tried += 1

    async def call(self, method: str, request: Json, *, timeout: float | None = None, idempotent: bool = True) -> Json:
        """A unary call. ``method`` is "Service/Method", ``timeout`` seconds without an answer."""
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json", "Connect-Protocol-Version": "1"}

        async def attempt() -> Json:
            async with self._unary.lane() as lane:
                try:
                    r = await lane.post(f"/dsec.v1.{method}", content=body, headers=headers,
                                        timeout=self._timeout(timeout or self.timeout))
                except httpx.HTTPError as e:
                    raise error_of_httpx(e, method, self.where) from e
            if r.status_code != 200:
                raise error_of_response(r.status_code, r.headers, r.content, method)
            return cast(Json, r.json())

        return await self.retry(attempt, idempotent)

    @asynccontextmanager
    async def stream(self, method: str, request: Json, silence: float | None = None) -> AsyncIterator[AsyncIterator[Json]]:
        """A server-streaming call; not repeated. ``silence``: seconds without a message that end it."""
        headers = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
        body = frames.frame(json.dumps(request).encode())
        async with self._bulk.lane() as lane:
            try:
                async with lane.stream("POST", f"/dsec.v1.{method}", content=body, headers=headers,
                                             timeout=self._timeout(silence)) as r:
                    if r.status_code != 200:
                        raise error_of_response(r.status_code, r.headers, await r.aread(), method)
                    yield _messages(r, method)
            except (httpx.HTTPError, frames.FrameError) as e:
                raise error_of_httpx(e, method, self.where) from e

    @asynccontextmanager
    async def raw(self, verb: str, path: str, params: Mapping[str, Any], *, content: Any = None,
                  read_timeout: float | None = None) -> AsyncIterator[httpx.Response]:
        """One HTTP exchange with a body that may be large; not repeated."""
        query: list[tuple[str, str | int | float | bool | None]] = [
            (k, str(v)) for k, vs in params.items() for v in (vs if isinstance(vs, list) else [vs])]
        async with self._bulk.lane() as lane:
            try:
                async with lane.stream(verb, path, params=query, content=content,
                                             timeout=self._timeout(read_timeout or self.timeout)) as r:
                    if r.status_code not in (200, 204, 206):
                        raise error_of_response(r.status_code, r.headers, await r.aread(), f"{verb} {path}")
                    yield r
            except httpx.HTTPError as e:
                raise error_of_httpx(e, f"{verb} {path}", self.where) from e

    async def framed(self, r: httpx.Response) -> AsyncIterator[bytes]:
        """The data of a framed=1 body; raises what the last frame says, or that there was none."""
        cutter = frames.Cutter()
        async for piece in r.aiter_raw():
            for flags, payload in cutter.feed(piece):
                if not flags & frames.END_STREAM:
                    yield payload
                    continue
                m = json.loads(payload or b"{}")
                if m.get("error"):
                    raise error_of_connect(cast(Json, m["error"]), str(r.request.url.path))
                return
        raise Unavailable("read", str(r.request.url.path), "the body ended before its last frame")


async def _messages(r: httpx.Response, method: str) -> AsyncIterator[Json]:
    cutter = frames.Cutter()
    async for piece in r.aiter_raw():
        for flags, payload in cutter.feed(piece):
            if flags & frames.COMPRESSED:
                raise Internal(method, "", "a compressed message that was not asked for")
            m = cast(Json, json.loads(payload or b"{}"))
            if not flags & frames.END_STREAM:
                yield m
                continue
            error = w.message(m, "error")
            if error:
                raise error_of_connect(error, method)
            return
    raise Unavailable(method, "", "the stream ended before its last message")


def cancelled(op: str, sandbox: str) -> Canceled:
    return Canceled(op, sandbox, "the client was closed")
