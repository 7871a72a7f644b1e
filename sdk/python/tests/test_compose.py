"""Images of registries, templates, merging and export."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import platform
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Iterator

import pytest

from conftest import Server
from container_server import busybox_image
from libdsec import AsyncClient, Client, EnsureProgress, Invalid, NotFound, Unavailable, Unsupported

ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


class Registry:
    """What pulling needs of a registry, on loopback."""

    def __init__(self) -> None:
        self.content: dict[str, tuple[str, bytes]] = {}  # path to type and bytes
        self.fetched: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                kind, body = outer.content.get(self.path, ("", b""))
                self.send_response(200 if kind or self.path == "/v2/" else 404)
                self.send_header("Content-Type", kind or "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    outer.fetched.append(self.path)
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def blob(self, name: str, data: bytes) -> tuple[str, int]:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.content[f"/v2/{name}/blobs/{digest}"] = ("application/octet-stream", data)
        return digest, len(data)

    def push(self, name: str, *tars: bytes) -> str:
        layers, diff_ids = [], []
        for t in tars:
            digest, size = self.blob(name, gzip.compress(t, 1))
            layers.append({"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digest, "size": size})
            diff_ids.append("sha256:" + hashlib.sha256(t).hexdigest())
        config = json.dumps({"architecture": ARCH, "os": "linux", "config": {"Env": ["PATH=/bin", "FROM=registry"]},
                             "rootfs": {"type": "layers", "diff_ids": diff_ids}}).encode()
        digest, size = self.blob(name, config)
        kind = "application/vnd.oci.image.manifest.v1+json"
        manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "layers": layers,
                               "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest,
                                          "size": size}}).encode()
        self.content[f"/v2/{name}/manifests/1"] = (kind, manifest)
        return f"{self.host}/{name}:1"


@pytest.fixture
def registry() -> Iterator[Registry]:
    r = Registry()
    yield r
    r.server.shutdown()
    r.server.server_close()


def tar_of(**files: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, text in files.items():
            m = tarfile.TarInfo("etc/" + name.replace("wh_", ".wh."))
            m.size = len(text)
            tar.addfile(m, io.BytesIO(text.encode()))
    return out.getvalue()


def layered(client: Client, server: Server) -> None:
    if server.kind == "fake":
        with pytest.raises(Unsupported) as e:
            client.images.list()
        pytest.skip(f"the fake tier has no layers: {e.value}")


def base(tmp_path: Path) -> bytes:
    busybox_image(tmp_path / "root.tar")
    return (tmp_path / "root.tar").read_bytes()


def test_an_image_of_a_registry_is_ensured_and_used(client: Client, server: Server, registry: Registry, tmp_path: Path) -> None:
    layered(client, server)
    root = base(tmp_path)
    one = registry.push("one", root, tar_of(mark="one\n", gone="x"), tar_of(wh_gone=""))
    two = registry.push("two", root, tar_of(mark="two\n"))
    seen: list[EnsureProgress] = []
    made = client.images.ensure([one, two], progress=seen.append)
    assert [len(m.layers) for m in made] == [3, 2] and all(m.image and not m.template for m in made)
    assert {p.ref for p in seen} == {one, two} and any(p.total > 0 for p in seen)
    assert made[0].layers[0] == made[1].layers[0]
    digest = hashlib.sha256(gzip.compress(root, 1)).hexdigest()
    assert len([p for p in registry.fetched if p.endswith(digest)]) <= 1  # two bases of one content, gzipped alike
    with client.create(one) as box:
        assert box.exec("cat /etc/mark; ls /etc/gone; echo $FROM").stdout == b"one\nregistry\n"
    with client.create(two) as box:
        assert box.exec("cat /etc/mark").text == "two\n"
    out = client.images.export(one, tmp_path / "out.tar")
    again = client.layers.upload(out, "py-again:1", kind="import")
    try:
        with client.create("py-again:1") as box:
            assert box.exec("cat /etc/mark; ls /etc/gone").stdout == b"one\n"
        assert again.config is not None and "FROM=registry" in again.config.env
    finally:
        client.layers.remove("py-again:1")
    for ref in (one, two):
        assert client.layers.remove(ref)


def test_a_sandbox_of_a_reference_that_nobody_ensured(client: Client, server: Server, registry: Registry, tmp_path: Path) -> None:
    layered(client, server)
    ref = registry.push("three", base(tmp_path), tar_of(mark="three\n"))
    with client.create(ref) as box:
        assert box.exec("cat /etc/mark").text == "three\n"
    with pytest.raises(NotFound):
        client.create(f"{registry.host}/nothing:1")
    client.layers.remove(ref)


def test_what_cannot_be_ensured_is_said(client: Client, server: Server, registry: Registry) -> None:
    layered(client, server)
    with pytest.raises(NotFound):
        client.images.ensure([f"{registry.host}/nothing:1"])
    with pytest.raises(Invalid):
        client.images.ensure("a string, no list")
    with pytest.raises(Invalid):
        client.images.ensure(["oci:/etc"])

    async def unreachable() -> None:
        async with AsyncClient(server.socket) as c:
            with pytest.raises(Unavailable):
                await c.images.ensure(["127.0.0.1:1/x:1"])

    asyncio.run(unreachable())


def test_a_template_binds_a_name(client: Client, server: Server, tmp_path: Path) -> None:
    layered(client, server)
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tool").write_text(f"tool {version}\n")
    client.layers.upload(tmp_path / "1", "py-tool:1", at="/opt")
    client.layers.upload(tmp_path / "2", "py-tool:2", at="/opt")
    try:
        made = client.templates.create("py-env:1", server.image, toolkits=["py-tool:1"])
        assert made.template and [p.role for p in made.layers][-1] == "toolkit" and made.layers[-1].ref == "py-tool:1"
        assert "py-env:1" in [t for m in client.templates.list() for t in m.tags]
        with client.create("py-env:1") as old:
            client.templates.create("py-env:1", server.image, toolkits=["py-tool:2"])
            with client.create("py-env:1") as new:
                assert new.exec("cat /opt/tool").text == "tool 2\n"
            assert old.exec("cat /opt/tool").text == "tool 1\n"
        assert client.templates.inspect("py-env:1").layers[-1].ref == "py-tool:2"
        with pytest.raises(Invalid):
            client.templates.inspect("py-tool:1")
        assert client.images.merge(dry_run=True) is not None
    finally:
        for name in ("py-env:1", "py-tool:1", "py-tool:2"):
            client.layers.remove(name)
