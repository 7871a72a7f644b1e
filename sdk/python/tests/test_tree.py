"""Trees: what leaves this machine, and what a hostile sandbox sends back."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from pathlib import Path
from typing import AsyncIterator

import pytest

from libdsec import _tree as tree
from libdsec.errors import Corrupt


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    m = tarfile.TarInfo(name)
    m.type, m.linkname, m.mode = kind, link, mode
    return m


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as t:
        for m, data in members:
            m.size = len(data)
            t.addfile(m, io.BytesIO(data))
    return out.getvalue()


async def pieces(data: bytes, size: int = 700) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at:at + size]


def unpack(data: bytes, target: Path) -> list[Path]:
    return asyncio.run(tree.unpack(pieces(data), target))


def test_D6_links_are_kept_as_links_both_ways(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_bytes(b"x" * 100_000)
    os.link(source / "d" / "f", source / "hard")
    for name, to in {"relative": "d/f", "absolute": "/etc/passwd", "dangling": "nowhere", "loop": "loop", "dir": "d"}.items():
        (source / name).symlink_to(to)
    (source / "odd\nname ü").write_text("odd")
    os.chmod(source / "d" / "f", 0o750)

    async def both() -> list[Path]:
        return await tree.unpack(tree.pack(source), tmp_path / "target")

    made = asyncio.run(both())
    target = tmp_path / "target"
    assert {str(p.relative_to(target)) for p in made} == {"d/f", "hard", "odd\nname ü"}
    for name in ("relative", "absolute", "dangling", "loop", "dir"):
        assert os.readlink(target / name) == os.readlink(source / name)
    assert (target / "d" / "f").read_bytes() == b"x" * 100_000
    assert (target / "d" / "f").stat().st_ino == (target / "hard").stat().st_ino
    assert (target / "d" / "f").stat().st_mode & 0o777 == 0o750
    assert int((target / "d" / "f").stat().st_mtime) == int((source / "d" / "f").stat().st_mtime)


@pytest.mark.parametrize("name", ["../out", "a/../../out", "a/..", "/../out"])
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Corrupt):
        unpack(tar((member(name), b"x")), tmp_path / "in")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    hostile = tar((member("d", tarfile.SYMTYPE, str(tmp_path / "outside")), b""), (member("d/f"), b"x"))
    with pytest.raises(OSError):
        unpack(hostile, tmp_path / "in")
    assert not (tmp_path / "outside" / "f").exists()
    # The link that comes in the way of a directory does not replace it either.
    (tmp_path / "in2").mkdir()
    (tmp_path / "in2" / "d").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError):
        unpack(tar((member("d/f"), b"x")), tmp_path / "in2")
    assert not (tmp_path / "outside" / "f").exists()


def test_the_directory_of_a_download_may_not_be_a_link_that_came_before(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "d").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError):
        asyncio.run(tree.unpack(pieces(tar((member("f"), b"x"))), tmp_path / "in", "/d"))
    assert not (tmp_path / "outside" / "f").exists()


def test_a_hard_link_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    with pytest.raises((Corrupt, OSError)):
        unpack(tar((member("l", tarfile.LNKTYPE, "../secret"), b"")), tmp_path / "in")
    with pytest.raises((Corrupt, OSError)):
        unpack(tar((member("l", tarfile.LNKTYPE, str(tmp_path / "secret")), b"")), tmp_path / "in")


def test_devices_are_left_out_and_setuid_bits_dropped(tmp_path: Path) -> None:
    data = tar((member("null", tarfile.CHRTYPE), b""), (member("pipe", tarfile.FIFOTYPE), b""),
               (member("su", mode=0o4755), b"x"))
    assert [p.name for p in unpack(data, tmp_path / "in")] == ["su"]
    assert (tmp_path / "in" / "su").stat().st_mode & 0o7777 == 0o755


def test_a_file_of_an_earlier_download_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("old")
    os.makedirs(tmp_path / "in")
    (tmp_path / "in" / "f").symlink_to(tmp_path / "victim")
    unpack(tar((member("f"), b"new")), tmp_path / "in")
    assert (tmp_path / "victim").read_text() == "old" and (tmp_path / "in" / "f").read_text() == "new"


def test_holes_stay_holes(tmp_path: Path) -> None:
    unpack(tar((member("sparse"), b"\0" * (4 << 20) + b"end")), tmp_path / "in")
    info = (tmp_path / "in" / "sparse").stat()
    assert info.st_size == (4 << 20) + 3 and info.st_blocks * 512 < 1 << 20


def test_a_tar_that_breaks_off_is_an_error(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield tar((member("f"), b"x" * 10_000))[:3000]
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        asyncio.run(tree.unpack(broken(), tmp_path / "in"))
    with pytest.raises((Corrupt, tarfile.ReadError)):
        unpack(b"this is no tar" * 100, tmp_path / "in")


def test_many_transfers_at_once_do_not_wait_for_each_other(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "f").write_bytes(b"y" * 3_000_000)

    async def all_() -> None:
        await asyncio.wait_for(asyncio.gather(
            *(tree.unpack(tree.pack(tmp_path / "s"), tmp_path / f"t{i}") for i in range(64))), 60)

    asyncio.run(all_())
    assert (tmp_path / "t63" / "f").stat().st_size == 3_000_000
