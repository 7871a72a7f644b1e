"""Finding the server: arguments, then environment, then socket, then the CLI's context."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping

from .errors import Invalid, Unavailable

DEFAULT_SOCKET = "/run/dsec/gateway.sock"


@dataclass(frozen=True)
class Endpoint:
    """Where the gateway is. ``socket`` is the path of a unix socket, else ``url`` is used."""

    url: str = "http://dsec"
    socket: str = ""
    api_key: str = field(default="", repr=False)

    @classmethod
    def at(cls, where: str, api_key: str = "") -> Endpoint:
        """``where`` is an http(s) URL, "unix:/path" or the path of a socket."""
        if where.startswith("unix:"):
            where = where[len("unix:"):].removeprefix("//")
        if where.startswith("/"):
            return cls(socket=where, api_key=api_key)
        if where.startswith(("http://", "https://")):
            return cls(url=where.rstrip("/"), api_key=api_key)
        raise Invalid("find server", where, "neither an http(s) URL nor the path of a socket")


def find(where: str | None, api_key: str | None, env: Mapping[str, str] | None = None) -> Endpoint:
    """The endpoint a client uses that was given ``where`` and ``api_key``.

    In this order: the arguments; DSEC_SOCKET; DSEC_URL (with DSEC_API_KEY); the
    socket /run/dsec/gateway.sock if it is there; the current context of the
    dsec command ($DSEC_CONFIG, else ~/.config/dsec/config.json).
    """
    env = os.environ if env is None else env
    key = api_key if api_key is not None else env.get("DSEC_API_KEY", "")
    if where:
        return Endpoint.at(where, key)
    if env.get("DSEC_SOCKET"):
        return Endpoint.at(env["DSEC_SOCKET"], key)
    if env.get("DSEC_URL"):
        return Endpoint.at(env["DSEC_URL"], key)
    if os.path.exists(DEFAULT_SOCKET):
        return Endpoint(socket=DEFAULT_SOCKET, api_key=key)
    found = _context(env)
    if found is None:
        raise Unavailable("find server", "", f"no {DEFAULT_SOCKET}, DSEC_SOCKET, DSEC_URL or dsec context; "
                          "start one with: dsec up")
    return Endpoint.at(found[0], key or found[1])


def context_file(env: Mapping[str, str]) -> Path:
    if env.get("DSEC_CONFIG"):
        return Path(env["DSEC_CONFIG"])
    base = env.get("XDG_CONFIG_HOME") or os.path.join(env.get("HOME", "/"), ".config")
    return Path(base) / "dsec" / "config.json"


def _context(env: Mapping[str, str]) -> tuple[str, str] | None:
    path = context_file(env)
    try:
        doc = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise Invalid("read context", str(path), str(e)) from e
    name = env.get("DSEC_CONTEXT") or doc.get("current", "")
    context = (doc.get("contexts") or {}).get(name)
    if not isinstance(context, dict):
        return None
    where = context.get("socket") or context.get("url") or ""
    return (str(where), str(context.get("api_key") or "")) if where else None
