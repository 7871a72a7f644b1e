"""Stages of a sandbox's life, each with rights of its own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Iterable, Sequence

from . import _wire as w
from ._wire import Json
from .network import NetworkRule, rules

__all__ = ["Phase", "PhaseState"]


@dataclass(frozen=True)
class Phase:
    """A stage of a sandbox: what it has, and what the commands that begin in it may do.

    ``network`` is a mode as of ``Spec``, with ``allow``; "" is the sandbox's own. Commands
    run as ``user`` if they name nobody, and only as ``users`` if there are any (names as the
    image has them, or "uid"), without ``drop_capabilities`` ("kill", "setuid", … or "all"),
    with ``no_new_privs`` without setuid and file capabilities. ``writable``: they write only
    at and below these, /dev and /proc. ``executables``: files, or directories of files, that
    they may start, interpreters and loaders included; none: any.

    For everybody inside, paths in ``hide`` are not there; those in ``reveal`` are in no phase
    before this one; those in ``read_only`` are neither changed nor moved. Paths are absolute.
    ``cpu`` (cores), ``memory`` (bytes) and ``pids`` lower the sandbox's limits; 0 leaves them.
    ``back`` names earlier phases it may go back to. A move kills what runs, but services
    (``start(..., service=True)`` in the first phase), and those with ``end_services``.
    """

    name: str
    network: str = ""
    allow: Sequence[str | NetworkRule] = ()
    users: Sequence[str] = ()
    user: str = ""
    drop_capabilities: Sequence[str] = ()
    no_new_privs: bool = False
    writable: Sequence[str] = ()
    executables: Sequence[str] = ()
    hide: Sequence[str] = ()
    reveal: Sequence[str] = ()
    read_only: Sequence[str] = ()
    cpu: float = 0.0
    memory: int = 0
    pids: int = 0
    back: Sequence[str] = ()
    end_services: bool = False

    def wire(self) -> Json:
        m: Json = {"name": self.name, "user": self.user, "no_new_privs": self.no_new_privs, "end_services": self.end_services}
        for field in _LISTS:
            paths = getattr(self, field)
            if isinstance(paths, str):
                raise TypeError(f"{field} of a Phase is a sequence of strings, not one string")
            m[field] = list(paths)
        if self.network:
            m["network"] = w.drop_empty({"mode": self.network, "allow": rules(self.allow)})
        elif self.allow:
            raise ValueError("allow of a Phase needs its network")
        m["limits"] = w.drop_empty({"cpu": self.cpu, "memory": self.memory, "pids": self.pids})
        return w.drop_empty(m)

    @classmethod
    def from_wire(cls, m: Json) -> Phase:
        network, limits = w.message(m, "network") or {}, m.get("limits") or {}
        return cls(
            w.string(m, "name"), w.string(network, "mode"), tuple(NetworkRule.from_wire(r) for r in w.messages(network, "allow")),
            tuple(w.strings(m, "users")), w.string(m, "user"), tuple(w.strings(m, "drop_capabilities")), w.boolean(m, "no_new_privs"),
            tuple(w.strings(m, "writable")), tuple(w.strings(m, "executables")), tuple(w.strings(m, "hide")),
            tuple(w.strings(m, "reveal")), tuple(w.strings(m, "read_only")), w.number(limits, "cpu"), w.integer(limits, "memory"),
            w.integer(limits, "pids"), tuple(w.strings(m, "back")), w.boolean(m, "end_services"))


_LISTS = ("users", "drop_capabilities", "writable", "executables", "hide", "reveal", "read_only", "back")


@dataclass(frozen=True)
class PhaseState:
    """The phase in force. ``generation`` is 1 at creation and grows with each move.

    ``moving`` names the phase that a move has begun to and not ended: nothing runs, and
    nothing can be started, until the same move is asked for again.
    """

    name: str
    generation: int
    since: datetime | None
    moving: str = ""

    @classmethod
    def from_wire(cls, m: Json | None) -> PhaseState | None:
        if m is None:
            return None
        return cls(w.string(m, "name"), w.integer(m, "generation"), w.time(m, "since"), w.string(m, "moving"))


def phases(all: Iterable[Phase]) -> list[Json]:
    """Phases for the wire."""
    return [p.wire() for p in all]
