"""Connections that break, stop or never come; thousands of commands over few of them."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import Server
from libdsec import AsyncClient, DsecError, Unavailable
from proxy import Proxy


def test_A20_a_broken_connection_loses_no_output_and_no_status(server: Server, tmp_path: Path) -> None:
    async def body() -> None:
        async with Proxy(str(tmp_path / "p.sock"), server.socket) as proxy, AsyncClient(proxy.path) as c:
            async with c.create(server.image) as box:
                p = await box.start("seq 1 200; sleep 0.2; " * 8 + "exit 5")
                quick = asyncio.create_task(box.exec("sleep 1; echo end; exit 6"))
                cutter = asyncio.create_task(cut(proxy, 5, 0.3))
                data = await asyncio.wait_for(p.stdout.read(), 60)
                await cutter
                assert data == b"".join(b"%d\n" % i for i in range(1, 201)) * 8
                assert (await p.wait()).exit_code == 5
                r = await asyncio.wait_for(quick, 60)
                assert (r.exit_code, r.stdout) == (6, b"end\n")

    asyncio.run(body())


async def cut(proxy: Proxy, times: int, every: float) -> None:
    for _ in range(times):
        await asyncio.sleep(every)
        proxy.cut()


def test_A20_calls_are_repeated_with_the_same_key(server: Server, tmp_path: Path) -> None:
    async def body() -> None:
        async with Proxy(str(tmp_path / "p.sock"), server.socket) as proxy, AsyncClient(proxy.path) as c:
            async with c.create(server.image) as box:
                cutter = asyncio.create_task(cut(proxy, 12, 0.12))
                n = 0
                while not cutter.done():
                    await box.exec(f"echo {n} >> /tmp/log", check=True)
                    n += 1
                await cutter
                log = (await box.files.read_text("/tmp/log")).split()
                assert log == [str(i) for i in range(n)]

    asyncio.run(body())


def test_A21_a_silent_server_is_an_error_by_a_deadline(server: Server, tmp_path: Path) -> None:
    async def body() -> None:
        async with Proxy(str(tmp_path / "p.sock"), server.socket) as proxy:
            async with AsyncClient(proxy.path, timeout=1.0, retries=1, patience=2.0) as c:
                box = await c.create(server.image)
                begun = time.monotonic()
                waiting = asyncio.create_task(box.exec("sleep 600"))
                await asyncio.sleep(0.3)
                proxy.stop()
                with pytest.raises(DsecError) as e:
                    await box.files.read("/etc/passwd")
                assert e.value.class_ in ("timeout", "unavailable")
                proxy.cut()
                proxy.refuse(True)
                with pytest.raises(Unavailable):
                    await asyncio.wait_for(waiting, 20)
                assert time.monotonic() - begun < 20
            async with AsyncClient(server.socket) as c:
                await (await c.connect(box.id)).delete()

    asyncio.run(body())


def test_no_server_is_told_quickly(tmp_path: Path) -> None:
    async def body() -> None:
        async with AsyncClient(str(tmp_path / "nobody.sock"), retries=2) as c:
            with pytest.raises(Unavailable, match="connect"):
                await c.info()

    asyncio.run(body())


def test_2000_commands_at_once_under_a_limit_of_1024_descriptors(server: Server, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def body() -> None:
        async with Proxy(str(tmp_path / "p.sock"), server.socket) as proxy, AsyncClient(proxy.path) as c:
            boxes = [await c.create(server.image, pids=400, memory="512MiB") for _ in range(10)]
            try:
                begun = time.monotonic()
                results = await asyncio.gather(
                    *(boxes[i % 10].exec(f"sleep 2; echo {i}", timeout=300) for i in range(2000)))
                took = time.monotonic() - begun
                assert [r.text for r in results] == [f"{i}\n" for i in range(2000)]
                assert proxy.peak < 100, f"{proxy.peak} connections at once"
                print(f"2000 commands in {took:.1f} s over {proxy.peak} connections")
            finally:
                await asyncio.gather(*(b.delete() for b in boxes))

    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        asyncio.run(asyncio.wait_for(body(), 400))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) < 200


def test_A16_cancelled_starts_leave_the_service_alive(run: Any) -> None:
    async def test(c: AsyncClient, box: Any) -> None:
        for i in range(200):
            task = asyncio.create_task(box.exec("true", kill_on_cancel=True))
            await asyncio.sleep(0.001 * (i % 7))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert (await box.exec("echo alive")).text == "alive\n"
        assert await c.list()

    run(test)
