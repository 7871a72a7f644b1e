"""Images and layers: import, build, commit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from conftest import Server
from container_server import busybox_image
from libdsec import Client, Invalid, Keep, NotFound, Sandbox, Scrub, Spec, Unsupported


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
        with pytest.raises(NotFound):
            client.layers.evict("py-repo:0")
        assert client.layers.evict("py-repo:1") == 0  # small: it is fetched whole
        assert all(d.here <= d.chunks for d in client.layers.on_demand())
    finally:
        client.layers.remove("py-repo:1")


def _needs_layers(box: Sandbox, server: Server) -> None:
    """The fake keeps no layers."""
    if server.kind == "fake":
        with pytest.raises(Unsupported) as e:
            box.commit("py-commit:1")
        pytest.skip(f"the fake tier makes no layers: {e.value}")


def test_a_commit_is_a_layer_of_what_was_changed(client: Client, box: Sandbox, server: Server) -> None:
    _needs_layers(box, server)
    box.exec("echo kept > /etc/mark; rm /etc/group; mkdir -p /opt/new && chown 1000:1000 /opt/new", check=True)
    digest = box.commit("py-commit:1")
    try:
        assert box.refresh().state == "running" and digest.startswith("sha256:")
        layer = client.layers.inspect("py-commit:1")
        assert layer.digest == digest and not layer.image
        assert layer.lineage is not None and layer.lineage.sandbox == box.id
        for image, layers in ((server.image, ["py-commit:1"]), ("py-commit:1", [])):  # as a layer, and as an image
            with client.create(image, layers=layers) as again:
                assert again.files.read_text("/etc/mark") == "kept\n" and not again.files.exists("/etc/group")
                assert again.files.stat("/opt/new").uid == 1000
                assert again.files.exists("/etc/passwd")  # from below
        with client.create(server.image) as fresh:
            assert not fresh.files.exists("/etc/mark")
    finally:
        client.layers.remove("py-commit:1")
    with pytest.raises(Invalid):
        box.commit("not a tag")


def test_pack_diff_leaves_out_what_a_scrub_names(client: Client, box: Sandbox, server: Server) -> None:
    _needs_layers(box, server)
    box.exec("mkdir -p /root/.ssh /data; echo key > /root/.ssh/id_rsa; echo 42 > /data/answer; echo work > /data/work; "
             "echo 'export AWS=AKIA'ABCDEFGHIJKLMNOP > /data/env.sh", check=True)
    answer = hashlib.sha256(b"42\n").hexdigest()
    packed = box.pack_diff("py-scrub:1", scrub=Scrub.all(answers=[answer]), call_id="once")
    try:
        assert box.pack_diff("py-scrub:1", scrub=Scrub.all(answers=[answer]), call_id="once") == packed
        assert packed.tag == "py-scrub:1" and packed.pause > 0 and packed.lineage.parents == box.refresh().digests
        report = packed.report
        assert report is not None and {f.path for f in report.removed} == {"/root/.ssh/id_rsa", "/data/answer"}
        assert [f.path for f in report.suspicious] == ["/data/env.sh"]
        layer = client.layers.inspect("py-scrub:1")
        assert layer.lineage is not None and layer.lineage.scrub.startswith("sha256:")
        with client.create("py-scrub:1") as again:
            assert again.files.read_text("/data/work") == "work\n"
            assert not again.files.exists("/data/answer") and not again.files.exists("/root/.ssh/id_rsa")
    finally:
        client.layers.remove("py-scrub:1")
    with pytest.raises(Invalid):
        box.pack_diff(scrub=Scrub(answers=["not a digest"]))


def test_fifty_sandboxes_from_a_packed_one(client: Client, box: Sandbox, server: Server) -> None:
    _needs_layers(box, server)
    box.exec("echo built > /opt.txt", check=True)
    packed = box.pack_diff("py-env:1", scrub=True)
    client.templates.create("py-task:1", "py-env:1")
    try:
        boxes = [b for b in client.create_many(Spec("py-task:1", memory="64MiB", disk="64MiB"), 50)]
        try:
            assert len(boxes) == 50 and all(isinstance(b, Sandbox) for b in boxes)
            assert {b.exec("cat /opt.txt").text for b in boxes if isinstance(b, Sandbox)} == {"built\n"}
        finally:
            for b in boxes:
                if isinstance(b, Sandbox):
                    b.delete()
        assert packed.report is not None
    finally:
        client.templates.remove("py-task:1")
        client.layers.remove("py-env:1")


def test_the_disk_of_a_failed_sandbox_is_opened_later(client: Client, box: Sandbox, server: Server) -> None:
    _needs_layers(box, server)
    failed = client.create(server.image, on_failure=Keep("1h"), env={"WHO": "agent"})
    assert failed.spec.on_failure == Keep(3600.0)
    failed.exec("echo clue > /root/clue; rm /etc/group", check=True)
    live = failed.diff()
    assert ("A", "/root/clue", 5) in {(c.kind, c.path, c.size) for c in live.changes} and live.deleted == 1
    failed.stop("agent_error")
    assert failed.delete()
    info = client.get(failed.id)
    assert info.kept is not None and info.kept.tag == f"kept/{failed.id}"
    assert client.diff(failed.id).changes == live.changes
    with client.debug(failed.id) as seen:
        assert seen.files.read_text("/root/clue") == "clue\n" and seen.spec.network == "none"
        assert seen.exec("echo $WHO").text == "agent\n" and seen.spec.labels["dsec.debug"] == failed.id
    client.layers.remove(info.kept.tag)
    good = client.create(server.image, on_failure=Keep(60))
    good.stop()
    good.delete()
    assert client.get(good.id).kept is None


def test_a_live_sandbox_is_debugged_without_a_change(client: Client, box: Sandbox, server: Server) -> None:
    _needs_layers(box, server)
    box.exec("echo now > /now", check=True)
    with client.debug(box.id) as seen:
        assert seen.files.read_text("/now") == "now\n"
        seen.exec("rm /now", check=True)
    assert box.files.read_text("/now") == "now\n" and box.refresh().state == "running"
