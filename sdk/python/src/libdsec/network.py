"""What a sandbox may reach: rules of the network mode ``allow-list``."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import date, datetime, timezone
from typing import Iterable, Sequence

from . import _wire as w
from ._wire import Json

__all__ = ["Egress", "EgressRow", "NetworkRule", "NetworkState"]

_PROTOCOLS = ("tcp", "udp", "icmp", "any")


@dataclass(frozen=True)
class NetworkRule:
    """Opens something: of a domain, of addresses, or of the node's mirror of packages.

    ``domain`` is a name, or ``*.name`` for every name below it; ``cidr`` an
    address or a range. ``protocol`` is tcp (default), udp, or of addresses icmp or
    any. ``ports`` are "443" or "8000-8999"; by default 80 and 443 of a domain, all
    of addresses. ``mirror`` is "pypi", "npm", "go" or "debian", without protocol and
    ports. What is wrong with a rule the server says (``Invalid``).
    """

    domain: str = ""
    cidr: str = ""
    protocol: str = ""
    ports: Sequence[str] = ()
    mirror: str = ""

    @classmethod
    def parse(cls, rule: str | NetworkRule) -> NetworkRule:
        """Reads "pypi.org", "10.1.2.0/24,5432", "9.9.9.9,udp,53" or "mirror:pypi", as the command line does."""
        if isinstance(rule, NetworkRule):
            return rule
        target, *rest = rule.split(",")
        protocol = ""
        ports = []
        for part in rest:
            if part in _PROTOCOLS:
                protocol = part
            else:
                ports.append(part)
        if target.startswith("mirror:"):
            return cls(mirror=target.removeprefix("mirror:"), protocol=protocol, ports=tuple(ports))
        if "/" in target or _is_address(target):
            return cls(cidr=target, protocol=protocol, ports=tuple(ports))
        return cls(domain=target, protocol=protocol, ports=tuple(ports))

    def wire(self) -> Json:
        return w.drop_empty({"domain": self.domain, "cidr": self.cidr, "protocol": self.protocol, "ports": list(self.ports), "mirror": self.mirror})

    @classmethod
    def from_wire(cls, m: Json) -> NetworkRule:
        return cls(w.string(m, "domain"), w.string(m, "cidr"), w.string(m, "protocol"), tuple(w.strings(m, "ports")), w.string(m, "mirror"))


@dataclass(frozen=True)
class NetworkState:
    """What is in force since it was changed; ``generation`` grows with each change."""

    mode: str
    allow: tuple[NetworkRule, ...]
    generation: int

    @classmethod
    def from_wire(cls, m: Json | None) -> NetworkState | None:
        if m is None:
            return None
        return cls(w.string(m, "mode"), tuple(NetworkRule.from_wire(r) for r in w.messages(m, "allow")), w.integer(m, "generation"))


@dataclass(frozen=True)
class EgressRow:
    """Connections to one place by name on ports 80 and 443.

    ``name`` is what the sandbox said, "" if it said none. ``refused`` is why, "" if
    they were let through. Bytes are those it sent and received. An empty
    ``address``: all that had no room for rows of their own.
    """

    name: str
    address: str
    port: int
    refused: str
    connections: int
    bytes_out: int
    bytes_in: int
    last: datetime | None

    @classmethod
    def from_wire(cls, m: Json) -> EgressRow:
        return cls(w.string(m, "name"), w.string(m, "address"), w.integer(m, "port"), w.string(m, "refused"),
                   w.integer(m, "connections"), w.integer(m, "bytes_out"), w.integer(m, "bytes_in"), w.time(m, "last"))


@dataclass(frozen=True)
class Egress:
    """What a sandbox has reached by name and what it was refused; packets are all, whatever opened them."""

    rows: tuple[EgressRow, ...]
    packets_out: int
    bytes_out: int
    packets_in: int
    packets_refused: int

    @classmethod
    def from_wire(cls, m: Json) -> Egress:
        return cls(tuple(EgressRow.from_wire(r) for r in w.messages(m, "rows")), w.integer(m, "packets_out"),
                   w.integer(m, "bytes_out"), w.integer(m, "packets_in"), w.integer(m, "packets_refused"))


def rules(allow: Iterable[str | NetworkRule]) -> list[Json]:
    """Rules for the wire."""
    if isinstance(allow, str):
        raise TypeError("allow is a sequence of rules, not one string")
    return [NetworkRule.parse(r).wire() for r in allow]


def cutoff_time(cutoff: datetime | date | str | None) -> datetime | None:
    """A moment: of a day its begin in UTC. A time without a zone is UTC, so that it means one thing everywhere."""
    if cutoff is None or cutoff == "":
        return None
    if isinstance(cutoff, str):
        cutoff = datetime.fromisoformat(cutoff)
    elif not isinstance(cutoff, datetime):
        cutoff = datetime(cutoff.year, cutoff.month, cutoff.day)
    return cutoff.replace(tzinfo=timezone.utc) if cutoff.tzinfo is None else cutoff.astimezone(timezone.utc)


def _is_address(s: str) -> bool:
    try:
        ipaddress.ip_address(s)
    except ValueError:
        return False
    return True
