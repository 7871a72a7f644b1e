"""The fields of Spec as keyword arguments, for type checkers only."""

from __future__ import annotations

from datetime import date, datetime
from typing import Mapping, Sequence, TypedDict

from .network import NetworkRule
from .phases import Phase
from .types import Checkpoint, Keep, Size


class SpecFields(TypedDict, total=False):
    layers: Sequence[str]
    name: str
    tier: str
    isolation: str
    boot: str
    command: Sequence[str]
    env: Mapping[str, str]
    user: str
    workdir: str
    hostname: str
    network: str
    allow: Sequence[str | NetworkRule]
    cutoff: datetime | date | str | None
    mirror_deny: Sequence[str]
    cpu: float
    cpu_weight: int
    memory: Size
    pids: int
    disk: Size
    output: Size
    idle: float
    lifetime: float
    retention: float
    on_failure: Keep | None
    phases: Sequence[Phase]
    profile: str
    no_new_privs: bool
    oom: str
    mounts: Sequence[tuple[str, str]]
    watch: Sequence[str]
    labels: Mapping[str, str]
    call_id: str
    rollout_key: str
    checkpoint: str | Checkpoint
