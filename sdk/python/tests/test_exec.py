"""Commands against a server: timeouts, kills, output, attaching again. Cases by their ids."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest

from libdsec import (AsyncClient, AsyncSandbox, Client, CommandFailed, Conflict, DsecError, ExecTimeout, NotFound,
                     OutputLimitExceeded, Sandbox, SandboxGone)

Run = Any


def test_a_result_has_streams_apart_code_and_usage(box: Sandbox) -> None:
    r = box.exec("echo out; echo err >&2; exit 3")
    assert (r.stdout, r.stderr, r.exit_code, r.status, r.truncated) == (b"out\n", b"err\n", 3, "exited", False)
    assert r.text == "out\n" and not r.ok and r.usage.wall > 0
    assert box.exec(["echo", "a b", "$HOME"]).text == "a b $HOME\n"


def test_check_raises_with_the_result(box: Sandbox) -> None:
    with pytest.raises(CommandFailed, match="exit code 7: why") as e:
        box.exec("echo why >&2; exit 7", check=True)
    assert e.value.result.exit_code == 7


def test_A1_A11_timeout_is_typed_and_keeps_output(box: Sandbox) -> None:
    begun = time.monotonic()
    with pytest.raises(ExecTimeout) as e:
        box.exec("echo A; sleep 9", timeout=1)
    assert e.value.result.stdout == b"A\n" and e.value.result.status == "timeout"
    assert 0.9 < time.monotonic() - begun < 4
    assert isinstance(e.value, TimeoutError) and not e.value.retryable


def test_A6_143_is_no_timeout(box: Sandbox) -> None:
    r = box.exec("kill -TERM $$", timeout=30)
    assert (r.status, r.exit_code, r.signal) == ("exited", 143, 15)


def test_A8_a_crash_returns_at_once(box: Sandbox) -> None:
    begun = time.monotonic()
    r = box.exec("kill -SEGV $$")
    assert r.exit_code == 139 and r.signal == signal.SIGSEGV and time.monotonic() - begun < 5


def test_A10_a_dead_sandbox_is_no_failed_command(client: Client, box: Sandbox) -> None:
    box.delete()
    with pytest.raises((SandboxGone, NotFound)) as e:
        box.exec("true")
    assert e.value.class_ in ("sandbox_gone", "not_found")


def test_A13_output_is_read_again_from_offset_0_after_detaching(run: Run) -> None:
    async def test(_: AsyncClient, box: AsyncSandbox) -> None:
        p = await box.start("seq 1 1000; sleep 0.5; seq 1001 2000")
        async for _data in p.stdout:
            break
        await p.detach()
        await asyncio.sleep(1)
        again = await box.attach(p.exec_id)
        lines = [line async for line in again.stdout.lines()]
        assert lines == [str(i) for i in range(1, 2001)]
        assert (await again.wait()).exit_code == 0
        from_there = await box.attach(p.exec_id, stdout_offset=len("1\n2\n"))
        assert (await from_there.stdout.read()).startswith(b"3\n4\n")

    run(test)


def test_A15_a_kill_during_a_command_ends_it_as_gone(run: Run) -> None:
    async def test(c: AsyncClient, _: AsyncSandbox) -> None:
        box = await c.create(_.spec.image)
        task = asyncio.create_task(box.exec("echo here; sleep 60"))
        await asyncio.sleep(0.5)
        begun = time.monotonic()
        assert await box.delete()
        with pytest.raises(SandboxGone):
            await task
        assert time.monotonic() - begun < 5
        assert not await box.delete()

    run(test)


def test_a_second_kill_of_a_command_returns_false(run: Run) -> None:
    async def test(_: AsyncClient, box: AsyncSandbox) -> None:
        p = await box.start("sleep 60")
        assert await p.kill()
        assert (await p.wait()).status == "killed"
        assert not await p.kill()

    run(test)


def test_A18_a_slow_reader_holds_the_command_back_and_memory_down(run: Run) -> None:
    async def test(_: AsyncClient, box: AsyncSandbox) -> None:
        p = await box.start("yes")
        got = 0
        async for data in p.stdout:
            got += len(data)
            if got > 200_000:
                break
        await asyncio.sleep(1)
        assert p._sub.stdout.received < 8 << 20
        await p.kill()
        assert (await p.wait()).status == "killed"

    run(test)


def test_waiting_without_reading_never_blocks_the_command(run: Run) -> None:
    async def test(_: AsyncClient, box: AsyncSandbox) -> None:
        p = await box.start("head -c 5000000 /dev/zero; echo err >&2", timeout=60)
        r = await p.wait()
        assert r.status == "exited" and r.stdout.total == 5_000_000 and r.stderr == b"err\n"
        p = await box.start("head -c 3000000 /dev/zero >&2; echo out", timeout=60)
        assert await p.stdout.read() == b"out\n"
        assert (await p.wait()).stderr.total == 3_000_000

    run(test)


def test_B1_B3_B5_stdin_is_empty_unless_given_and_passes_any_byte(box: Sandbox) -> None:
    assert box.exec("cat; echo done").stdout == b"done\n"
    raw = b"\xc3\x28\x00\xff\x01\x02 $HOME `x` \\ '\" \n"
    box.exec("cat > /tmp/f", stdin=raw)
    assert box.files.read("/tmp/f") == raw
    assert box.exec("cat", stdin=raw * 20_000).stdout.total == len(raw) * 20_000


def test_stdin_that_is_not_read_does_not_hang(box: Sandbox) -> None:
    assert box.exec("exit 4", stdin=b"x" * 3_000_000, timeout=60).exit_code == 4


def test_a_conversation_over_stdin(run: Run) -> None:
    async def test(_: AsyncClient, box: AsyncSandbox) -> None:
        p = await box.start("cat", stdin=True)
        lines = p.stdout.lines()
        for word in ("one", "two"):
            await p.write(word + "\n")
            assert await lines.__anext__() == word
        await p.close_stdin()
        assert (await p.wait()).exit_code == 0

    run(test)


def test_B10_B16_errors_name_the_directory_and_the_user(box: Sandbox) -> None:
    with pytest.raises(DsecError, match="/nope"):
        box.exec("pwd", cwd="/nope")
    with pytest.raises(DsecError, match="nonexistent"):
        box.exec("true", user="nonexistent")


def test_C1_text_is_decoded_across_chunks(run: Run) -> None:
    async def test(_: AsyncClient, box: AsyncSandbox) -> None:
        p = await box.start("printf '\\344\\270'; sleep .4; printf '\\255\\n'")
        assert [t async for t in p.stdout.text()] == ["中\n"] or "".join([t async for t in p.stdout.text()]) == ""
        assert (await p.wait()).text == "中\n"

    run(test)


def test_C3_blank_lines_are_kept(box: Sandbox) -> None:
    assert box.exec("printf 'a\\n\\nb\\n\\n\\nc\\n'").stdout == b"a\n\nb\n\n\nc\n"


def test_C5_a_flood_is_bounded_and_counted(box: Sandbox) -> None:
    with pytest.raises(ExecTimeout) as e:
        box.exec("yes", timeout=1)
    out = e.value.result.stdout
    assert len(out) <= 2 << 20 and out.truncated and out.total > len(out) and out.startswith(b"y\ny\n")


def test_C6_output_limit_kills_or_truncates(box: Sandbox) -> None:
    with pytest.raises(OutputLimitExceeded) as e:
        box.exec("head -c 3000000 /dev/zero; sleep 60", output_limit="1MiB", on_limit="kill", timeout=90)
    assert 0 < len(e.value.result.stdout) <= 1 << 20
    r = box.exec("head -c 3000000 /dev/zero", output_limit="1MiB")
    assert r.exit_code == 0 and r.truncated and len(r.stdout) == 1 << 20 and r.stdout.total == 3_000_000


def test_the_same_call_id_is_the_same_command(box: Sandbox) -> None:
    one = box.exec("echo x >> /tmp/once; cat /tmp/once", call_id="call.1")
    two = box.exec("echo x >> /tmp/once; cat /tmp/once", call_id="call.1")
    assert one.stdout == two.stdout == b"x\n"
    with pytest.raises(Conflict):
        box.exec("echo other", call_id="call.1")


def test_cancelling_leaves_the_command_or_kills_it_if_asked(run: Run) -> None:
    async def test(c: AsyncClient, box: AsyncSandbox) -> None:
        for kill in (False, True):
            name = f"call.{kill}"
            task = asyncio.create_task(box.exec("sleep 60", call_id=name, kill_on_cancel=kill))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            p = await box.attach(name)
            if kill:
                assert (await asyncio.wait_for(p.wait(), 10)).status == "killed"
            else:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(p.wait(), 0.5)
                await p.kill()

    run(test)


def test_iterating_in_plain_code_can_be_left(box: Sandbox) -> None:
    with box.start("yes") as p:
        for n, _ in enumerate(p.stdout):
            if n > 3:
                break
    assert box.exec("echo still here").text == "still here\n"
