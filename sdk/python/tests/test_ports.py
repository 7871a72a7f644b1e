"""Ports of sandboxes without a network: HTTP, WebSocket, and nothing at all."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
from typing import Callable

import httpx
import pytest

from conftest import Lacks, Server
from libdsec import Client, Sandbox, Timeout

SHOW = "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n%s %s\\n' \"$REQUEST_METHOD\" \"$QUERY_STRING\"; env; cat\n"
# Answers a handshake and then says everything it hears.
CHAT = r"""#!/bin/sh
while IFS= read -r line; do
  line=${line%?}
  [ -n "$line" ] || break
  case $line in
    GET*) path=$line ;;
    Sec-WebSocket-Key:*|Sec-Websocket-Key:*) key=${line#*: } ;;
  esac
done
accept=$(printf '%s258EAFA5-E914-47DA-95CA-C5AB0DC85B11' "$key" | sha1sum | cut -d' ' -f1 | xxd -r -p | base64)
printf 'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n'
printf 'Sec-WebSocket-Accept: %s\r\nX-Line: %s\r\n\r\n' "$accept" "$path"
exec cat
"""


@pytest.fixture
def serving(box: Sandbox, lacks: Lacks) -> Callable[[], Sandbox]:
    """A sandbox without a network in which a web server listens on 8000."""

    def start() -> Sandbox:
        lacks(box, "httpd -p 127.0.0.1:8000 -h /tmp/www")
        box.files.write("/tmp/www/cgi-bin/show", SHOW, mode=0o755)
        box.files.write("/tmp/www/a dir/big", b"0123456789abcdef" * 200_000)
        box.exec("httpd -p 127.0.0.1:8000 -h /tmp/www", check=True)
        return box

    return start


def test_http_reaches_a_server_inside(serving: Callable[[], Sandbox], server: Server) -> None:
    box = serving()
    port = box.port(8000)
    port.wait(20)
    links = box.exec("sed -n 's/^ *\\([^:]*\\):.*/\\1/p' /proc/net/dev").text.split()
    assert links == ["lo"]  # no network, and yet
    with port.http() as c:
        big = c.get("/a%20dir/big")
        assert big.status_code == 200 and hashlib.sha256(big.content).digest() == hashlib.sha256(
            b"0123456789abcdef" * 200_000).digest()
        assert c.get("/none").status_code == 404  # the server's own answer
        r = c.post("/cgi-bin/show?a=1&b=%2F", content=b"sent", headers={"X-Mine": "yes"})
        assert r.text.startswith("POST a=1&b=%2F\n") and r.text.endswith("sent")
        assert "HTTP_X_MINE=yes" in r.text and "HTTP_HOST=localhost:8000" in r.text
    with pytest.raises(ValueError):
        box.port(0)


def test_a_server_inside_does_not_see_our_key(serving: Callable[[], Sandbox], server: Server) -> None:
    box = serving()
    with Client(server.url, server.api_key) as c:
        port = c.connect(box.id).port(8000)
        port.wait(20)
        with port.http() as h:
            seen = h.get("/cgi-bin/show").text
        assert seen.startswith("GET ") and server.api_key not in seen and "AUTHORIZATION" not in seen
    assert httpx.get(port.url + "/", trust_env=False).status_code == 401


def test_a_websocket_passes_through(box: Sandbox, server: Server, lacks: Lacks) -> None:
    lacks(box, "nc -ll -p 8001 -e /tmp/chat")
    box.files.write("/tmp/chat", CHAT, mode=0o755)
    box.start("exec nc -ll -p 8001 -e /tmp/chat")
    box.exec("until nc -z 127.0.0.1 8001 || netstat -ltn | grep -q :8001; do sleep 0.05; done", timeout=20)
    key = base64.b64encode(os.urandom(16)).decode()
    request = (f"GET /v1/sandboxes/{box.id}/ports/8001/chat?x=1 HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
               f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n")
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(20)
        s.connect(server.socket)
        s.sendall(request.encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            piece = s.recv(4096)
            assert piece, f"the server closed after {answer!r}"
            answer += piece
        head, rest = answer.split(b"\r\n\r\n", 1)
        accept = base64.b64encode(hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest())
        assert head.startswith(b"HTTP/1.1 101") and accept in head and b"GET /chat?x=1 HTTP/1.1" in head
        frame = bytes([0x82, 0xFE, 0x03, 0xE8]) + os.urandom(4 + 1000)  # binary, masked, 1000 bytes
        s.sendall(frame)
        while len(rest) < len(frame):
            piece = s.recv(4096)
            assert piece, f"the server closed after {len(rest)} bytes"
            rest += piece
        assert rest == frame


def test_a_port_where_nothing_listens(box: Sandbox) -> None:
    with box.port(9).http() as c:
        r = c.get("/")
    assert r.status_code == 503 and r.json()["details"][0]["debug"]["class"] == "unavailable"
    with pytest.raises(Timeout):
        box.port(9).wait(0.3)
