"""The examples of the repository run, and print what they are there for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from conftest import ROOT, Server
from libdsec import Client


def run(server: Server, name: str, *args: str, stdin: str = "") -> list[str]:
    """The lines that an example prints."""
    example = ROOT / "examples" / name
    if not example.exists():
        pytest.skip(f"{example} is not there: not the whole repository")
    told = subprocess.run([sys.executable, str(example), *args], env={**os.environ, "DSEC_SOCKET": server.socket}, input=stdin, capture_output=True,
                          text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    return told.stdout.splitlines()


def test_grading(server: Server) -> None:
    if server.kind == "fake":
        pytest.skip("the example's commands need a shell; the fake tier has but a part of one")
    assert run(server, "grading.py", server.image) == ["honest: graded there 1.0, fresh 1.0", "wrong: graded there 0.0, fresh 0.0",
                                                       "cheating: graded there 1.0, fresh 0.0"]


def test_modules(functions: Client, server: Server) -> None:
    lines = [line.split("\t") for line in run(server, "modules.py", str(ROOT / "bench" / "hello.wasm"), stdin="1\n2\n3\n")]
    assert sorted((number, verdict, text) for number, verdict, _, _, text in lines) == [(str(i), "ok", "hello") for i in range(3)], lines
