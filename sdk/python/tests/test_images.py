"""Images and layers: import, build, commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Server
from container_server import busybox_image
from libdsec import Client, Invalid, NotFound, Sandbox, Unsupported


def store(client: Client, server: Server) -> None:
    """Skips where the server has no layer store, and shows that it has none."""
    if server.kind == "fake":
        with pytest.raises(Unsupported) as e:
            client.layers.list()
        pytest.skip(f"the fake tier has no layers: {e.value}")


def test_an_imported_root_file_system_is_an_image(client: Client, server: Server, tmp_path: Path) -> None:
    store(client, server)
    busybox_image(tmp_path / "root.tar")
    made = client.layers.upload(tmp_path / "root.tar", "py-import:1", kind="import")
    try:
        assert made.image and made.config is None and "py-import:1" in made.tags
        listed = {t: m for m in client.layers.list() for t in m.tags}
        assert listed["py-import:1"].image and listed[server.image].image
        assert client.layers.inspect("py-import:1").digest == made.digest
        with client.create("py-import:1") as box:
            assert box.exec("id -u").text == "0\n"
    finally:
        assert client.layers.remove("py-import:1")
    assert not client.layers.remove("py-import:1")
    with pytest.raises(NotFound):
        client.create("py-import:1")


def test_what_is_no_image_is_refused(client: Client, server: Server, tmp_path: Path) -> None:
    store(client, server)
    (tmp_path / "not.tar").write_bytes(b"no tar at all" * 1000)
    with pytest.raises(Invalid):
        client.layers.upload(tmp_path / "not.tar", "py-bad:1", kind="import")
    with pytest.raises(NotFound):
        client.layers.inspect("py-bad:1")


def test_a_directory_becomes_a_layer_at_a_place(client: Client, server: Server, tmp_path: Path) -> None:
    store(client, server)
    (tmp_path / "repo" / "src").mkdir(parents=True)
    (tmp_path / "repo" / "src" / "main").write_text("main\n")
    made = client.layers.upload(tmp_path / "repo", "py-repo:1", at="/srv/repo", owner="1000:1000")
    try:
        assert not made.image
        with client.create(server.image, layers=["py-repo:1"]) as box:
            assert box.exec("cat /srv/repo/src/main").text == "main\n"
            info = box.files.stat("/srv/repo/src/main")
            assert (info.uid, info.gid) == (1000, 1000)
        with pytest.raises(NotFound):
            client.layers.trace("py-repo:0")
        with pytest.raises(NotFound):
            client.layers.repack("py-repo:0", "py-repo:2")
    finally:
        client.layers.remove("py-repo:1")


def test_a_commit_is_a_layer_of_what_was_changed(client: Client, box: Sandbox, server: Server) -> None:
    if server.kind == "fake":
        with pytest.raises(Unsupported) as e:
            box.commit("py-commit:1")
        pytest.skip(f"the fake tier makes no layers: {e.value}")
    box.exec("echo kept > /etc/mark; rm /etc/group; mkdir -p /opt/new && chown 1000:1000 /opt/new", check=True)
    digest = box.commit("py-commit:1")
    try:
        assert box.refresh().state == "stopped" and digest.startswith("sha256:")
        layer = client.layers.inspect("py-commit:1")
        assert layer.digest == digest and not layer.image
        with client.create(server.image, layers=["py-commit:1"]) as again:
            assert again.files.read_text("/etc/mark") == "kept\n" and not again.files.exists("/etc/group")
            assert again.files.stat("/opt/new").uid == 1000
            assert again.files.exists("/etc/passwd")  # from below
        with client.create(server.image) as fresh:
            assert not fresh.files.exists("/etc/mark")
    finally:
        client.layers.remove("py-commit:1")
    with pytest.raises(Invalid):
        box.commit("not a tag")
