"""How much of the layer files is in the page cache, and how much memory the host has in use."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_PAGE = mmap.PAGESIZE
_PROT_NONE, _MAP_SHARED = 0, 1


def drop_caches() -> bool:
    """Empties the page cache of this machine; False if we may not."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def layer_files(store: Path, digests: list[str]) -> list[Path]:
    """The files of the given layers below a store's directory."""
    wanted = {d.removeprefix("sha256:") for d in digests}
    return [f for f in store.rglob("*") if f.is_file() and wanted & set(f.parts)]


def resident(path: Path) -> int:
    """Bytes of a file that are in the page cache; looking does not bring any in."""
    size = path.stat().st_size
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    fd = os.open(path, os.O_RDONLY)
    try:
        at = libc.mmap(None, size, _PROT_NONE, _MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if at in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mmap {path}")
    try:
        pages = ctypes.create_string_buffer((size + _PAGE - 1) // _PAGE)
        if libc.mincore(at, size, pages) != 0:
            raise OSError(ctypes.get_errno(), f"mincore {path}")
        return sum(b & 1 for b in pages.raw) * _PAGE
    finally:
        libc.munmap(at, size)


def memory_used() -> int:
    """Bytes of this machine's memory that cannot be had back by dropping caches."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, rest = line.split(":")
        fields[name] = int(rest.split()[0]) << 10
    return fields["MemTotal"] - fields["MemAvailable"]
