"""Checkpoints, as far as a tier says that it has none; e2e/machine makes them."""

from __future__ import annotations

import pytest

from libdsec import Checkpoint, Client, Invalid, NotFound, Sandbox, Spec, Unsupported

NONE = "sha256:" + "0" * 64


def test_a_tier_without_a_memory_of_its_own_says_so(box: Sandbox) -> None:
    with pytest.raises(Unsupported, match="the tier"):
        box.checkpoint()
    assert box.exec("echo on").text == "on\n"


def test_how_long_is_bounded(box: Sandbox) -> None:
    with pytest.raises(Invalid):
        box.checkpoint(keep="31d")
    with pytest.raises(ValueError):
        box.checkpoint(keep="long")


def test_what_is_not_there_cannot_be_gone_on_from(client: Client) -> None:
    for attempt in (lambda: client.create(checkpoint=NONE), lambda: client.checkpoint(NONE)):
        with pytest.raises((NotFound, Unsupported), match="checkpoint"):
            attempt()
    with pytest.raises(Invalid):
        client.create(checkpoint="latest")


def test_specs_and_answers_name_it() -> None:
    asked = Spec(checkpoint=NONE, name="again")
    assert asked.wire() == {"checkpoint": NONE, "name": "again"} and Spec.from_wire(asked.wire()).checkpoint == NONE
    c = Checkpoint.from_wire({"digest": NONE, "sandbox": "s", "time": "2026-11-30T01:02:03Z", "spec": {"tier": "microvm"}, "disk": "8", "memory": 5})
    assert (c.digest, c.sandbox, c.until, c.spec.tier, c.disk, c.memory) == (NONE, "s", None, "microvm", 8, 5) and c.time is not None
