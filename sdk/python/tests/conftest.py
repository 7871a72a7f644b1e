"""Fixtures: a real server, from DSEC_TEST_SERVER or built from this repository."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Awaitable, Callable, Coroutine, Iterator, TypeVar

import pytest

from libdsec import AsyncClient, AsyncSandbox, Call, Client, Sandbox
from libdsec.errors import Unsupported

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Server:
    """Where the server is. ``kind``: what runs the sandboxes, fake or container."""

    socket: str
    image: str
    kind: str
    url: str = ""
    api_key: str = ""


def command(tmp: Path) -> list[str]:
    if os.environ.get("DSEC_TEST_SERVER"):
        return ["/bin/sh", "-c", os.environ["DSEC_TEST_SERVER"]]
    go = shutil.which("go")
    if go is None or not (ROOT / "go.mod").exists():
        pytest.skip("DSEC_TEST_SERVER is not set, and there is no Go to build a server with")
    binary = tmp / "testserver"
    subprocess.run([go, "build", "-o", str(binary), "./sdk/python/testserver"], cwd=ROOT, check=True,
                   env={**os.environ, "CGO_ENABLED": "0"})
    return [str(binary)]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs until its stdin is closed."""
    process = subprocess.Popen(command(tmp_path_factory.mktemp("server")), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    try:
        line = process.stdout.readline()
        if not line:
            pytest.fail(f"the server ended with {process.wait(10)} before it said where it is")
        where: dict[str, Any] = json.loads(line)
        yield Server(where["socket"], where["image"], where.get("kind", "container"), where.get("url", ""),
                     where.get("api_key", ""))
    finally:
        process.stdin.close()
        try:
            status = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
    assert status == 0, f"the server ended with {status}"


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.socket) as c:
        yield c


@pytest.fixture
def box(client: Client, server: Server) -> Iterator[Sandbox]:
    with client.create(server.image, labels={"test": "libdsec"}) as b:
        yield b


@pytest.fixture
def run(server: Server) -> Callable[[Callable[[AsyncClient, AsyncSandbox], Coroutine[Any, Any, T]]], T]:
    """Runs an asynchronous test with a client and a sandbox, for at most 120 s."""

    def go(test: Callable[[AsyncClient, AsyncSandbox], Awaitable[T]]) -> T:
        async def body() -> T:
            async with AsyncClient(server.socket) as c, c.create(server.image) as b:
                return await asyncio.wait_for(test(c, b), 120)

        return asyncio.run(body())

    return go


@pytest.fixture
def real(server: Server, box: Sandbox) -> Server:
    """Skips what needs a real shell inside, where there is none, and shows that there is none."""
    if server.kind == "fake":
        r = box.exec("f() { echo ran; }; f")
        assert r.stdout != b"ran\n", "the fake tier has a real shell now"
        pytest.skip(f"the fake tier interprets a few commands; of a function it says: {r.stderr.text.strip()}")
    return server


@pytest.fixture
def functions(server: Server, client: Client) -> Client:
    """Skips where there is no function tier, and shows that there is none."""
    if server.kind == "fake":
        with pytest.raises(Unsupported, match="function"):
            client.call(Call(server.image, ["true"]))
        pytest.skip("the fake tier makes no calls: it says unsupported")
    return client


Lacks = Callable[[Sandbox, str], None]


@pytest.fixture
def lacks(server: Server) -> Lacks:
    """Skips what the fake tier's shell cannot run, and shows that it cannot."""

    def check(box: Sandbox, cmd: str) -> None:
        if server.kind == "fake":
            r = box.exec(cmd)
            assert r.exit_code in (1, 126, 127), f"the fake tier runs {cmd!r} now: {r}"
            pytest.skip(f"the fake tier: {cmd}: {r.stderr.text.strip()}")

    return check
