"""Artifacts after every way a command or a sandbox can end badly."""

from __future__ import annotations

import time

import pytest

from conftest import Server
from libdsec import Client, ExecTimeout, OutputLimitExceeded, Sandbox, SandboxGone

WRITE = "mkdir -p /tmp/out; echo kept > /tmp/out/report; "


def report(box: Sandbox) -> list[tuple[str, bytes]]:
    return [(a.path, a.read()) for a in box.artifacts("out/*", root="/tmp")]


KEPT = [("/tmp/out/report", b"kept\n")]


def test_after_running_out_of_memory(client: Client, server: Server) -> None:
    with client.create(server.image, memory="64MiB") as small:
        r = small.exec(WRITE + "tail /dev/zero", timeout=60)
        assert r.oom and r.exit_code == 137
        assert report(small) == KEPT


def test_after_the_sandbox_ran_out_of_memory(client: Client, server: Server) -> None:
    with client.create(server.image, memory="64MiB", oom="sandbox") as small:
        try:
            assert small.exec(WRITE + "tail /dev/zero", timeout=60).oom
        except SandboxGone:
            pass  # its end was heard of before the command's
        deadline = time.monotonic() + 20
        while small.refresh().live and time.monotonic() < deadline:
            time.sleep(0.05)
        result = small.info.result
        assert result is not None and result.cause == "oom" and result.induced_by == "self"
        assert report(small) == KEPT


def test_after_a_timeout(box: Sandbox) -> None:
    with pytest.raises(ExecTimeout):
        box.exec(WRITE + "sleep 60", timeout=0.5)
    assert report(box) == KEPT


def test_after_an_output_limit(box: Sandbox) -> None:
    with pytest.raises(OutputLimitExceeded):
        box.exec(WRITE + "yes", on_limit="kill", output_limit="64KiB", timeout=60)
    assert report(box) == KEPT


def test_after_a_kill(box: Sandbox) -> None:
    p = box.start(WRITE + "echo written; sleep 60")
    for line in p.stdout.lines():
        assert line == "written"
        break
    assert p.kill() and p.wait().status == "killed"
    assert report(box) == KEPT


def test_after_a_stop_and_never_after_a_deletion(box: Sandbox) -> None:
    box.exec(WRITE)
    box.stop(cause="agent_error")
    assert report(box) == KEPT
    box.delete()
    with pytest.raises(SandboxGone):
        report(box)
