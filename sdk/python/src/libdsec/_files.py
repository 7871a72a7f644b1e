"""The file service of a sandbox, as one of its users."""

from __future__ import annotations

import builtins
import hashlib
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, AsyncIterator, BinaryIO, Iterable, Sequence

from . import _tree as tree
from . import _wire as w
from ._transport import new_key
from ._watch import AsyncWatch
from ._wire import Json
from .errors import FileNotFound, NotADirectory, Unavailable
from .types import Artifact, FileInfo, Size, parse_size

if TYPE_CHECKING:
    from ._client import AsyncClient

PIECE = 256 << 10
TRANSFER_SILENCE = 300.0  # seconds without a byte that end a transfer

Content = bytes | str | bytearray | memoryview | Path | BinaryIO | Iterable[bytes]


class AsyncFiles:
    """Files of a sandbox. Paths are absolute inside it; errors name operation and path.

    Works on a running sandbox, and on the kept disk of a stopped one.
    """

    def __init__(self, client: AsyncClient, sandbox: str, user: str = "") -> None:
        self._client = client
        self._sandbox = sandbox
        self._user = user

    def as_user(self, user: str) -> AsyncFiles:
        """The same files with the rights of another user: a name, or "uid[:gid]"."""
        return AsyncFiles(self._client, self._sandbox, user)

    async def _call(self, method: str, **request: Any) -> Json:
        m = {"sandbox": self._sandbox, "user": self._user, **request}
        return await self._client._call(f"Files/{method}", m)

    def _path(self, what: str) -> str:
        return f"/v1/sandboxes/{self._sandbox}/{what}"

    def _params(self, path: str, **more: Any) -> dict[str, Any]:
        m = {"path": path, "user": self._user, **more}
        return {k: v for k, v in m.items() if v is not None and v != ""}

    async def stat(self, path: str, follow: bool = True) -> FileInfo:
        """FileNotFound if there is none."""
        answer = await self._call("Stat", path=path, follow=follow)
        return FileInfo.from_wire(w.message(answer, "info") or {})

    async def exists(self, path: str) -> bool:
        """Whether something is there, a dangling link included."""
        try:
            await self.stat(path, follow=False)
        except FileNotFound:
            return False
        return True

    async def list(self, path: str, depth: int = 1) -> builtins.list[FileInfo]:
        """The entries of a directory by name; deeper ones with ``depth``. At most 100,000."""
        answer = await self._call("List", path=path, depth=depth)
        return [FileInfo.from_wire(m) for m in w.messages(answer, "entries")]

    async def mkdir(self, path: str, mode: int = 0o755, parents: bool = True) -> None:
        """With ``parents`` an existing directory is no error."""
        await self._call("Mkdir", path=path, mode=mode, parents=parents, call_id=new_key())

    async def move(self, source: str, target: str) -> None:
        """Renames; replaces a file at ``target``."""
        await self._client._call("Files/Move", {"sandbox": self._sandbox, "user": self._user, "from": source,
                                                "to": target, "call_id": new_key()})

    async def remove(self, path: str, recursive: bool = False) -> None:
        """Removes a file, or with ``recursive`` a tree. Links are not followed."""
        await self._call("Remove", path=path, recursive=recursive, call_id=new_key())

    async def chmod(self, path: str, mode: int) -> None:
        await self._call("SetAttr", path=path, mode=mode, call_id=new_key())

    async def chown(self, path: str, uid: int, gid: int | None = None) -> None:
        """Ids are those inside the sandbox; ``gid`` None leaves the group."""
        more = {} if gid is None else {"gid": gid}
        await self._call("SetAttr", path=path, uid=uid, **more, call_id=new_key())

    async def utime(self, path: str, mtime: datetime) -> None:
        await self._call("SetAttr", path=path, mtime=w.timestamp(mtime), call_id=new_key())

    async def read(self, path: str, offset: int = 0, length: int = -1) -> bytes:
        """Bytes [offset, offset+length) of a file; a negative length is to the end."""
        return b"".join([piece async for piece in self.stream(path, offset, length)])

    async def read_text(self, path: str, encoding: str = "utf-8", errors: str = "replace") -> str:
        return (await self.read(path)).decode(encoding, errors)

    async def stream(self, path: str, offset: int = 0, length: int = -1) -> AsyncIterator[bytes]:
        """The same as ``read``, in pieces; goes on where it was when the connection breaks."""
        got, failures = 0, 0
        while True:
            left = length - got if length >= 0 else -1
            try:
                params = self._params(path, offset=offset + got, length=left if length >= 0 else None, framed=1)
                async with self._client._raw("GET", self._path("files"), params) as r:
                    async for piece in self._client._framed(r):
                        got, failures = got + len(piece), 0
                        yield piece
                return
            except Unavailable:
                failures += 1
                if failures > self._client.retries:
                    raise
                await self._client._pause(failures)

    async def download(self, path: str, local: str | os.PathLike[str]) -> int:
        """Copies a file to this machine; returns its size. ``local`` is replaced when all is there."""
        target = Path(local)
        part = target.with_name(target.name + ".part")
        size = 0
        try:
            with part.open("wb") as f:
                async for piece in self.stream(path):
                    size += f.write(piece)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
        return size

    async def write(self, path: str, content: Content, *, mode: int | None = None, uid: int | None = None,
                    gid: int | None = None, parents: bool = True, append: bool = False) -> FileInfo:
        """Replaces a file in one step: after an error the old content is there.

        ``content``: bytes, text, a Path or an open binary file on this machine, or
        an iterable of bytes. Bytes, text and Paths are checked against their
        SHA-256 on arrival and sent again if the connection breaks. ``append`` adds
        to the file as it is, and is not repeated. ``uid`` and ``gid`` also go to
        parents made on the way.
        """
        source = _Source(content, hashed=not append)
        params = self._params(path, mode=None if mode is None else f"{mode:04o}", uid=uid, gid=gid,
                              parents=1 if parents else None, append=1 if append else None, sha256=source.sha256)
        answer = await self._put("files", params, source, idempotent=source.again and not append)
        return FileInfo.from_wire(answer)

    async def append(self, path: str, content: Content) -> FileInfo:
        """Adds bytes to the end of a file; not atomic."""
        return await self.write(path, content, append=True)

    async def upload(self, local: str | os.PathLike[str], path: str, *, uid: int | None = None,
                     gid: int | None = None) -> FileInfo:
        """Copies a file of this machine, with its permission bits."""
        source = Path(local)
        return await self.write(path, source, mode=source.stat().st_mode & 0o777, uid=uid, gid=gid)

    async def _put(self, what: str, params: dict[str, Any], source: _Source, idempotent: bool) -> Json:
        async def attempt() -> Json:
            async with self._client._raw("PUT", self._path(what), params, content=source.pieces(),
                                         read_timeout=TRANSFER_SILENCE) as r:
                body: Json = w.loads(await r.aread())
                return body

        return await self._client._retry(attempt, idempotent)

    async def upload_dir(self, local: str | os.PathLike[str], path: str, *, uid: int | None = None,
                         gid: int | None = None, keep_owner: bool = False) -> None:
        """Copies what is below a local directory to below ``path``, which is made if missing.

        Links stay links, wherever they point. Modes, times and user.* attributes are
        kept. Owner is ``uid``/``gid`` if given; else, unless ``keep_owner``, that of
        ``path``.
        """
        root = Path(local)
        if not root.is_dir():
            raise NotADirectoryError(str(root))
        if uid is None and not keep_owner:
            await self.mkdir(path)
            info = await self.stat(path)
            uid, gid = info.uid, info.gid if gid is None else gid
        params = self._params(path, uid=uid, gid=gid)
        await self._put("tree", params, _Source(root, tree=True), idempotent=True)

    async def download_dir(self, path: str, local: str | os.PathLike[str], *, globs: Sequence[str] = (),
                           max_bytes: Size = 0) -> builtins.list[Path]:
        """Copies what is below a directory of the sandbox to below ``local``; returns the files made.

        The sandbox is not trusted: nothing is written outside ``local`` or through
        a link, devices and pipes are left out, setuid bits, owners and attributes dropped.
        ``globs`` select paths below ``path`` ("**" crosses directories). More than
        ``max_bytes`` is ResourceExhausted.
        """
        params = self._params(path, framed=1, glob=list(globs) or None, max=parse_size(max_bytes) or None)
        async with self._client._raw("GET", self._path("tree"), params, read_timeout=TRANSFER_SILENCE) as r:
            return await tree.unpack(self._client._framed(r), Path(local))

    async def _artifacts(self, globs: Sequence[str], root: str, to: str | os.PathLike[str] | None,
                         max_bytes: int) -> builtins.list[Artifact]:
        """The regular files that match; asks only for the directories the globs begin with."""
        found: dict[str, Artifact] = {}
        for directory, below in _by_directory(globs, root).items():
            params = self._params(directory, framed=1, glob=below, max=max_bytes or None)
            try:
                async with self._client._raw("GET", self._path("tree"), params, read_timeout=TRANSFER_SILENCE) as r:
                    if to is None:
                        got = await tree.collect(self._client._framed(r), directory)
                    else:
                        made = await tree.unpack(self._client._framed(r), Path(to), directory)
                        got = [_artifact(f, Path(to)) for f in made]
            except (FileNotFound, NotADirectory):
                continue
            found.update((a.path, a) for a in got)
        return [found[p] for p in sorted(found)]

    def watch(self, path: str, recursive: bool = False) -> AsyncWatch:
        """Changes below a directory: ``async with files.watch(path) as changes``, then ``async for c in changes``.

        The block begins when the watch is in place: what happens in it is seen.
        Iterated without a block, it begins with the first wait.
        """
        return AsyncWatch(self._client, {"sandbox": self._sandbox, "user": self._user, "path": path,
                                         "recursive": recursive})


