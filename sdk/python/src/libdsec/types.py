"""What libdsec hands out and takes in: plain values, no connections.

Sizes are bytes, durations seconds, times UTC.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any, Iterable, Literal, Mapping, Sequence

from . import _wire as w
from ._wire import Json
from .network import NetworkRule, NetworkState, cutoff_time, rules
from .phases import Phase, PhaseState, phases

__all__ = [
    "Applied", "Artifact", "AuditRecord", "Blame", "Change", "Checkpoint", "Diff", "DiskChange", "EnsureProgress", "Event", "FileInfo", "Finding", "HackFinding", "ImageConfig", "Info", "Keep",
    "Grade", "Kept", "Layer", "LayerDemand", "LayerTrace", "Lineage", "Merged", "Node", "Output", "Packed", "Progress", "Result",
    "SandboxInfo", "SandboxResult", "SandboxUsage", "Scrub", "ScrubReport", "Spec", "StackLayer", "Stats", "Step",
    "TracedFile", "Usage", "parse_duration", "parse_size",
]

Size = int | str
OnLimit = Literal["truncate", "kill"]

_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "kib": 1 << 10, "m": 10**6, "mb": 10**6, "mib": 1 << 20,
          "g": 10**9, "gb": 10**9, "gib": 1 << 30, "t": 10**12, "tb": 10**12, "tib": 1 << 40}


def parse_size(size: Size) -> int:
    """Bytes of 1024, "512MiB" or "1.5 GB" (decimal without the i)."""
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if not found or found.group(2).lower() not in _UNITS:
        raise ValueError(f"not a size: {size!r}")
    return int(float(found.group(1)) * _UNITS[found.group(2).lower()])


_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(duration: float | str) -> float:
    """Seconds of 90, "90s", "1h30m" or "2d"."""
    if not isinstance(duration, str):
        return float(duration)
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", duration)
    if not parts or "".join(n + unit for n, unit in parts) != duration.strip():
        raise ValueError(f"not a duration: {duration!r}")
    return sum(float(n) * _SECONDS[unit] for n, unit in parts)


@dataclass(frozen=True)
class Keep:
    """What becomes of a sandbox that does not end well: its disk is packed before it goes, and kept so long.

    ``ttl`` is seconds, or "24h". ``client.debug(id)`` opens what was kept.
    """

    ttl: float | str


@dataclass(frozen=True)
class Spec:
    """What a sandbox is asked to be. Zero and empty mean the node's default, never "unlimited".

    ``image`` and ``layers`` are tags ("name:tag") or digests ("sha256:…"), bottom to top.
    ``command`` is a main process whose end ends the sandbox; without one it idles.
    ``network`` is "none" (default), "allow-list" (what ``allow`` names), "mirror-only" (the node's mirror of packages) or "open".
    The mirror hides releases newer than ``cutoff``, a time or a day ("2025-01-31": that day and all after it; UTC unless it says
    otherwise), and refuses the names of ``mirror_deny`` ("pypi:requests").
    ``profile`` is what it may ask of the kernel: "build" (default), "debug" (gdb, strace), "pwn" (raw and packet
    sockets, core dumps, too), "desktop" (Chromium with its sandbox) or "nested" (container engines; VM tiers only).
    A tier or machine that cannot give it raises ``Unsupported``.
    ``bandwidth`` is of the network, in bytes a second each way; 0 is what the machine can.
    ``call_id`` makes creation idempotent: same id and spec, same sandbox.
    ``checkpoint`` is what it goes on from: its digest, or what ``box.checkpoint()`` returned. Then only name, hostname, labels, rollout_key, lifetimes and
    network policy may be given beside it; everything else is as it was.
    """

    image: str = ""
    layers: Sequence[str] = ()
    name: str = ""
    tier: str = ""
    isolation: str = ""  # "gvisor": a container behind a kernel in user space
    boot: str = ""  # of tier "microvm"; "cold": it boots its own kernel, and gives back memory that is idle
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    hostname: str = ""
    network: str = ""
    allow: Sequence[str | NetworkRule] = ()
    cutoff: datetime | date | str | None = None
    mirror_deny: Sequence[str] = ()
    cpu: float = 0.0
    cpu_weight: int = 0
    memory: Size = 0
    pids: int = 0
    disk: Size = 0
    output: Size = 0
    bandwidth: Size = 0
    idle: float = 0.0
    lifetime: float = 0.0
    retention: float = 0.0
    on_failure: Keep | None = None
    phases: Sequence[Phase] = ()  # it begins in the first; none: what a spec says holds all its life
    profile: str = ""
    no_new_privs: bool = False
    oom: str = ""
    mounts: Sequence[tuple[str, str]] = ()
    watch: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    call_id: str = ""
    rollout_key: str = ""
    checkpoint: str | Checkpoint = ""

    def with_(self, **fields: Any) -> Spec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **fields)

    def wire(self) -> Json:
        if isinstance(self.layers, str) or isinstance(self.command, str) or isinstance(self.mirror_deny, str):
            raise TypeError("layers, command and mirror_deny of a Spec are sequences of strings, not one string")
        limits = {"cpu": self.cpu, "cpu_weight": self.cpu_weight, "memory": parse_size(self.memory),
                  "pids": self.pids, "disk": parse_size(self.disk), "output": parse_size(self.output), "bandwidth": parse_size(self.bandwidth)}
        lifetimes = {"idle": self.idle, "lifetime": self.lifetime, "retention": self.retention,
                     "keep_failed": parse_duration(self.on_failure.ttl) if self.on_failure else 0.0}
        cutoff = cutoff_time(self.cutoff)
        return w.drop_empty({
            "name": self.name, "tier": self.tier, "isolation": self.isolation, "boot": self.boot, "image": self.image, "layers": list(self.layers),
            "command": list(self.command), "env": dict(self.env), "user": self.user, "workdir": self.workdir,
            "hostname": self.hostname, "network": self.network, "allow": rules(self.allow),
            "phases": phases(self.phases),
            "cutoff": w.timestamp(cutoff) if cutoff else "", "mirror_deny": list(self.mirror_deny), "limits": w.drop_empty(limits),
            "lifetimes": w.drop_empty(lifetimes), "profile": self.profile, "no_new_privs": self.no_new_privs,
            "oom": self.oom, "mounts": [{"source": s, "target": t} for s, t in self.mounts], "watch": list(self.watch),
            "labels": dict(self.labels), "call_id": self.call_id, "rollout_key": self.rollout_key,
            "checkpoint": self.checkpoint if isinstance(self.checkpoint, str) else self.checkpoint.digest,
        })

    @classmethod
    def from_wire(cls, m: Json) -> Spec:
        lim, life = m.get("limits") or {}, m.get("lifetimes") or {}
        return cls(
            image=w.string(m, "image"), layers=tuple(w.strings(m, "layers")), name=w.string(m, "name"),
            tier=w.string(m, "tier"), isolation=w.string(m, "isolation"), boot=w.string(m, "boot"), command=tuple(w.strings(m, "command")), env=w.string_map(m, "env"),
            user=w.string(m, "user"), workdir=w.string(m, "workdir"), hostname=w.string(m, "hostname"),
            network=w.string(m, "network"), allow=tuple(NetworkRule.from_wire(r) for r in w.messages(m, "allow")),
            cutoff=w.time(m, "cutoff"), mirror_deny=tuple(w.strings(m, "mirror_deny")), cpu=w.number(lim, "cpu"), cpu_weight=w.integer(lim, "cpu_weight"),
            memory=w.integer(lim, "memory"), pids=w.integer(lim, "pids"), disk=w.integer(lim, "disk"),
            output=w.integer(lim, "output"), bandwidth=w.integer(lim, "bandwidth"), idle=w.number(life, "idle"), lifetime=w.number(life, "lifetime"),
            retention=w.number(life, "retention"),
            on_failure=Keep(w.number(life, "keep_failed")) if w.number(life, "keep_failed") else None, profile=w.string(m, "profile"),
            phases=tuple(Phase.from_wire(p) for p in w.messages(m, "phases")),
            no_new_privs=w.boolean(m, "no_new_privs"), oom=w.string(m, "oom"),
            watch=tuple(w.strings(m, "watch")), mounts=tuple((w.string(x, "source"), w.string(x, "target")) for x in w.messages(m, "mounts")),
            labels=w.string_map(m, "labels"), call_id=w.string(m, "call_id"),
            rollout_key=w.string(m, "rollout_key"), checkpoint=w.string(m, "checkpoint"))


@dataclass(frozen=True)
class Checkpoint:
    """A sandbox as it was at one moment, kept where every node finds it that has the same object storage.

    ``client.create(checkpoint=c.digest)`` goes on from it. ``disk`` and ``memory`` are in bytes, holes included.
    """

    digest: str
    sandbox: str
    time: datetime | None
    until: datetime | None  # kept by the node that made it; None: not told
    spec: Spec  # of what goes on from it
    disk: int
    memory: int

    @classmethod
    def from_wire(cls, m: Json) -> Checkpoint:
        return cls(digest=w.string(m, "digest"), sandbox=w.string(m, "sandbox"), time=w.time(m, "time"), until=w.time(m, "until"),
                   spec=Spec.from_wire(w.message(m, "spec") or {}), disk=w.integer(m, "disk"), memory=w.integer(m, "memory"))


class Output(bytes):
    """The kept bytes of a stream: a head, then a tail.

    They join without a gap unless ``truncated``; then ``gap`` is the index in
    these bytes where ``missing`` bytes were not kept. ``total`` counts every
    byte the command wrote, ``dropped`` those nobody kept or read.
    """

    total: int
    dropped: int
    truncated: bool
    gap: int | None
    missing: int

    @classmethod
    def of(cls, kept: Json | None, summary: Json | None) -> Output:
        k, s = kept or {}, summary or {}
        head, tail, tail_offset = w.data(k, "head"), w.data(k, "tail"), w.integer(k, "tail_offset")
        if tail and tail_offset < len(head):
            tail, tail_offset = tail[len(head) - tail_offset:], len(head)
        out = cls(head + tail)
        out.total = max(w.integer(s, "total"), len(out))
        out.missing = max(0, out.total - len(out))
        out.dropped = w.integer(s, "dropped")
        out.truncated = w.boolean(s, "truncated") or out.missing > 0
        out.gap = len(head) if out.missing else None
        return out

    @property
    def text(self) -> str:
        """UTF-8 with U+FFFD for what is not; a line says where bytes are missing."""
        if self.gap is None:
            return self.decode("utf-8", "replace")
        head, tail = bytes(self[:self.gap]), bytes(self[self.gap:])
        note = f"\n[… {self.missing} bytes not kept …]\n"
        return head.decode("utf-8", "replace") + note + tail.decode("utf-8", "replace")

    def __reduce__(self) -> tuple[Any, ...]:
        return _output, (bytes(self), self.__dict__)


def _output(b: bytes, state: Mapping[str, Any]) -> Output:
    out = Output(b)
    out.__dict__.update(state)
    return out


@dataclass(frozen=True)
class Usage:
    """Seconds a command took: on the clock, of CPU, held back by its CPU quota, held by the node."""

    wall: float
    cpu: float
    throttled: float
    held: float


@dataclass(frozen=True)
class Result:
    """How a command ended.

    ``status``: exited, timeout, killed, output_limit, lost. ``exit_code`` is
    128+signal when a signal ended it; with a status other than exited it means
    nothing. ``oom``: the memory limit killed it or a child. ``blame`` is what its
    sandbox was blamed on when it ended (``infra_image``: a read of its layers was
    an error), or empty: what it did may come of that, whatever its exit code.
    """

    exec_id: str
    status: str
    exit_code: int
    signal: int
    stdout: Output
    stderr: Output
    usage: Usage
    oom: bool = False
    oom_limit: int = 0
    oom_peak: int = 0
    started: datetime | None = None
    blame: str = ""

    @property
    def text(self) -> str:
        """stdout as text."""
        return self.stdout.text

    @property
    def truncated(self) -> bool:
        return self.stdout.truncated or self.stderr.truncated

    @property
    def ok(self) -> bool:
        return self.status == "exited" and self.exit_code == 0

    @property
    def wall(self) -> float:
        return self.usage.wall

    @classmethod
    def from_wire(cls, exec_id: str, m: Json, stdout: Json | None, stderr: Json | None) -> Result:
        return cls(
            exec_id=exec_id, status=w.string(m, "status"), exit_code=w.integer(m, "exit_code"),
            signal=w.integer(m, "signal"), stdout=Output.of(stdout, w.message(m, "stdout")),
            stderr=Output.of(stderr, w.message(m, "stderr")),
            usage=Usage(w.number(m, "wall"), w.number(m, "cpu"), w.number(m, "throttle"), w.number(m, "held")),
            oom=w.boolean(m, "oom"), oom_limit=w.integer(m, "oom_limit"), oom_peak=w.integer(m, "oom_peak"),
            started=w.time(m, "started"), blame=w.string(m, "blame"))


@dataclass(frozen=True)
class SandboxUsage:
    """What a sandbox consumed until it ended."""

    wall: float
    cpu: float
    throttled: float
    memory_peak: int
    pids_peak: int
    disk_used: int
    output_bytes: int
    oom_kills: int
    starts: int
    execs_started: int


@dataclass(frozen=True)
class SandboxResult:
    """How a sandbox ended and whose fault that was. ``mask``: drop the rollout from the loss."""

    outcome: str
    cause: str
    phase: str
    induced_by: str
    evidence: tuple[str, ...]
    retryable: bool
    mask: bool
    usage: SandboxUsage

    @classmethod
    def from_wire(cls, m: Json) -> SandboxResult:
        u = w.message(m, "usage") or {}
        usage = SandboxUsage(
            w.number(u, "wall"), w.number(u, "cpu"), w.number(u, "throttled"), w.integer(u, "memory_peak"),
            w.integer(u, "pids_peak"), w.integer(u, "disk_used"), w.integer(u, "output_bytes"),
            w.integer(u, "oom_kills"), w.integer(u, "starts"), w.integer(u, "execs_started"))
        return cls(w.string(m, "outcome"), w.string(m, "cause"), w.string(m, "phase"), w.string(m, "induced_by"),
                   tuple(w.strings(m, "evidence")), w.boolean(m, "retryable"), w.boolean(m, "mask"), usage)


@dataclass(frozen=True)
class Blame:
    """What a sandbox is blamed on that is not its doing.

    It becomes the cause of its end, unless a policy, a preemption or the platform itself ends it.
    """

    cause: str
    since: datetime | None
    evidence: tuple[str, ...]

    @classmethod
    def from_wire(cls, m: Json | None) -> Blame | None:
        return cls(w.string(m, "cause"), w.time(m, "since"), tuple(w.strings(m, "evidence"))) if m else None


@dataclass(frozen=True)
class Step:
    """Seconds one step of a creation took."""

    name: str
    took: float


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox as the node told it at one moment."""

    id: str
    project: str
    spec: Spec
    state: str
    result: SandboxResult | None
    digests: tuple[str, ...]
    created: datetime | None
    changed: datetime | None
    expires: datetime | None
    starts: int
    steps: tuple[Step, ...]
    node: str
    kept: Kept | None = None
    blame: Blame | None = None
    network: NetworkState | None = None  # None: as in its spec, never changed
    grades: tuple[Grade, ...] = ()  # the last gradings, oldest first
    phase: PhaseState | None = None  # None: it has none
    isolated: str = ""  # what is between it and the machine's kernel: "namespaces", "gvisor", "vm"

    @property
    def live(self) -> bool:
        return self.state in ("pending", "creating", "running", "paused", "stopping", "starting")

    @classmethod
    def from_wire(cls, m: Json) -> SandboxInfo:
        result = w.message(m, "result")
        return cls(
            w.string(m, "id"), w.string(m, "project"), Spec.from_wire(w.message(m, "spec") or {}),
            w.string(m, "state"), SandboxResult.from_wire(result) if result else None,
            tuple(w.strings(m, "digests")), w.time(m, "created"), w.time(m, "changed"), w.time(m, "expires"),
            w.integer(m, "starts"),
            tuple(Step(w.string(s, "name"), w.number(s, "took")) for s in w.messages(m, "steps")),
            w.string(m, "node"), Kept.from_wire(w.message(m, "kept")),
            Blame.from_wire(w.message(m, "blame")), NetworkState.from_wire(w.message(m, "network")),
            tuple(Grade.from_wire(g) for g in w.messages(m, "grades")),
            PhaseState.from_wire(w.message(m, "phase")), w.string(m, "isolated"))


@dataclass(frozen=True)
class Applied:
    """What of the declared paths came into a fresh sandbox: entries, their bytes, paths that the agent had removed, and entries that were not taken."""

    files: int
    bytes: int
    removed: int
    refused: int


@dataclass(frozen=True)
class Grade:
    """What a grading found.

    ``reward`` is None unless ``cause`` is "completed": what went wrong with the
    grader (grader_error, grader_timeout), what the agent left that cannot be taken
    (agent_error) and what the platform did (infra_…) is never a reward of 0.
    ``details`` is the object that the grader wrote, if it was one. ``sandbox`` is
    where the grader ran; ``output`` the end of what it said; ``wall`` in seconds.
    """

    reward: float | None
    details: dict[str, Any]
    cause: str
    where: str
    sandbox: str
    exit_code: int
    output: bytes
    evidence: tuple[str, ...]
    tampered: bool
    applied: Applied
    time: datetime | None
    wall: float

    @property
    def mask(self) -> bool:
        """A trainer should drop the rollout from its loss: only the platform is to blame."""
        return self.cause.startswith("infra_") or self.cause == "preempted"

    @classmethod
    def from_wire(cls, m: Json) -> Grade:
        a, details = w.message(m, "applied") or {}, w.data(m, "details")
        return cls(w.number(m, "reward") if "reward" in m else None, w.loads(details), w.string(m, "cause"), w.string(m, "where"),
                   w.string(m, "sandbox"), w.integer(m, "exit_code"), w.data(m, "output"), tuple(w.strings(m, "evidence")),
                   w.boolean(m, "tampered"),
                   Applied(w.integer(a, "files"), w.integer(a, "bytes"), w.integer(a, "removed"), w.integer(a, "refused")),
                   w.time(m, "time"), w.number(m, "wall"))


@dataclass(frozen=True)
class Kept:
    """The packed disk of a sandbox that failed, until when it is there."""

    digest: str
    tag: str
    until: datetime | None

    @classmethod
    def from_wire(cls, m: Json | None) -> Kept | None:
        return cls(w.string(m, "digest"), w.string(m, "tag"), w.time(m, "until")) if m else None


@dataclass(frozen=True)
class Scrub:
    """What of a disk shall not be in the layer that is made of it.

    ``patterns`` are globs of whole paths ("**" for any number of directories),
    ``answers`` the SHA-256 of whole files, in hex. ``Scrub.all()`` is every rule.
    """

    histories: bool = False
    credentials: bool = False
    caches: bool = False
    logs: bool = False
    patterns: Sequence[str] = ()
    answers: Sequence[str] = ()

    @classmethod
    def all(cls, patterns: Sequence[str] = (), answers: Sequence[str] = ()) -> Scrub:
        return cls(True, True, True, True, patterns, answers)

    def wire(self) -> Json:
        if isinstance(self.patterns, str) or isinstance(self.answers, str):
            raise TypeError("patterns and answers of a Scrub are sequences of strings, not one string")
        return w.drop_empty({"histories": self.histories, "credentials": self.credentials, "caches": self.caches,
                             "logs": self.logs, "patterns": list(self.patterns), "answers": list(self.answers)})

    @classmethod
    def from_wire(cls, m: Json) -> Scrub:
        return cls(w.boolean(m, "histories"), w.boolean(m, "credentials"), w.boolean(m, "caches"), w.boolean(m, "logs"),
                   tuple(w.strings(m, "patterns")), tuple(w.strings(m, "answers")))


@dataclass(frozen=True)
class Finding:
    """A file that a scrub removed, or kept and thinks worth a look. ``below``: a layer below has the path, too."""

    path: str
    why: str
    size: int
    line: int
    below: bool

    @classmethod
    def from_wire(cls, m: Json) -> Finding:
        return cls(w.string(m, "path"), w.string(m, "why"), w.integer(m, "size"), w.integer(m, "line"),
                   w.boolean(m, "below"))


@dataclass(frozen=True)
class ScrubReport:
    """What a scrub did. The lists are cut at 1,000, the counts are not."""

    rules: Scrub
    removed: tuple[Finding, ...]
    removed_count: int
    removed_bytes: int
    suspicious: tuple[Finding, ...]
    suspicious_count: int
    unread: int

    @classmethod
    def from_wire(cls, m: Json) -> ScrubReport:
        return cls(Scrub.from_wire(w.message(m, "rules") or {}),
                   tuple(Finding.from_wire(f) for f in w.messages(m, "removed")), w.integer(m, "removed_count"),
                   w.integer(m, "removed_bytes"), tuple(Finding.from_wire(f) for f in w.messages(m, "suspicious")),
                   w.integer(m, "suspicious_count"), w.integer(m, "unread"))


@dataclass(frozen=True)
class Lineage:
    """Where a packed layer comes from: the stack it stands on (bottom first), the sandbox, when, and the digest of the report."""

    parents: tuple[str, ...]
    sandbox: str
    time: datetime | None
    scrub: str
    merged: tuple[str, ...]

    @classmethod
    def from_wire(cls, m: Json) -> Lineage:
        return cls(tuple(w.strings(m, "parents")), w.string(m, "sandbox"), w.time(m, "time"), w.string(m, "scrub"),
                   tuple(w.strings(m, "merged")))


@dataclass(frozen=True)
class Packed:
    """A layer made of a sandbox's disk. ``pause``: seconds for which the sandbox stood still.

    Its tag, or its digest, is an image: ``client.create(packed.digest)`` goes on from there.
    """

    digest: str
    tag: str
    lineage: Lineage
    entries: int
    meta_size: int
    data_size: int
    pause: float
    report: ScrubReport | None

    @classmethod
    def from_wire(cls, m: Json) -> Packed:
        report = w.message(m, "report")
        return cls(w.string(m, "digest"), w.string(m, "tag"), Lineage.from_wire(w.message(m, "lineage") or {}),
                   w.integer(m, "entries"), w.integer(m, "meta_size"), w.integer(m, "data_size"), w.number(m, "pause"),
                   ScrubReport.from_wire(report) if report else None)


@dataclass(frozen=True)
class DiskChange:
    """A path that differs from the layers. ``kind``: A, M or D; bytes now, and before."""

    kind: str
    path: str
    size: int
    was: int

    @classmethod
    def from_wire(cls, m: Json) -> DiskChange:
        return cls(w.string(m, "kind"), w.string(m, "path"), w.integer(m, "size"), w.integer(m, "was"))


@dataclass(frozen=True)
class Diff:
    """What a disk differs in from its layers, in the order of paths. ``cut``: the list is not whole, the counts are."""

    changes: tuple[DiskChange, ...]
    cut: bool
    added: int
    modified: int
    deleted: int
    bytes: int

    @classmethod
    def from_wire(cls, m: Json) -> Diff:
        return cls(tuple(DiskChange.from_wire(c) for c in w.messages(m, "changes")), w.boolean(m, "cut"),
                   w.integer(m, "added"), w.integer(m, "modified"), w.integer(m, "deleted"), w.integer(m, "bytes"))


@dataclass(frozen=True)
class Stats:
    """A sample of what a sandbox uses; limits are 0 where unknown.

    ``host_memory``: bytes that a machine of its own takes of the node, shared ones by its part; 0 without one.
    """

    cpu: float
    throttled: float
    memory: int
    memory_peak: int
    memory_limit: int
    pids: int
    pids_peak: int
    pids_limit: int
    disk: int
    disk_limit: int
    oom_kills: int
    pids_denied: int
    host_memory: int

    @classmethod
    def from_wire(cls, m: Json) -> Stats:
        return cls(w.number(m, "cpu"), w.number(m, "throttled"),
                   *(w.integer(m, f.name) for f in dataclasses.fields(cls)[2:]))


@dataclass(frozen=True)
class FileInfo:
    """A directory entry. ``kind``: file, dir, symlink, other. ``mode``: permission bits, setuid and sticky."""

    path: str
    kind: str
    size: int
    mode: int
    uid: int
    gid: int
    owner: str
    group: str
    mtime: datetime | None
    target: str
    links: int

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    @classmethod
    def from_wire(cls, m: Json) -> FileInfo:
        return cls(w.string(m, "path"), w.string(m, "kind"), w.integer(m, "size"), w.integer(m, "mode"),
                   w.integer(m, "uid"), w.integer(m, "gid"), w.string(m, "owner"), w.string(m, "group"),
                   w.time(m, "mtime"), w.string(m, "target"), w.integer(m, "links"))


@dataclass(frozen=True)
class AuditRecord:
    """One line of evidence of what a sandbox did, seen from outside of it.

    ``kind``: process, write, syscall, network, phase, policy, note, lost. ``pid``, ``uid`` and
    ``gid`` are those inside; 0, -1 and -1: not known. ``args`` are the program's own word, all else is the
    kernel's. An ``exe`` that begins with ``~`` is what was asked for by a program that ended too soon, no proof of a
    file. ``count``: how often, at least 1; of ``lost``: how many, 0: nobody knows.
    """

    seq: int
    time: datetime | None
    kind: str
    pid: int
    ppid: int
    uid: int
    gid: int
    exe: str
    args: list[str]
    path: str
    detail: str
    exec: str
    phase: str
    count: int

    @classmethod
    def from_wire(cls, m: Json) -> AuditRecord:
        kind = w.string(m, "kind")
        count = w.integer(m, "count")
        return cls(w.integer(m, "seq"), w.time(m, "time"), kind, w.integer(m, "pid"), w.integer(m, "ppid"),
                   w.integer(m, "uid"), w.integer(m, "gid"), w.string(m, "exe"), w.strings(m, "args"), w.string(m, "path"),
                   w.string(m, "detail"), w.string(m, "exec"), w.string(m, "phase"), count if kind == "lost" else max(1, count))


@dataclass(frozen=True)
class HackFinding:
    """Something that looks like a reward hack: a reason to look, never a verdict.

    ``hack``: which kind, like tests_edited, runner_hook or result_forged (docs/guides/findings.md). ``confidence``:
    0 to 1; from 0.5 on it also comes as an event of type finding. ``evidence``: ``seq`` of audit records.
    ``lines``: what speaks for it, strongest first; ``title`` is the first. ``count``: of all that speaks for it.
    """

    hack: str
    confidence: float
    title: str
    evidence: list[int]
    lines: list[str]
    first: datetime | None
    last: datetime | None
    count: int

    @classmethod
    def from_wire(cls, m: Json) -> HackFinding:
        return cls(w.string(m, "class"), w.number(m, "confidence"), w.string(m, "title"), [int(n) for n in m.get("evidence", [])], w.strings(m, "lines"),
                   w.time(m, "first"), w.time(m, "last"), w.integer(m, "count"))


@dataclass(frozen=True)
class Change:
    """What ``files.watch`` saw. ``op``: create, write, remove, attr, lost (list again)."""

    path: str
    op: str


@dataclass(frozen=True)
class Artifact:
    """A file collected from a sandbox: in memory, or on this machine if a directory was given."""

    path: str
    size: int
    mode: int
    data: bytes | None = field(default=None, repr=False)
    local: Path | None = None

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        return self.local.read_bytes() if self.local else b""


@dataclass(frozen=True)
class Event:
    """One thing that happened to one sandbox. ``seq`` counts from 1 for each sandbox, without gaps."""

    sandbox: str
    seq: int
    time: datetime | None
    type: str
    from_: str
    to: str
    exec: str
    detail: str
    fields: dict[str, str]

    @classmethod
    def from_wire(cls, m: Json) -> Event:
        return cls(w.string(m, "sandbox"), w.integer(m, "seq"), w.time(m, "time"), w.string(m, "type"),
                   w.string(m, "from"), w.string(m, "to"), w.string(m, "exec"), w.string(m, "detail"),
                   w.string_map(m, "fields"))


@dataclass(frozen=True)
class ImageConfig:
    """What an image says about running it."""

    env: tuple[str, ...]
    user: str
    workdir: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    arch: str

    @classmethod
    def from_wire(cls, m: Json) -> ImageConfig:
        return cls(tuple(w.strings(m, "env")), w.string(m, "user"), w.string(m, "workdir"),
                   tuple(w.strings(m, "entrypoint")), tuple(w.strings(m, "cmd")), w.string(m, "arch"))


@dataclass(frozen=True)
class StackLayer:
    """One layer of a stack. ``role``, of a template: base, workspace, toolkit. ``ref``: what was asked for."""

    digest: str
    role: str
    ref: str


@dataclass(frozen=True)
class Layer:
    """An immutable layer, or a stack of them. Sizes in bytes: of the metadata, and of the data as it reads.

    ``image``: it was imported as a whole root file system, a base for sandboxes.
    ``layers``: of a stack, which is an image converted layer by layer or a template,
    the lowest first; the other fields are of all of them.
    ``lineage``: it was packed from a sandbox's disk.
    """

    digest: str
    meta_size: int
    data_size: int
    entries: int
    source: str
    config: ImageConfig | None
    tags: tuple[str, ...]
    image: bool
    layers: tuple[StackLayer, ...] = ()
    lineage: Lineage | None = None

    @property
    def template(self) -> bool:
        return bool(self.layers) and bool(self.layers[0].role)

    @classmethod
    def from_wire(cls, m: Json) -> Layer:
        config, lineage = w.message(m, "config"), w.message(m, "lineage")
        return cls(w.string(m, "digest"), w.integer(m, "meta_size"), w.integer(m, "data_size"),
                   w.integer(m, "entries"), w.string(m, "source"),
                   ImageConfig.from_wire(config) if config else None, tuple(w.strings(m, "tags")), w.boolean(m, "image"),
                   tuple(StackLayer(w.string(p, "digest"), w.string(p, "role"), w.string(p, "ref"))
                         for p in w.messages(m, "layers")),
                   Lineage.from_wire(lineage) if lineage else None)


@dataclass(frozen=True)
class EnsureProgress:
    """How far an image is on its way to be known. ``done`` and ``total`` are bytes of its layers; ``total`` 0 if unknown.

    ``phase``: queue, resolve, wait (another node is at it), convert, stack, ready.
    ``queue``: images before it, and it; 0: it is being made. ``left``: seconds as
    fast as it went so far; 0 if unknown.
    """

    ref: str
    phase: str
    done: int
    total: int
    queue: int
    left: float

    @classmethod
    def from_wire(cls, m: Json) -> EnsureProgress:
        return cls(w.string(m, "ref"), w.string(m, "phase"), w.integer(m, "done"), w.integer(m, "total"),
                   w.integer(m, "queue"), w.integer(m, "left_ms") / 1000)


@dataclass(frozen=True)
class Merged:
    """Layers that images share at their bottom, and what they became. Bytes; ``layer`` is empty in a dry run."""

    layers: tuple[str, ...]
    layer: str
    images: tuple[str, ...]
    before: int
    after: int

    @classmethod
    def from_wire(cls, m: Json) -> Merged:
        return cls(tuple(w.strings(m, "layers")), w.string(m, "layer"), tuple(w.strings(m, "images")),
                   w.integer(m, "before"), w.integer(m, "after"))


@dataclass(frozen=True)
class TracedFile:
    """What the recordings of a trace touched of a file. Bytes; ``count``: recordings that touched the part that most did."""

    path: str
    size: int
    touched: int
    expected: int
    count: int


@dataclass(frozen=True)
class LayerTrace:
    """What is read first of a layer, over ``recordings`` of at most ``window`` seconds each.

    ``files`` are in the order in which they are first touched; ``more`` are not listed.
    ``expected`` bytes of the ``touched`` are fetched before the next sandbox asks for them.
    """

    digest: str
    data_size: int
    touched: int
    expected: int
    window: float
    recordings: int
    files: tuple[TracedFile, ...]
    more: int

    @classmethod
    def from_wire(cls, m: Json) -> LayerTrace:
        files = tuple(TracedFile(w.string(f, "path"), w.integer(f, "size"), w.integer(f, "touched"),
                                 w.integer(f, "expected"), w.integer(f, "count")) for f in w.messages(m, "files"))
        return cls(w.string(m, "digest"), w.integer(m, "data_size"), w.integer(m, "touched"), w.integer(m, "expected"),
                   w.number(m, "window"), w.integer(m, "recordings"), files, w.integer(m, "more"))


@dataclass(frozen=True)
class LayerDemand:
    """What has come of a layer that is mounted or not all here.

    ``here`` of ``chunks`` are on the machine, ``touched`` bytes in the page cache of its mount (-1: it is not mounted).
    ``requests`` brought ``fetched`` bytes from object storage, which became ``plain``; ``stalls`` reads waited for them,
    ``stalled`` seconds added. Counts begin anew when nobody has the layer mounted any more. ``served``: reads of what
    is not here are answered.
    """

    digest: str
    tags: tuple[str, ...]
    data_size: int
    chunks: int
    here: int
    touched: int
    served: bool
    requests: int
    fetched: int
    plain: int
    stalls: int
    stalled: float
    failures: int
    last_failure: str

    @classmethod
    def from_wire(cls, m: Json) -> LayerDemand:
        return cls(w.string(m, "digest"), tuple(w.strings(m, "tags")), w.integer(m, "data_size"), w.integer(m, "chunks"),
                   w.integer(m, "here"), w.integer(m, "touched"), w.boolean(m, "served"), w.integer(m, "requests"),
                   w.integer(m, "fetched"), w.integer(m, "plain"), w.integer(m, "stalls"), w.number(m, "stalled"),
                   w.integer(m, "failures"), w.string(m, "last_failure"))


@dataclass(frozen=True)
class Progress:
    """Of an import or build. ``phase``: resolve, fetch, convert, store; bytes; ``total`` 0 if unknown."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True)
class Node:
    """A machine. ``cpu``, ``memory`` and ``disk`` are the committed fractions of its budgets."""

    id: str
    alive: bool
    draining: bool
    live: int
    starting: int
    max_live: int
    cpu: float
    memory: float
    disk: float
    tiers: tuple[str, ...]
    version: str

    @classmethod
    def from_wire(cls, m: Json) -> Node:
        return cls(w.string(m, "id"), w.boolean(m, "alive"), w.boolean(m, "draining"), w.integer(m, "live"),
                   w.integer(m, "starting"), w.integer(m, "max_live"), w.number(m, "cpu"), w.number(m, "memory"),
                   w.number(m, "disk"), tuple(w.strings(m, "tiers")), w.string(m, "version"))


@dataclass(frozen=True)
class Info:
    """The server and who the caller is there; ``quota`` 0 is no limit."""

    version: str
    principal: str
    project: str
    role: str
    live: int
    quota: int

    @classmethod
    def from_wire(cls, m: Json) -> Info:
        return cls(w.string(m, "version"), w.string(m, "principal"), w.string(m, "project"), w.string(m, "role"),
                   w.integer(m, "live"), w.integer(m, "quota"))


def argv_of(cmd: str | Sequence[str], shell: str) -> list[str]:
    """A string is a script for the shell, a sequence is run as it is."""
    if isinstance(cmd, str):
        return [shell, "-c", cmd]
    return list(_strings(cmd))


def _strings(cmd: Iterable[object]) -> Iterable[str]:
    for a in cmd:
        if not isinstance(a, (str, Path)):
            raise TypeError(f"arguments of a command are strings, not {type(a).__name__}")
        yield str(a)
