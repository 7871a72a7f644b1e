"""Phases: what they are on the wire, and a sandbox that moves through them."""

from __future__ import annotations

import asyncio

import pytest

from libdsec import AsyncClient, Client, NetworkRule, Phase, Spec
from libdsec.errors import IllegalState, Invalid

from conftest import Server


def test_a_phase_comes_back_from_the_wire() -> None:
    one = Phase("code", network="allow-list", allow=(NetworkRule(domain="pypi.org"),), users=("user",), user="user",
                drop_capabilities=("all",), no_new_privs=True, writable=("/repo",), executables=("/usr",), hide=("/h",), reveal=("/r",),
                read_only=("/repo/.git",), cpu=0.5, memory=64 << 20, pids=9, back=("setup",), end_services=True)
    assert Phase.from_wire(one.wire()) == one
    assert Phase("a").wire() == {"name": "a"}
    spec = Spec("i", phases=(Phase("setup"), one))
    assert Spec.from_wire(spec.wire()).phases == (Phase("setup"), one)
    with pytest.raises(TypeError):
        Phase("a", hide="/x").wire()
    with pytest.raises(ValueError):
        Phase("a", allow=["pypi.org"]).wire()


def test_a_sandbox_moves_through_its_phases(client: Client, server: Server) -> None:
    stages = [Phase("code", hide=["/root/notes"]), Phase("test", reveal=["/tmp/tests"]), Phase("submit", back=["test"])]
    with client.create(server.image, phases=stages) as box:
        assert box.phase and (box.phase.name, box.phase.generation) == ("code", 1)
        running = box.start(["sleep", "1000"])
        service = box.start(["sleep", "1000"], service=True)
        info = box.set_phase("test")
        assert info.state == "running" and box.phase and (box.phase.name, box.phase.generation, box.phase.moving) == ("test", 2, "")
        assert running.wait().status == "killed"
        assert box.exec("echo on").text == "on\n"
        with pytest.raises(IllegalState):
            box.set_phase("code")
        with pytest.raises(Invalid):
            box.set_phase("nowhere")
        with pytest.raises(IllegalState):
            box.start(["sleep", "1"], service=True)
        service.kill()
        assert service.wait().status == "killed"
        box.set_phase("submit")
        assert box.set_phase("test").phase == box.phase and box.phase and box.phase.generation == 4
    with pytest.raises(Invalid):
        client.create(server.image, phases=[Phase("a", hide=["relative"])])


def test_evidence_is_told_as_it_comes_until_the_sandbox_is_deleted(server: Server) -> None:
    async def body() -> list[tuple[int, str]]:
        async with AsyncClient(server.socket) as c:
            box = await c.create(server.image, phases=[Phase("code"), Phase("test")])
            told: list[tuple[int, str]] = []
            moved = asyncio.Event()

            async def follow() -> None:
                async for r in box.follow_audit(kinds=["phase"]):
                    told.append((r.seq, r.phase))
                    if r.phase == "test":
                        moved.set()

            task = asyncio.create_task(follow())
            await box.set_phase("test")
            await asyncio.wait_for(moved.wait(), 30)
            await box.delete()
            await asyncio.wait_for(task, 30)
            return told

    told = asyncio.run(body())
    assert [phase for _, phase in told][-1] == "test"
    assert len({seq for seq, _ in told}) == len(told)


def test_a_sandbox_without_phases_has_none(client: Client, server: Server) -> None:
    with client.create(server.image) as one:
        assert one.phase is None
        with pytest.raises(IllegalState):
            one.set_phase("code")
