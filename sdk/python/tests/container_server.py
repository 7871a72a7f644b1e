"""Starts `dsec up` on this machine for the tests: real sandboxes over a busybox image. Needs root.

    DSEC_TEST_SERVER="python tests/container_server.py" python -m pytest

DSEC= names the binary (default bin/dsec of this repository), BASE= a root file
system tar instead of the busybox one. Prints one line of JSON when it serves;
when its stdin ends, it ends every sandbox and removes all it made.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from libdsec import Client, DsecError

ROOT = Path(__file__).resolve().parents[3]
PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n"


def busybox_image(path: Path) -> None:
    """A root file system with a static busybox, root, and a user with uid 1000."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise SystemExit("container_server: busybox is not installed (Debian: busybox-static)")
    applets = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split()
    with tarfile.open(path, "w") as tar:
        for name, mode, owner in [("bin", 0o755, 0), ("etc", 0o755, 0), ("root", 0o700, 0), ("tmp", 0o1777, 0),
                                  ("home", 0o755, 0), ("home/user", 0o755, 1000)]:
            m = tarfile.TarInfo(name)
            m.type, m.mode, m.uid, m.gid = tarfile.DIRTYPE, mode, owner, owner
            tar.addfile(m)
        add(tar, "bin/busybox", Path(busybox).read_bytes(), 0o755)
        add(tar, "etc/passwd", PASSWD.encode(), 0o644)
        add(tar, "etc/group", b"root:x:0:\nuser:x:1000:\n", 0o644)
        for applet in applets:
            if applet != "busybox":
                m = tarfile.TarInfo(f"bin/{applet}")
                m.type, m.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(m)


def add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    m = tarfile.TarInfo(name)
    m.size, m.mode = len(data), mode
    tar.addfile(m, io.BytesIO(data))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def first_key(context: Path) -> str:
    """The key that the first start wrote for its user."""
    deadline = time.monotonic() + 20
    while True:
        try:
            (found,) = json.loads(context.read_text())["contexts"].values()
            return str(found["api_key"])
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def wait_until_up(client: Client, up: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if any(n.alive for n in client.nodes()):
                return
        except DsecError:
            pass
        if up.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"container_server: dsec up did not come up (status {up.poll()}):\n{log.read_text()[-3000:]}")
        time.sleep(0.1)


def main() -> int:
    dsec = os.environ.get("DSEC") or str(ROOT / "bin" / "dsec")
    state = Path(tempfile.mkdtemp(prefix="dsec-py.", dir="/var/tmp"))  # short: a socket path has 108 bytes
    state.chmod(0o711)  # the gateway is not root
    tcp = f"127.0.0.1:{free_port()}"
    (state / "dsec.yaml").write_text(json.dumps({"gateway": {"listen": tcp}}) + "\n")
    where = ["--instance", "py" + secrets.token_hex(2), "--data", str(state / "data"), "--run", str(state / "run"),
             "--config", str(state / "dsec.yaml")]
    env = {**os.environ, "DSEC_CONFIG": str(state / "context.json")}
    gateway = str(state / "run" / "gateway.sock")
    with (state / "up.log").open("wb") as log:
        up = subprocess.Popen([dsec, "up", *where], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
    try:
        with Client(gateway) as client:
            wait_until_up(client, up, state / "up.log")
            base = Path(os.environ.get("BASE") or state / "busybox.tar")
            if not os.environ.get("BASE"):
                busybox_image(base)
            client.layers.upload(base, "base", kind="import")
        print(json.dumps({"socket": gateway, "image": "base", "kind": "container",
                          "url": f"http://{tcp}", "api_key": first_key(state / "context.json")}), flush=True)
        sys.stdin.read()
    finally:
        down = subprocess.run([dsec, "down", *where, "--purge"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        up.wait(30)
        if down.returncode:
            sys.stderr.buffer.write((state / "up.log").read_bytes()[-2000:] + down.stdout)
        shutil.rmtree(state)
    return down.returncode


if __name__ == "__main__":
    sys.exit(main())
