"""Owners, modes, times and extended attributes of files, alone and in trees."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from datetime import datetime, timezone
from pathlib import Path

import httpx
import pytest

from conftest import Server
from libdsec import Sandbox


def test_owner_mode_and_time_are_set(box: Sandbox) -> None:
    f = box.files
    f.write("/tmp/a/x", b"x", mode=0o640)
    f.chown("/tmp/a/x", 1000)
    assert (f.stat("/tmp/a/x").uid, f.stat("/tmp/a/x").gid) == (1000, 0)
    f.chown("/tmp/a/x", 1000, 1000)
    f.chmod("/tmp/a/x", 0o4711)
    when = datetime(2001, 2, 3, 4, 5, 6, tzinfo=timezone.utc)
    f.utime("/tmp/a/x", when)
    info = f.stat("/tmp/a/x")
    assert (info.uid, info.gid, info.mode, info.mtime) == (1000, 1000, 0o4711, when)


def test_trees_keep_modes_and_times_and_have_the_owner_of_their_place(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "s"
    (source / "bin").mkdir(parents=True)
    (source / "bin" / "run").write_bytes(b"#!/bin/sh\necho ran\n")
    (source / "bin" / "run").chmod(0o751)
    (source / "bin").chmod(0o711)
    os.utime(source / "bin" / "run", (1_000_000_000, 1_000_000_000))
    box.files.mkdir("/home/user/up")
    box.files.chown("/home/user/up", 1000, 1000)
    box.files.upload_dir(source, "/home/user/up")
    run = box.files.stat("/home/user/up/bin/run")
    assert (run.uid, run.gid, run.mode) == (1000, 1000, 0o751)
    assert run.mtime == datetime.fromtimestamp(1_000_000_000, timezone.utc)
    assert box.files.stat("/home/user/up/bin").mode == 0o711
    box.files.upload_dir(source, "/tmp/other", uid=7, gid=8)
    info = box.files.stat("/tmp/other/bin/run")
    assert (info.uid, info.gid) == (7, 8)
    box.files.download_dir("/home/user/up", tmp_path / "back")
    back = (tmp_path / "back" / "bin" / "run").stat()
    assert back.st_mode & 0o7777 == 0o751 and int(back.st_mtime) == 1_000_000_000
    assert back.st_uid == os.geteuid()  # owners inside mean nothing here


def tree(box: Sandbox, server: Server, path: str) -> dict[str, dict[str, str]]:
    """The extended attributes in the tar of a directory."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=server.socket), base_url="http://localhost") as c:
        r = c.get(f"/v1/sandboxes/{box.id}/tree", params={"path": path})
    with tarfile.open(fileobj=io.BytesIO(r.raise_for_status().content)) as tar:
        return {m.name: {k.removeprefix("SCHILY.xattr."): v for k, v in m.pax_headers.items() if "xattr" in k}
                for m in tar}


def test_extended_attributes_of_users_go_in_and_come_out(box: Sandbox, server: Server, tmp_path: Path) -> None:
    source = tmp_path / "s"
    source.mkdir()
    (source / "plain").write_bytes(b"")
    (source / "x").write_bytes(b"x")
    value = b"any bytes \0\xff\n=" + bytes(range(256))
    try:
        os.setxattr(source / "x", "user.mark", value)
        os.setxattr(source / "x", "user.ü", b"")
    except OSError as e:
        assert e.errno == errno.ENOTSUP
        pytest.skip(f"this machine's {tmp_path} takes no attributes: {e}")
    box.files.upload_dir(source, "/tmp/up")
    got = tree(box, server, "/tmp/up")
    assert got.keys() == {"plain", "x"}
    if server.kind == "fake":
        assert got["x"] == {}
        pytest.skip("the fake tier keeps no extended attributes: its tar of the tree has none")
    assert {k: os.fsencode(v) for k, v in got["x"].items()} == {"user.mark": value, "user.ü": b""}
    assert got["plain"] == {}
    made = box.files.download_dir("/tmp/up", tmp_path / "back")
    assert all(os.listxattr(p) == [] for p in made)  # the sandbox is not trusted
