"""Creating, listing, ending; bursts; events. Cases by their ids."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from conftest import Server
from libdsec import (AsyncClient, AsyncSandbox, AuditRecord, Client, DsecError, Egress, IllegalState, Invalid, NetworkRule, NetworkState, NotEnough,
                     NotFound, Sandbox, Spec, Unavailable, Unsupported)


def test_a_block_deletes_its_sandbox_also_after_an_error(client: Client, server: Server) -> None:
    with pytest.raises(ZeroDivisionError):
        with client.create(server.image) as box:
            1 / 0
    assert not client.get(box.id).live


def test_creation_tells_its_steps(box: Sandbox) -> None:
    assert box.info.state == "running" and box.info.steps and all(s.took >= 0 for s in box.info.steps)


def test_the_same_key_is_the_same_sandbox(client: Client, server: Server) -> None:
    with client.create(server.image, call_id="libdsec.same") as one:
        two = client.create(server.image, call_id="libdsec.same")
        assert one.id == two.id


def test_G13_list_shows_every_live_one(client: Client, server: Server) -> None:
    made = [b for b in client.create_many(Spec(server.image), 25) if isinstance(b, Sandbox)]
    assert len(made) == 25 and {b.index for b in made} == set(range(25))
    listed = {i.id for i in client.list()}
    assert {b.id for b in made} <= listed
    for b in made:
        assert client.connect(b.id).exec("echo ok").text == "ok\n"
        b.delete()
    assert not {b.id for b in made} & {i.id for i in client.list()}


def test_G16_a_spec_that_cannot_be_is_invalid(client: Client, server: Server) -> None:
    with pytest.raises(Invalid, match="lifetime"):
        client.create(server.image, lifetime=10**9)
    with pytest.raises(Invalid):
        client.create(server.image, memory=1)


def test_one_bad_spec_fails_only_itself(client: Client, server: Server) -> None:
    specs = [Spec(server.image), Spec("missing"), Spec(server.image, tier="nonsense"), Spec(server.image)]
    got = {g.index: g for g in client.create_many(specs)}
    assert isinstance(got[1], NotFound) and isinstance(got[2], Invalid)
    for i in (0, 3):
        box = got[i]
        assert isinstance(box, Sandbox)
        box.delete()


def test_min_count_is_told_as_soon_as_it_is_certain(client: Client, server: Server) -> None:
    made: list[Sandbox] = []
    with pytest.raises(NotEnough) as e:
        for g in client.create_many([Spec(server.image), Spec("missing")], min_count=2):
            if isinstance(g, Sandbox):
                made.append(g)
    assert e.value.made == len(made) and isinstance(e.value.errors[0], NotFound)
    for b in made:
        b.delete()


def test_G20_leaving_a_burst_deletes_what_nobody_took(server: Server) -> None:
    async def body() -> None:
        async with AsyncClient(server.socket) as c:
            before = {i.id for i in await c.list()}
            burst = c.create_many(Spec(server.image), 12)
            first = await burst.__anext__()
            assert isinstance(first, AsyncSandbox)
            await burst.aclose()  # type: ignore[attr-defined]
        async with AsyncClient(server.socket) as c:  # closing waited for the deletions
            assert {i.id for i in await c.list()} - before == {first.id}
            await (await c.connect(first.id)).delete()

    asyncio.run(body())


def test_stop_keeps_files_and_start_again_brings_them_back(box: Sandbox) -> None:
    box.files.write("/tmp/kept", b"x")
    info = box.stop(cause="agent_error")
    assert info.state == "stopped" and info.result and info.result.cause == "agent_error"
    assert box.start_again().state == "running"
    assert box.files.read("/tmp/kept") == b"x"


def test_pause_resume_stats_and_timeouts(box: Sandbox) -> None:
    assert box.pause().state == "paused"
    assert box.resume().state == "running"
    assert box.stats().memory_limit >= 0
    assert box.set_timeout(3600).state == "running" and box.renew().state == "running"


def test_evidence_outlives_the_sandbox(client: Client, server: Server) -> None:
    with client.create(server.image, watch=["/tests/**"]) as box:
        assert box.info.spec.watch == ("/tests/**",)
        assert box.audit() == []
    assert box.audit(kinds=["write"]) == []


def test_findings_are_for_who_asks(client: Client, box: Sandbox) -> None:
    assert box.findings(tests=["/repo/tests/**"], results=["/logs/**"], trusted=["grade*"], phases=["judge"], project=["wordkit"]) == []
    with pytest.raises(Invalid):
        box.findings(tests=["tests"])


def test_what_looks_like_a_hack_is_found_and_names_its_evidence(client: Client, server: Server, real: Server) -> None:
    with client.create(server.image) as box:
        box.exec(["/bin/sh", "-c", "echo 'echo passed' > /tmp/sh; /bin/busybox chmod +x /tmp/sh; /bin/busybox mv /tmp/sh /bin/sh"])
    found = {f.hack: f for f in box.findings()}
    assert "shell_tampered" in found, box.audit()
    f = found["shell_tampered"]
    assert 0.5 <= f.confidence <= 1 and f.count >= 1 and f.lines and f.lines[0] == f.title and f.first
    assert f.evidence and set(f.evidence) <= {r.seq for r in box.audit()}


def test_a_record_of_evidence() -> None:
    r = AuditRecord.from_wire({"seq": "3", "kind": "process", "uid": "1000", "gid": "-1", "exe": "/bin/sh", "args": ["sh"]})
    assert (r.seq, r.uid, r.gid, r.args, r.count) == (3, 1000, -1, ["sh"], 1)
    assert AuditRecord.from_wire({"kind": "lost"}).count == 0


def test_events_tell_what_happens(server: Server) -> None:
    async def body() -> None:
        async with AsyncClient(server.socket) as c:
            box = await c.create(server.image)
            seen: list[str] = []

            live = asyncio.Event()

            async def follow() -> None:
                async for e in c.events(sandboxes=[box.id], since=box.info.created, on_live=lambda absent: live.set()):
                    seen.append(e.to)
                    if e.to == "deleted":
                        return

            task = asyncio.create_task(follow())
            await asyncio.wait_for(live.wait(), 30)
            assert seen[-1] == "running"  # what had happened has come
            await box.delete()
            await asyncio.wait_for(task, 30)
            assert seen[-1] == "deleted"

    asyncio.run(body())


def test_events_of_the_past_end(client: Client, box: Sandbox) -> None:
    before = datetime.now(timezone.utc) - timedelta(hours=1)
    past = list(client.events(sandboxes=[box.id], since=before, follow=False))
    assert [e.to for e in past if e.type == "state"][-1] == "running"
    absent: list[str] = []
    assert not list(client.events(sandboxes=[box.id], types=["oom"], since=before, follow=False, on_live=absent.extend))
    assert not absent
    with pytest.raises(Unavailable, match="elsewhere"):  # the id names a node there is not
        list(client.events(sandboxes=["sielsewhere" + 20 * "a"], since=before, follow=False, on_live=absent.extend))
    assert absent == ["elsewhere"]


def test_an_unknown_sandbox_is_not_found(client: Client, box: Sandbox) -> None:
    with pytest.raises(NotFound):
        client.connect(box.id[:-4] + "aaaa")
    with pytest.raises(Invalid):
        client.connect("../etc")


def test_one_client_in_many_threads(client: Client, server: Server) -> None:
    out: list[str] = []

    def work(n: int) -> None:
        with client.create(server.image) as b:
            out.append(b.exec(f"echo {n}").text)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(out) == [f"{n}\n" for n in range(8)]


def _child(box: Sandbox, pipe: Any) -> None:
    try:
        pipe.send(box.exec("echo child").text)
    except BaseException as e:
        pipe.send(repr(e))


def test_a_client_works_in_a_forked_child_and_after_it_in_the_parent(box: Sandbox) -> None:
    box.exec("true")
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_child, args=(box, there))
    child.start()
    assert here.poll(30) and here.recv() == "child\n"
    child.join(30)
    assert child.exitcode == 0
    assert box.exec("echo parent").text == "parent\n"


def test_one_client_in_several_event_loops(server: Server) -> None:
    c = AsyncClient(server.socket)

    async def once() -> str:
        async with c.create(server.image) as b:
            return (await b.exec("echo x")).text

    assert [asyncio.run(once()) for _ in range(3)] == ["x\n"] * 3


def test_keys_open_the_tcp_door_and_nothing_else_does(server: Server) -> None:
    with Client(server.url, server.api_key) as c, c.create(server.image) as b:
        assert b.exec("echo tcp").text == "tcp\n"
    with Client(server.url, "dsec_wrong") as c, pytest.raises(DsecError) as e:
        c.info()
    assert e.value.class_ == "unauthenticated"
    assert os.environ.get("DSEC_API_KEY") is None


def test_a_network_policy_is_changed_while_it_runs(client: Client, real: Server, box: Sandbox) -> None:
    with client.create(real.image, network="allow-list", allow=["203.0.113.7"]) as one:
        assert one.info.network is None and one.info.spec.allow == (NetworkRule(cidr="203.0.113.7"),)
        state = one.set_network("allow-list", allow=["203.0.113.0/24,udp,53", "*.good.example"]).network
        assert state == NetworkState("allow-list", (NetworkRule(cidr="203.0.113.0/24", protocol="udp", ports=("53",)),
                                                    NetworkRule(domain="*.good.example")), 2)
        with pytest.raises(Invalid):
            one.set_network("allow-list", allow=["a b"])
        one.exec("echo | nc -w 3 192.0.2.1 443")
        reached = one.egress()
        assert reached.rows == () and reached.packets_refused > 0
        state = one.set_network("none").network
        assert state == NetworkState("none", (), 3)
    with pytest.raises(IllegalState):
        box.set_network("open")


def test_a_tier_counts_what_a_sandbox_reached_or_says_that_it_cannot(server: Server, box: Sandbox) -> None:
    if server.kind == "fake":
        with pytest.raises(Unsupported, match="the tier"):
            box.egress()
    else:
        assert box.egress() == Egress((), 0, 0, 0, 0)


def test_egress_is_read_from_the_wire() -> None:
    got = Egress.from_wire({"rows": [{"name": "good.example", "address": "203.0.113.7", "port": 443, "connections": "2",
                                      "bytes_out": "517", "last": "2023-11-14T22:13:20Z"},
                                     {"refused": "it says no name", "connections": "9"}], "packets_out": "3"})
    assert [r.connections for r in got.rows] == [2, 9] and got.rows[0].bytes_out == 517 and got.packets_out == 3
    assert got.rows[1].address == "" and got.rows[1].last is None and got.rows[0].last is not None
