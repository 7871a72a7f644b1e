"""Files against a server. Cases by their ids."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from libdsec import (AsyncClient, AsyncSandbox, Change, Corrupt, FileNotFound, IsADirectory, NotADirectory,
                     PermissionDenied, ResourceExhausted, Sandbox, Unsupported)
from conftest import Server


@pytest.mark.parametrize("size", [0, 17 << 10, 18 << 10, 19 << 10, 10 << 20])
def test_D1_uploads_of_any_size_arrive(box: Sandbox, size: int) -> None:
    data = os.urandom(size)
    info = box.files.write("/tmp/up", data)
    assert info.size == size
    back = box.files.read("/tmp/up")
    assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest()


def test_D3_made_parents_have_the_owner_too(box: Sandbox) -> None:
    box.files.write("/data/a/b/c", b"x", uid=1000, gid=1000)
    for path in ("/data/a", "/data/a/b", "/data/a/b/c"):
        assert box.files.stat(path).uid == 1000


def test_ranges_modes_and_moves(box: Sandbox) -> None:
    f = box.files
    f.write("/tmp/d/x", "0123456789", mode=0o640)
    assert f.read("/tmp/d/x", 3, 4) == b"3456" and f.read("/tmp/d/x", 8) == b"89" and f.read("/tmp/d/x", 20, 5) == b""
    assert f.stat("/tmp/d/x").mode == 0o640
    f.chmod("/tmp/d/x", 0o600)
    f.append("/tmp/d/x", b"!")
    f.move("/tmp/d/x", "/tmp/d/y z")
    assert f.read_text("/tmp/d/y z") == "0123456789!" and f.stat("/tmp/d/y z").mode == 0o600
    assert [e.name for e in f.list("/tmp/d")] == ["y z"] and not f.exists("/tmp/d/x")
    f.remove("/tmp/d", recursive=True)
    assert not f.exists("/tmp/d")


def test_D8_parallel_uploads_to_a_new_deep_directory(run: Any) -> None:
    async def test(_: AsyncClient, box: AsyncSandbox) -> None:
        await asyncio.gather(*(box.files.write(f"/n/e/w/{i}/f", b"x") for i in range(50)))
        assert len(await box.files.list("/n/e/w")) == 50

    run(test)


def test_D10_a_slow_upload_succeeds_while_bytes_move(box: Sandbox) -> None:
    def slowly() -> Any:
        for _ in range(8):
            time.sleep(0.3)
            yield b"x" * 1000

    assert box.files.write("/tmp/slow", slowly()).size == 8000


def test_D11_content_is_replaced_and_checked(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    box.files.write("/tmp/f", b"a much longer stale partial file")
    box.files.write("/tmp/f", b"new")
    assert box.files.read("/tmp/f") == b"new"
    monkeypatch.setattr("libdsec._files.hashlib.sha256", lambda _b: hashlib.new("sha256", b"other"))
    with pytest.raises(Corrupt):
        box.files.write("/tmp/f", b"wrong")
    assert box.files.read("/tmp/f") == b"new"


def test_D15_errors_are_typed_and_builtin_too(box: Sandbox) -> None:
    with pytest.raises(IsADirectory):
        box.files.read("/etc")
    with pytest.raises(IsADirectoryError):
        box.files.write("/etc", b"x")
    with pytest.raises(FileNotFound, match="/nope"):
        box.files.read("/nope")
    with pytest.raises(FileNotFoundError):
        box.files.read("/https:/x/%C5%82")
    box.files.write("/tmp/empty", b"")
    assert box.files.read("/tmp/empty") == b""
    box.files.write("/tmp/a b%20ł?&#", b"odd")
    assert box.files.read("/tmp/a b%20ł?&#") == b"odd"
    box.files.write("/tmp/private", b"x", mode=0o600)
    with pytest.raises(PermissionDenied):
        box.files.as_user("1000").read("/tmp/private")


def test_trees_go_both_ways(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "s"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_bytes(b"x" * 50_000)
    (source / "l").symlink_to("d/f")
    (source / "dangling").symlink_to("/nowhere")
    box.files.upload_dir(source, "/tmp/up")
    assert box.files.stat("/tmp/up/l", follow=False).target == "d/f"
    made = box.files.download_dir("/tmp/up", tmp_path / "back")
    assert [str(p.relative_to(tmp_path / "back")) for p in made] == ["d/f"]
    assert os.readlink(tmp_path / "back" / "dangling") == "/nowhere"
    assert (tmp_path / "back" / "d" / "f").read_bytes() == b"x" * 50_000


def test_files_of_this_machine_are_copied(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(os.urandom(700_000))
    (tmp_path / "x").chmod(0o750)
    box.files.upload(tmp_path / "x", "/tmp/x")
    assert box.files.stat("/tmp/x").mode == 0o750
    assert box.files.download("/tmp/x", tmp_path / "y") == 700_000
    assert (tmp_path / "y").read_bytes() == (tmp_path / "x").read_bytes()
    box.files.write("/tmp/z", io.BytesIO(b"from a file object"))
    assert box.files.read("/tmp/z") == b"from a file object"


def test_artifacts_by_globs_in_memory_and_on_disk(box: Sandbox, tmp_path: Path) -> None:
    for name in ("out/a.xml", "out/sub/b.xml", "out/c.txt", "other/d.xml"):
        box.files.write(f"/tmp/{name}", name)
    got = box.artifacts(["/tmp/out/**/*.xml", "/tmp/out/*.xml", "/nowhere/*", "/tmp/out/c.txt"])
    assert {a.path: a.read() for a in got} == {
        "/tmp/out/a.xml": b"out/a.xml", "/tmp/out/sub/b.xml": b"out/sub/b.xml", "/tmp/out/c.txt": b"out/c.txt"}
    on_disk = box.artifacts("/tmp/other/*", to=tmp_path / "got")
    assert [(a.path, a.read()) for a in on_disk] == [("/tmp/other/d.xml", b"other/d.xml")]
    assert (tmp_path / "got" / "tmp" / "other" / "d.xml").exists()


def test_artifacts_survive_a_timeout_and_a_stop(box: Sandbox) -> None:
    try:
        box.exec("echo kept > /tmp/report; sleep 60", timeout=0.5)
    except TimeoutError:
        pass
    assert [a.read() for a in box.artifacts("/tmp/report")] == [b"kept\n"]
    box.stop(cause="agent_timeout")
    assert [a.read() for a in box.artifacts("/tmp/report")] == [b"kept\n"]


def test_more_artifacts_than_allowed_is_an_error(box: Sandbox) -> None:
    box.files.write("/tmp/big/f", b"x" * 300_000)
    with pytest.raises(ResourceExhausted):
        box.artifacts("/tmp/big/*", max_bytes="100KiB")


def test_watching_a_directory(run: Any, real: Server) -> None:
    async def test(_: AsyncClient, box: AsyncSandbox) -> None:
        await box.files.mkdir("/tmp/w")
        async with box.files.watch("/tmp/w") as changes:
            await box.files.mkdir("/tmp/w/once")  # seen, because the watch is in place
            async for change in changes:
                assert change == Change("/tmp/w/once", "create")
                break
        with pytest.raises(FileNotFound):
            async with box.files.watch("/tmp/none"):
                pass

    run(test)


def test_watching_without_a_loop_of_ones_own(box: Sandbox, real: Server) -> None:
    with box.files.watch("/tmp", recursive=True) as changes:
        box.files.mkdir("/tmp/once")
        assert next(iter(changes)) == Change("/tmp/once", "create")
    seen: list[Change] = []

    def collect() -> None:
        for change in box.files.watch("/tmp"):  # from the first wait on: that may be in the midst of making one
            if change.op == "create":
                seen.append(change)
                return

    t = threading.Thread(target=collect)
    t.start()
    for i in range(1000):
        box.files.mkdir(f"/tmp/d{i}")
        t.join(0.05)
        if not t.is_alive():
            break
    assert len(seen) == 1


def test_what_cannot_be_watched_says_so(box: Sandbox, server: Server) -> None:
    if server.kind == "fake":
        with pytest.raises(Unsupported):
            with box.files.watch("/tmp"):
                pass
    else:
        with pytest.raises(NotADirectory):
            with box.files.watch("/etc/passwd"):
                pass
