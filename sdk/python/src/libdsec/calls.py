"""Stateless calls: what one is, and what it came to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from . import _wire as w
from ._transport import new_key
from ._wire import Json
from .types import Size, parse_size

__all__ = ["Call", "CallResult"]


@dataclass(frozen=True)
class Call:
    """A task that needs nothing but what comes with it, and leaves nothing.

    One of three: ``command`` (with ``compile`` before it, if given), a ``python`` snippet, or a
    ``wasm`` module (WASI preview 1), of which ``command`` are the arguments then. The first two
    run in ``image`` (with ``layers`` above it), in a directory that has ``files`` (content by
    relative path) and from which the files that match ``outputs`` come back. ``preload`` are modules
    that the interpreter imports before calls come. ``expect`` is what stdout has to be; ``compare`` says how: "lines" (default:
    white space at the end of lines does not count), "exact", "tokens". ``network`` is "none"
    or "loopback". ``fuel`` is how many instructions a module may execute (0: they are not counted).
    Times are seconds; 0 is the default of a field.
    """

    image: str = ""
    command: Sequence[str] = ()
    python: str = ""
    wasm: bytes = b""
    compile: Sequence[str] = ()
    layers: Sequence[str] = ()
    preload: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    stdin: bytes | str = b""
    expect: bytes | str | None = None
    compare: str = ""
    network: str = ""
    wall: float = 0
    cpu_time: float = 0
    compile_time: float = 0
    cpu: float = 0
    memory: Size = 0
    pids: int = 0
    disk: Size = 0
    output: Size = 0
    files_size: Size = 0
    fuel: int = 0
    call_id: str = ""

    def with_(self, **fields: Any) -> Call:
        return dataclasses.replace(self, **fields)

    def given(self, value: bytes | str | Mapping[str, Any]) -> Call:
        """This call for one input: bytes or text are its stdin, a mapping has fields of it."""
        return self.with_(stdin=value) if isinstance(value, (bytes, str)) else self.with_(**value)

    def wire(self) -> Json:
        if sum((bool(self.python), bool(self.wasm))) > 1:
            raise ValueError("a call is python or wasm, not both")
        kind = "python" if self.python else "wasm" if self.wasm else "exec"
        if isinstance(self.command, str) or isinstance(self.compile, str):
            raise TypeError("command and compile are lists of words")
        files = [w.drop_empty({"path": p, "data": w.b64(_bytes(b)), "mode": 0o755 if _bytes(b)[:2] == b"#!" else 0})
                 for p, b in self.files.items()]
        m = w.drop_empty({
            "call_id": self.call_id or new_key(), "type": kind, "image": self.image, "layers": list(self.layers), "compile": list(self.compile),
            "command": list(self.command), "code": w.b64(self.python.encode() or self.wasm), "preload": list(self.preload),
            "env": dict(self.env), "files": files, "outputs": list(self.outputs), "stdin": w.b64(_bytes(self.stdin)), "compare": self.compare,
            "network": self.network, "limits": w.drop_empty({
                "cpu": self.cpu, "cpu_time": self.cpu_time, "wall": self.wall, "compile": self.compile_time, "memory": _size(self.memory),
                "pids": str(self.pids) if self.pids else "", "disk": _size(self.disk), "output": _size(self.output), "files": _size(self.files_size),
                "fuel": str(self.fuel) if self.fuel else ""})})
        if self.expect is not None:
            m["expect"] = w.b64(_bytes(self.expect))
        return m


def _bytes(b: bytes | str) -> bytes:
    return b.encode() if isinstance(b, str) else bytes(b)


def _size(s: Size) -> str:
    return str(parse_size(s)) if s else ""


@dataclass(frozen=True)
class CallResult:
    """What a call came to.

    ``verdict`` is one of "ok", "runtime_error", "time_limit", "memory_limit", "output_limit",
    "fuel_limit", "compile_error" and "wrong_answer"; ``detail`` says why. What is the platform's fault is an
    exception and no verdict. ``cpu``, ``wall`` and ``compile`` are seconds, ``memory`` the most bytes,
    ``fuel`` the instructions that a module executed (0: not counted).
    ``container`` is where it ran, the ``generation``-th of its pool and ``use``-th call in it; a module has none. ``index`` is of its input in ``map``.
    """

    verdict: str
    detail: str
    exit_code: int
    signal: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    files: dict[str, bytes]
    left_out: bool
    cpu: float
    wall: float
    compile: float
    memory: int
    fuel: int
    backend: str
    container: str
    generation: int
    use: int
    queued: float
    node: str
    index: int = 0

    @property
    def ok(self) -> bool:
        return self.verdict == "ok"

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")

    @classmethod
    def from_wire(cls, m: Json, index: int = 0) -> CallResult:
        return cls(w.string(m, "verdict"), w.string(m, "detail"), w.integer(m, "exit_code"), w.integer(m, "signal"), w.data(m, "stdout"),
                   w.data(m, "stderr"), w.boolean(m, "truncated"), {w.string(f, "path"): w.data(f, "data") for f in w.messages(m, "files")},
                   w.boolean(m, "left_out"), w.number(m, "cpu"), w.number(m, "wall"), w.number(m, "compile"), w.integer(m, "memory"), w.integer(m, "fuel"),
                   w.string(m, "backend"), w.string(m, "container"), w.integer(m, "generation"), w.integer(m, "use"), w.number(m, "queued"),
                   w.string(m, "node"), index)
