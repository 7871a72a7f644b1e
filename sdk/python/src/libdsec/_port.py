"""A port inside a sandbox, reached through gateway and node."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx

from ._endpoint import Endpoint
from .errors import Timeout

if TYPE_CHECKING:
    from ._client import AsyncClient


class AsyncPort:
    """HTTP to a port of a sandbox. Nothing has to listen yet; see ``wait``."""

    number: int

    def __init__(self, client: AsyncClient, sandbox: str, number: int) -> None:
        if not 0 < number < 65536:
            raise ValueError(f"{number} is no port")
        self._client = client
        self._sandbox = sandbox
        self.number = number

    @property
    def url(self) -> str:
        """Base of what the port serves; needs the client's key, and its socket if it has one."""
        return f"{self._client.endpoint.url}/v1/sandboxes/{self._sandbox}/ports/{self.number}"

    def http(self, **options: Any) -> httpx.AsyncClient:
        """An httpx client whose base is the port. Close it, or use it as a context manager."""
        return httpx.AsyncClient(**_options(self._client.endpoint, self.url, options, httpx.AsyncHTTPTransport))

    async def wait(self, timeout: float = 30.0) -> None:
        """Returns when something listens there and answers HTTP; Timeout otherwise."""
        deadline = asyncio.get_running_loop().time() + timeout
        delay = 0.05
        async with self.http(timeout=5.0) as c:
            while True:
                try:
                    if (await c.get("/")).status_code not in (502, 503, 504):
                        return
                except httpx.HTTPError:
                    pass
                if asyncio.get_running_loop().time() + delay > deadline:
                    raise Timeout("wait for port", f"{self._sandbox}:{self.number}", f"nothing answered in {timeout:g} s")
                await asyncio.sleep(delay)
                delay = min(delay * 1.5, 1.0)


def _options(endpoint: Endpoint, url: str, options: dict[str, Any], transport: Any) -> dict[str, Any]:
    headers = dict(options.pop("headers", None) or {})
    if endpoint.api_key:
        headers.setdefault("Authorization", f"Bearer {endpoint.api_key}")
    return {"transport": transport(uds=endpoint.socket or None), "base_url": url, "headers": headers,
            "trust_env": False, **options}


def sync_http(port: AsyncPort, options: dict[str, Any]) -> httpx.Client:
    """The same for code without an event loop."""
    return httpx.Client(**_options(port._client.endpoint, port.url, options, httpx.HTTPTransport))
