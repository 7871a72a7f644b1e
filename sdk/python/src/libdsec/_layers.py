"""Images and layers of the server."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, AsyncIterator, Callable

from . import _tree as tree
from . import _wire as w
from ._transport import new_key
from ._wire import Json
from .errors import Internal
from .types import Layer, LayerDemand, LayerTrace, Progress

if TYPE_CHECKING:
    from ._client import AsyncClient

OnProgress = Callable[[Progress], None]
PIECE = 256 << 10


class AsyncLayers:
    """The layer store: immutable layers named by digest, and tags that point to them."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def import_image(self, source: str, tag: str = "", arch: str = "", *,
                           progress: OnProgress | None = None) -> Layer:
        """Makes a layer of an image: an OCI reference, or a path on the server below a root it allows."""
        request = w.drop_empty({"source": source, "tag": tag, "arch": arch, "call_id": new_key()})
        return await self._job("Layers/Import", request, progress)

    async def build(self, source: str, tag: str, at: str = "/", owner: str = "", *,
                    progress: OnProgress | None = None) -> Layer:
        """Makes a layer of a path on the server or an OCI reference, placed at ``at``, owned by "uid[:gid]"."""
        request = w.drop_empty({"source": source, "tag": tag, "at": at, "owner": owner, "call_id": new_key()})
        return await self._job("Layers/Build", request, progress)

    async def _job(self, method: str, request: Json, progress: OnProgress | None) -> Layer:
        async def attempt() -> Layer:
            async with self._client._stream(method, request) as answers:
                async for m in answers:
                    layer = w.message(m, "layer")
                    if layer:
                        return Layer.from_wire(layer)
                    if progress:
                        progress(Progress(w.string(m, "phase"), w.integer(m, "done"), w.integer(m, "total")))
            raise Internal(method, request.get("source") or request.get("ref", ""), "ended without a layer")

        return await self._client._retry(attempt)

    async def upload(self, local: str | os.PathLike[str], tag: str, *, at: str = "", owner: str = "",
                     kind: str = "build") -> Layer:
        """Makes a layer of a tar or a directory of this machine.

        ``kind`` import: it is a whole root file system or image archive; build: a
        workspace or toolkit that is placed at ``at``.
        """
        source = Path(local)
        params: dict[str, Any] = w.drop_empty({"tag": tag, "at": at, "owner": owner, "kind": kind,
                                               "call_id": new_key()})

        async def attempt() -> Layer:
            body = tree.pack(source) if source.is_dir() else _pieces(source)
            async with self._client._raw("POST", "/v1/layers/upload", params, content=body, read_timeout=1800.0) as r:
                layer = w.message(w.loads(await r.aread()), "layer")
                if not layer:
                    raise Internal("upload layer", str(source), "ended without a layer")
                return Layer.from_wire(layer)

        return await self._client._retry(attempt)

    async def list(self) -> builtins.list[Layer]:
        answer = await self._client._call("Layers/List", {})
        return [Layer.from_wire(m) for m in w.messages(answer, "layers")]

    async def inspect(self, ref: str) -> Layer:
        """``ref`` is a tag or a digest. NotFound if there is none."""
        answer = await self._client._call("Layers/Inspect", {"ref": ref})
        return Layer.from_wire(w.message(answer, "layer") or {})

    async def trace(self, ref: str) -> LayerTrace:
        """What is read first of a layer. NotFound if nobody recorded it."""
        return LayerTrace.from_wire(await self._client._call("Layers/Trace", {"ref": ref}))

    async def repack(self, ref: str, tag: str = "", *, progress: OnProgress | None = None) -> Layer:
        """Makes a layer of the same files, its data in the order of the trace; ``tag`` points to it then."""
        return await self._job("Layers/Repack", w.drop_empty({"ref": ref, "tag": tag, "call_id": new_key()}), progress)

    async def evict(self, ref: str) -> int:
        """Gives back the room that the data of a layer, or of the layers of an image, take on the machine.

        They come again, on demand. IllegalState while a sandbox has it. Returns the bytes that became free.
        """
        return w.integer(await self._client._call("Layers/Evict", {"ref": ref, "call_id": new_key()}), "freed")

    async def on_demand(self) -> builtins.list[LayerDemand]:
        """What has come of the layers that are mounted or not all here."""
        answer = await self._client._call("Layers/OnDemand", {})
        return [LayerDemand.from_wire(m) for m in w.messages(answer, "layers")]

    async def remove(self, ref: str) -> bool:
        """Drops a tag, or a layer that no sandbox and no tag uses. False if there was none."""
        return w.boolean(await self._client._call("Layers/Remove", {"ref": ref, "call_id": new_key()}), "existed")

    async def tag(self, ref: str, tag: str) -> None:
        """Points a tag to a layer."""
        await self._client._call("Layers/Tag", {"ref": ref, "tag": tag, "call_id": new_key()})


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as f:
        while piece := f.read(PIECE):
            yield piece