def _by_directory(globs: Sequence[str], root: str) -> dict[str, list[str]]:
    """Globs grouped by the longest directory before their first pattern, relative to it."""
    groups: dict[str, list[str]] = {}
    for g in globs:
        parts = [p for p in (g if g.startswith("/") else f"{root}/{g}").split("/") if p]
        fixed = next((i for i, p in enumerate(parts) if any(c in p for c in "*?[")), len(parts) - 1)
        if not parts:
            continue
        groups.setdefault("/" + "/".join(parts[:fixed]), []).append("/".join(parts[fixed:]))
    return groups


def _artifact(local: Path, base: Path) -> Artifact:
    info = local.lstat()
    return Artifact("/" + str(local.relative_to(base)), info.st_size, info.st_mode & 0o777, local=local)


class _Source:
    """What is sent as a body, as often as needed."""

    def __init__(self, content: Content, hashed: bool = False, tree: bool = False) -> None:
        if isinstance(content, str):
            content = content.encode()
        elif isinstance(content, (bytearray, memoryview)):
            content = bytes(content)
        self._content = content
        self._tree = tree
        self.again = isinstance(content, (bytes, Path))
        self.sha256: str | None = None
        if hashed and isinstance(content, bytes):
            self.sha256 = hashlib.sha256(content).hexdigest()
        elif hashed and isinstance(content, Path):
            with content.open("rb") as f:
                self.sha256 = tree_digest(f)

    def pieces(self) -> AsyncIterator[bytes]:
        if self._tree and isinstance(self._content, Path):
            return tree.pack(self._content)
        return self._plain()

    async def _plain(self) -> AsyncIterator[bytes]:
        c = self._content
        if isinstance(c, bytes):
            for at in range(0, len(c), PIECE):
                yield c[at:at + PIECE]
        elif isinstance(c, Path):
            with c.open("rb") as f:
                while piece := f.read(PIECE):
                    yield piece
        elif hasattr(c, "read"):
            while piece := c.read(PIECE):
                yield piece
        else:
            for piece in c:
                yield bytes(piece)


def tree_digest(f: BinaryIO) -> str:
    h = hashlib.sha256()
    while piece := f.read(1 << 20):
        h.update(piece)
    return h.hexdigest()

