"""The examples of the repository run, and print what they are there for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from conftest import ROOT, Server


def test_grading(server: Server) -> None:
    if server.kind == "fake":
        pytest.skip("the example's commands need a shell; the fake tier has but a part of one")
    example = ROOT / "examples" / "grading.py"
    if not example.exists():
        pytest.skip(f"{example} is not there: not the whole repository")
    told = subprocess.run([sys.executable, str(example), server.image], env={**os.environ, "DSEC_SOCKET": server.socket}, capture_output=True,
                          text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == ["honest: graded there 1.0, fresh 1.0", "wrong: graded there 0.0, fresh 0.0",
                                        "cheating: graded there 1.0, fresh 0.0"], told.stdout
