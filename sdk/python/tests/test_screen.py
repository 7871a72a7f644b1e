"""The screen of a machine: what is on the wire. What a real one shows, runtime/fullvm tests."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from libdsec import Client, Screenshot
from libdsec.errors import Unsupported

from conftest import Server


def test_a_picture_comes_back_from_the_wire(tmp_path: Path) -> None:
    m = {"png": base64.b64encode(b"picture").decode(), "region": {"y": 2, "width": 3, "height": 4}, "width": 1280, "height": 800}
    shot = Screenshot.from_wire(m)
    assert shot == Screenshot(b"picture", (0, 2, 3, 4), 1280, 800)
    assert shot.save(tmp_path / "p.png").read_bytes() == b"picture"


def test_a_tier_without_a_screen_says_so(client: Client, server: Server) -> None:
    with client.create(server.image) as box:
        for call in (box.screen.screenshot, lambda: box.screen.click(1, 2), lambda: box.screen.type("x"), box.console, box.marks,
                     lambda: box.mark("m"), lambda: box.revert("m"), lambda: box.power("reset")):
            with pytest.raises(Unsupported, match="container"):
                call()
        with pytest.raises(ValueError):
            box.screen.screenshot((1, 2, 3))  # type: ignore[arg-type]
