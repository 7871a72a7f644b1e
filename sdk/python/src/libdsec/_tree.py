"""Trees as tar streams, both ways, without trusting the tar.

tarfile is synchronous, so it works in a thread and pieces go through a pipe.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from pathlib import Path, PurePosixPath
from typing import AsyncIterator

from ._pipe import PIECE, Pipe, from_thread, in_thread
from .errors import Corrupt
from .types import Artifact


def pack(root: Path) -> AsyncIterator[bytes]:
    """A tar of what is below root; links as they are."""
    return from_thread(lambda pipe: _pack(root, pipe))


def _pack(root: Path, pipe: Pipe) -> None:
    with tarfile.open(fileobj=pipe, mode="w|", bufsize=PIECE, format=tarfile.PAX_FORMAT) as tar:
        for directory, names, files in os.walk(root, followlinks=False):
            for name in sorted(names + files):
                path = os.path.join(directory, name)
                tar.add(path, arcname=os.path.relpath(path, root), recursive=False,
                        filter=lambda m, path=path: _with_attributes(m, path))  # type: ignore[misc]


def _with_attributes(m: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """Adds the extended attributes users set, where the system and the file system have such."""
    if not hasattr(os, "listxattr") or not (m.isreg() or m.isdir()):
        return m
    try:
        m.pax_headers = {f"SCHILY.xattr.{k}": os.fsdecode(os.getxattr(path, k, follow_symlinks=False))
                         for k in os.listxattr(path, follow_symlinks=False) if k.startswith("user.")}
    except OSError as e:
        if e.errno != errno.ENOTSUP:
            raise
    return m


async def collect(pieces: AsyncIterator[bytes], root: str) -> list[Artifact]:
    """The regular files of a tar, in memory."""
    return await in_thread(pieces, lambda pipe: _collect(pipe, root))


def _collect(pipe: Pipe, root: str) -> list[Artifact]:
    found: list[Artifact] = []
    by_name: dict[str, Artifact] = {}
    with _reading(pipe) as tar:
        for m in tar:
            path = str(PurePosixPath(root) / m.name.lstrip("/"))
            data: bytes | None = None
            if m.isreg():
                f = tar.extractfile(m)
                data = f.read() if f else b""
            elif m.islnk() and m.linkname in by_name:
                data = by_name[m.linkname].data
            if data is not None:
                a = Artifact(path=path, size=len(data), mode=m.mode & 0o777, data=data)
                found.append(a)
                by_name[m.name] = a
    _drain(pipe)
    return found


async def unpack(pieces: AsyncIterator[bytes], target: Path, below: str = "") -> list[Path]:
    """Unpacks a tar of a stranger below target/below; returns the regular files made.

    ``below`` is not trusted either: it may lead through links unpacked before.
    """
    return await in_thread(pieces, lambda pipe: _unpack(pipe, target, _parts(below)))


def _reading(pipe: Pipe) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=pipe, mode="r|", bufsize=PIECE)
    except tarfile.ReadError as e:
        raise Corrupt("read tree", "", str(e)) from e


def _drain(pipe: Pipe) -> None:
    while pipe.take():
        pass


def _unpack(pipe: Pipe, target: Path, below: list[str]) -> list[Path]:
    target.mkdir(parents=True, exist_ok=True)
    top = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        root = _walk(top, below)
    finally:
        os.close(top)
    target = target.joinpath(*below)
    made: list[Path] = []
    links: list[tarfile.TarInfo] = []
    directories: list[tarfile.TarInfo] = []
    try:
        with _reading(pipe) as tar:
            for m in tar:
                parts = _parts(m.name)
                if not parts:
                    continue
                if m.isdir():
                    os.close(_walk(root, parts))
                    directories.append(m)
                elif m.issym():
                    links.append(m)  # last, so that nothing can be written through one
                elif m.isreg():
                    _regular(root, parts, m, tar)
                    made.append(target.joinpath(*parts))
                elif m.islnk():
                    _hard_link(root, parts, _parts(m.linkname))
                    made.append(target.joinpath(*parts))
        _drain(pipe)
        for m in links:
            _symlink(root, _parts(m.name), m.linkname)
        for m in reversed(directories):
            _close_directory(root, m)
    finally:
        os.close(root)
    return made


def _parts(name: str) -> list[str]:
    parts = [p for p in name.split("/") if p not in ("", ".")]
    if ".." in parts or any("\0" in p for p in parts):
        raise Corrupt("unpack tree", name, "the name leads out of the tree")
    return parts


def _walk(root: int, parts: list[str]) -> int:
    """A descriptor of a directory below root, made where missing, never through a link."""
    here = os.dup(root)
    for p in parts:
        try:
            os.mkdir(p, 0o755, dir_fd=here)
        except FileExistsError:
            pass
        try:
            below = os.open(p, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def _clear(directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass


def _regular(root: int, parts: list[str], m: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
    directory = _walk(root, parts[:-1])
    try:
        _clear(directory, parts[-1])
        fd = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=directory)
        with os.fdopen(fd, "wb") as out:
            source = tar.extractfile(m)
            while source and (piece := source.read(PIECE)):
                if piece.count(0) == len(piece):
                    out.seek(len(piece), os.SEEK_CUR)  # a hole stays one
                else:
                    out.write(piece)
            out.truncate(m.size)
            os.fchmod(out.fileno(), m.mode & 0o777)
            out.flush()
            os.utime(out.fileno(), (m.mtime, m.mtime))
    finally:
        os.close(directory)


def _hard_link(root: int, parts: list[str], source: list[str]) -> None:
    there = _walk(root, source[:-1])
    directory = _walk(root, parts[:-1])
    try:
        if not stat.S_ISREG(os.stat(source[-1], dir_fd=there, follow_symlinks=False).st_mode):
            raise Corrupt("unpack tree", "/".join(parts), "a hard link to what is no file")
        _clear(directory, parts[-1])
        os.link(source[-1], parts[-1], src_dir_fd=there, dst_dir_fd=directory, follow_symlinks=False)
    finally:
        os.close(there)
        os.close(directory)


def _symlink(root: int, parts: list[str], to: str) -> None:
    directory = _walk(root, parts[:-1])
    try:
        _clear(directory, parts[-1])
        os.symlink(to, parts[-1], dir_fd=directory)
    finally:
        os.close(directory)


def _close_directory(root: int, m: tarfile.TarInfo) -> None:
    fd = _walk(root, _parts(m.name))
    try:
        os.fchmod(fd, (m.mode & 0o777) | 0o700)
        os.utime(fd, (m.mtime, m.mtime))
    finally:
        os.close(fd)

