"""Stateless calls: one, and many."""

from __future__ import annotations

import asyncio
from typing import Iterator

import pytest

from conftest import ROOT, Server
from libdsec import AsyncClient, Call, CallResult, Client
from libdsec.errors import Conflict, DsecError, Invalid, NotFound


def test_what_comes_back(functions: Client, server: Server) -> None:
    call = Call(server.image, ["./run.sh", "a b"], files={"run.sh": "#!/bin/sh\ncat - in/x.txt; echo $1 $WHO >&2; echo made > out.txt\n", "in/x.txt": b"\x00file\n"},
                stdin="stdin\n", env={"WHO": "me"}, outputs=["*.txt"])
    r = functions.call(call)
    assert (r.verdict, r.stdout, r.stderr, r.files, r.exit_code, r.backend) == ("ok", b"stdin\n\x00file\n", b"a b me\n", {"out.txt": b"made\n"}, 0, "cell"), r
    assert r.ok and r.wall > 0 and r.memory > 0 and r.container and r.generation >= 1 and r.use >= 1 and r.node


def test_verdicts(functions: Client, server: Server) -> None:
    sh = Call(server.image, ["sh", "-c", "exit 3"])
    assert (functions.call(sh).verdict, functions.call(sh).exit_code) == ("runtime_error", 3)
    assert functions.call(sh, command=["sleep", "60"], wall=0.3).verdict == "time_limit"
    assert functions.call(sh, command=["yes"], output="64KiB").verdict == "output_limit"
    assert functions.call(sh, command=["echo", "1"], expect="2").verdict == "wrong_answer"
    assert functions.call(sh, compile=["false"]).verdict == "compile_error"
    module = Call(wasm=(ROOT / "bench" / "hello.wasm").read_bytes(), expect="hello")
    r = functions.call(module)
    assert (r.verdict, r.backend, r.text, r.container, r.fuel) == ("ok", "wazero", "hello\n", "", 0)
    assert [(r.verdict, r.fuel) for r in (functions.call(module, fuel=6), functions.call(module, fuel=5))] == [("ok", 6), ("fuel_limit", 6)]
    with pytest.raises(Invalid):
        functions.call(sh, fuel=1000)


def test_errors(functions: Client, server: Server) -> None:
    with pytest.raises(NotFound):
        functions.call(Call("nobody:has", ["true"]))
    with pytest.raises(Invalid):
        functions.call(Call(server.image, ["true"], files={"../x": ""}))
    first = functions.call(Call(server.image, ["sh", "-c", "head -c 16 /dev/urandom"], call_id="same"))
    assert functions.call(Call(server.image, ["sh", "-c", "head -c 16 /dev/urandom"], call_id="same")) == first
    with pytest.raises(Conflict):
        functions.call(Call(server.image, ["true"], call_id="same"))


def test_map(functions: Client, server: Server) -> None:
    inputs = (f"{i}\n" for i in range(300))
    seen = {}
    for r in functions.map(Call(server.image, ["cat"]), inputs, concurrency=16):
        assert isinstance(r, CallResult) and r.ok, r
        seen[r.index] = r.text
    assert seen == {i: f"{i}\n" for i in range(300)}
    mixed = list(functions.map(Call(server.image, ["true"]), [{"command": ["echo", "x"]}, {"image": "nobody:has"}, "in"]))
    kinds = {r.index: type(r).__name__ for r in mixed}
    assert kinds == {0: "CallResult", 1: "NotFound", 2: "CallResult"}


def test_map_takes_inputs_as_needed_and_ends_what_is_left(functions: Client, server: Server) -> None:
    async def body() -> None:
        taken = 0

        def inputs() -> Iterator[dict[str, str]]:
            nonlocal taken
            for taken in range(1, 1000):
                yield {"stdin": "x"}

        async with AsyncClient(server.socket) as client:
            results = client.map(Call(server.image, ["cat"]), inputs(), concurrency=4)
            async for r in results:
                assert not isinstance(r, DsecError)
                break
            await results.aclose()  # type: ignore[attr-defined]
            assert taken <= 12, taken
            # Calls that were left end: another does not wait for them.
            slow = client.map(Call(server.image, ["sleep", "60"], wall=60), [""] * 8, concurrency=8)
            with pytest.raises(asyncio.TimeoutError):
                pytest.fail(f"a call that sleeps has ended: {await asyncio.wait_for(slow.__anext__(), 1)!r}")
            r = await asyncio.wait_for(client.call(Call(server.image, ["true"])), 20)
            assert r.ok

    asyncio.run(body())
