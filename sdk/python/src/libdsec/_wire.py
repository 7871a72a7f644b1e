"""JSON as protobuf writes it: int64 as strings, bytes as base64, zero values left out."""

from __future__ import annotations

import base64
import json
import re
from datetime import datetime, timezone
from typing import Any, Mapping, cast

Json = dict[str, Any]

_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)$")


def loads(body: bytes) -> Json:
    """A JSON object; an empty body is an empty one."""
    m = json.loads(body or b"{}")
    return cast(Json, m) if isinstance(m, dict) else {}


def integer(m: Mapping[str, Any], key: str) -> int:
    return int(m.get(key) or 0)


def number(m: Mapping[str, Any], key: str) -> float:
    return float(m.get(key) or 0.0)


def string(m: Mapping[str, Any], key: str) -> str:
    v = m.get(key)
    return v if isinstance(v, str) else ""


def strings(m: Mapping[str, Any], key: str) -> list[str]:
    return [str(v) for v in m.get(key) or []]


def string_map(m: Mapping[str, Any], key: str) -> dict[str, str]:
    return {str(k): str(v) for k, v in (m.get(key) or {}).items()}


def boolean(m: Mapping[str, Any], key: str) -> bool:
    return bool(m.get(key))


def message(m: Mapping[str, Any], key: str) -> Json | None:
    v = m.get(key)
    return cast(Json, v) if isinstance(v, dict) else None


def messages(m: Mapping[str, Any], key: str) -> list[Json]:
    return [v for v in m.get(key) or [] if isinstance(v, dict)]


def data(m: Mapping[str, Any], key: str) -> bytes:
    v = m.get(key)
    return base64.b64decode(v) if v else b""


def b64(b: bytes) -> str:
    return base64.b64encode(b).decode("ascii")


def time(m: Mapping[str, Any], key: str) -> datetime | None:
    """RFC 3339 with up to nanoseconds (cut to microseconds); None if absent."""
    found = _RFC3339.match(string(m, key))
    if not found:
        return None
    base, fraction, zone = found.groups()
    text = f"{base}.{(fraction or '0')[:6].ljust(6, '0')}{'+00:00' if zone == 'Z' else zone}"
    return datetime.fromisoformat(text).astimezone(timezone.utc)


def timestamp(t: datetime) -> str:
    """A naive time is taken as local, as datetime does everywhere."""
    return t.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def drop_empty(m: Json) -> Json:
    """Leaves zero values out, as protobuf does."""
    return {k: v for k, v in m.items() if v not in ("", 0, 0.0, False, None, [], {})}
