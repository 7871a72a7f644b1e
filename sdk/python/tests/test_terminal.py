"""Commands with a terminal."""

from __future__ import annotations

import pytest

from conftest import Lacks
from libdsec import IllegalState, Sandbox


def test_output_of_a_terminal_is_one_stream_with_its_line_ends(box: Sandbox) -> None:
    p = box.start("echo out; echo err >&2", pty=(24, 80))
    r = p.wait()
    assert r.exit_code == 0 and r.stdout == b"out\r\nerr\r\n" and r.stderr.total == 0


def test_the_size_of_a_terminal_changes(box: Sandbox, lacks: Lacks) -> None:
    lacks(box, "stty size")
    p = box.start("trap 'stty size; exit 3' WINCH; stty size; while :; do sleep 0.05; done", pty=(24, 80), timeout=60)
    lines = p.stdout.lines()
    assert next(lines).strip() == "24 80"
    p.resize(50, 132)
    assert next(lines).strip() == "50 132"
    assert p.wait().exit_code == 3


def test_keys_become_signals(box: Sandbox, lacks: Lacks) -> None:
    lacks(box, "stty size")
    p = box.start("stty -echo; echo ready; sleep 60; echo after", pty=(24, 80), timeout=60)
    for line in p.stdout.lines():
        if line.strip() == "ready":
            break
    p.write(b"\x03")  # ctrl-C
    r = p.wait()
    assert r.exit_code == 130 or r.signal == 2, r
    assert "after" not in r.text


def test_without_a_terminal_there_is_nothing_to_resize(box: Sandbox) -> None:
    p = box.start("sleep 60")
    with pytest.raises(IllegalState):
        p.resize(10, 10)
    assert p.kill()
