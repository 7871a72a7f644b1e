"""Images of registries, and templates."""

from __future__ import annotations

import builtins
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Sequence

from . import _wire as w
from ._transport import new_key
from .errors import Internal, Invalid
from .types import EnsureProgress, Layer, Merged

if TYPE_CHECKING:
    from ._client import AsyncClient

OnEnsure = Callable[[EnsureProgress], None]
EXPORT_SILENCE = 1800.0


class AsyncImages:
    """Images that sandboxes are created from."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ensure(self, refs: Sequence[str], *, arch: str = "", max_age: float = 0.0,
                     progress: OnEnsure | None = None) -> builtins.list[Layer]:
        """Makes the images of OCI references known ahead, and returns them in the order of ``refs``.

        Each OCI layer is fetched and converted once, whatever image it is in; all who
        ask for an image share the work. ``max_age``: what a reference meant so many
        seconds ago will do; 0: look now. Creating a sandbox from a reference does the
        same, and does not look again.
        """
        if isinstance(refs, str):
            raise Invalid("ensure images", refs, "want a list of references")
        request = w.drop_empty({"refs": builtins.list(refs), "arch": arch, "max_age_ms": int(max_age * 1000)})

        async def attempt() -> builtins.list[Layer]:
            made: dict[str, Layer] = {}
            async with self._client._stream("Layers/Ensure", request) as answers:
                async for m in answers:
                    layer = w.message(m, "layer")
                    if layer:
                        made[w.string(m, "ref")] = Layer.from_wire(layer)
                    if progress and w.string(m, "phase"):
                        progress(EnsureProgress.from_wire(m))
            for ref in refs:
                if ref not in made:
                    raise Internal("ensure images", ref, "the stream ended without it")
            return [made[ref] for ref in refs]

        return await self._client._retry(attempt)

    async def list(self) -> builtins.list[Layer]:
        """What was imported or ensured as an image."""
        return [m for m in await self._client.layers.list() if m.image and not m.template]

    async def merge(self, refs: Sequence[str] = (), *, dry_run: bool = False) -> builtins.list[Merged]:
        """Makes one layer of the layers that images share at their bottom.

        Without ``refs`` wherever at least two share any. The images show what they
        showed; sandboxes that run keep the layers they have.
        """
        request = w.drop_empty({"refs": builtins.list(refs), "dry_run": dry_run, "call_id": new_key()})
        answer = await self._client._call("Layers/Merge", request)
        return [Merged.from_wire(m) for m in w.messages(answer, "merged")]

    async def export(self, ref: str, to: str | os.PathLike[str]) -> Path:
        """Writes an image as an OCI image archive, which ``docker load`` reads. The file is whole or not there."""
        target = Path(to)
        async with self._client._raw("GET", "/v1/layers/export", {"ref": ref, "framed": "1"},
                                     read_timeout=EXPORT_SILENCE) as r:
            fd, name = tempfile.mkstemp(prefix=".export-", dir=target.parent)
            try:
                with os.fdopen(fd, "wb") as f:
                    async for piece in self._client._framed(r):
                        f.write(piece)
                os.chmod(name, 0o644)
                os.replace(name, target)
            except BaseException:
                os.unlink(name)
                raise
        return target


class AsyncTemplates:
    """Names that are bound to an image, a workspace and toolkits as they were then."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(self, name: str, image: str, *, workspace: str = "", toolkits: Sequence[str] = ()) -> Layer:
        """Binds a name to what its parts mean now; it can be used wherever an image can.

        Each toolkit shadows and deletes what is below it. A name that is bound is bound
        anew: nothing is built, and sandboxes that run keep what they have.
        """
        if isinstance(toolkits, str):
            raise Invalid("create template", name, "want a list of toolkits")
        request = w.drop_empty({"tag": name, "image": image, "workspace": workspace, "toolkits": builtins.list(toolkits),
                                "call_id": new_key()})
        return Layer.from_wire(w.message(await self._client._call("Layers/CreateTemplate", request), "layer") or {})

    async def list(self) -> builtins.list[Layer]:
        return [m for m in await self._client.layers.list() if m.template]

    async def inspect(self, name: str) -> Layer:
        """Invalid if the name is no template, NotFound if there is none."""
        found = await self._client.layers.inspect(name)
        if not found.template:
            raise Invalid("find template", name, "it is no template")
        return found

    async def remove(self, name: str) -> bool:
        """Removes the name; its layers stay. False if there was none. Needs the role admin."""
        return await self._client.layers.remove(name)
