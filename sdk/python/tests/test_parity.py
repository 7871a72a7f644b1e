"""The plain classes are the asynchronous ones."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import libdsec

HERE = Path(__file__).resolve().parent
PAIRS = ["Client", "Sandbox", "Process", "OutputStream", "Session", "Files", "Layers", "Port", "Screen"]
DUNDER = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}


def test_generated_code_is_up_to_date() -> None:
    subprocess.run([sys.executable, str(HERE.parent / "tools" / "gensync.py"), "--check"], check=True)


@pytest.mark.parametrize("name", PAIRS)
def test_every_public_member_has_a_plain_twin(name: str) -> None:
    core, plain = getattr(libdsec, f"Async{name}"), getattr(libdsec, name)
    for member, value in vars(core).items():
        if isinstance(value, classmethod) or (member.startswith("_") and member not in DUNDER):
            continue
        twin = getattr(plain, DUNDER.get(member, member), None)
        assert twin is not None, f"{name}.{member} is missing"
        if inspect.isfunction(value) and member not in DUNDER and (name, member) != ("Port", "http"):
            assert str(inspect.signature(value)).split(" -> ")[0] == str(inspect.signature(twin)).split(" -> ")[0]
            assert not inspect.iscoroutinefunction(twin) and not inspect.isasyncgenfunction(twin)
    for attribute in core.__annotations__:
        assert isinstance(getattr(plain, attribute), property)


@pytest.mark.parametrize("name", PAIRS)
def test_no_asynchronous_type_shows_in_the_plain_api(name: str) -> None:
    for member, value in vars(getattr(libdsec, name)).items():
        if inspect.isfunction(value) and not member.startswith("_"):
            assert "Async" not in str(inspect.signature(value)), f"{name}.{member}"
            assert "await" not in (value.__doc__ or "").lower(), f"{name}.{member}"
