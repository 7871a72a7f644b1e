"""How much memory the host has in use, and how to empty its caches."""

from __future__ import annotations

import os
from pathlib import Path


def drop_caches() -> bool:
    """Empties the page cache of this machine; False if we may not."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def memory_used() -> int:
    """Bytes of this machine's memory that cannot be had back by dropping caches."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, rest = line.split(":")
        fields[name] = int(rest.split()[0]) << 10
    return fields["MemTotal"] - fields["MemAvailable"]
