"""Cutting byte streams into frames: a flag byte, a big-endian length, that many bytes."""

from __future__ import annotations

import struct
from typing import Iterator

HEADER = struct.Struct(">BI")
MAX_FRAME = 64 << 20

END_STREAM = 0x02
COMPRESSED = 0x01


class FrameError(Exception):
    """The stream is not made of frames, or of larger ones than anybody sends."""


def frame(payload: bytes, flags: int = 0) -> bytes:
    return HEADER.pack(flags, len(payload)) + payload


class Cutter:
    """Feed it pieces as they come; it gives whole frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        self._buffer += piece
        at = 0
        try:
            while len(self._buffer) - at >= HEADER.size:
                flags, length = HEADER.unpack_from(self._buffer, at)
                if length > MAX_FRAME:
                    raise FrameError(f"frame of {length} bytes, at most {MAX_FRAME}")
                end = at + HEADER.size + length
                if len(self._buffer) < end:
                    break
                payload = bytes(memoryview(self._buffer)[at + HEADER.size:end])
                at = end
                yield flags, payload
        finally:
            del self._buffer[:at]

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._buffer)
