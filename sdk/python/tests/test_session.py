"""A shell that persists. Cases by their ids."""

from __future__ import annotations

import time

import pytest

from conftest import Server
from libdsec import CommandFailed, ExecTimeout, Sandbox, SessionLost

pytestmark = pytest.mark.usefixtures("real")


def test_directory_environment_and_functions_persist(box: Sandbox) -> None:
    with box.session() as s:
        s.exec("cd /tmp; x=5; export Y=6; f() { echo f $1; }")
        assert s.exec("pwd; echo $x; sh -c 'echo $Y'; f a").text == "/tmp\n5\n6\nf a\n"


def test_B1_a_heredoc_does_not_hang(box: Sandbox) -> None:
    with box.session() as s:
        assert s.exec("cat <<'EOF'\nhello $x\nEOF", timeout=20).text == "hello $x\n"
        assert s.exec("echo prompt back").text == "prompt back\n"


def test_status_and_streams_are_those_of_the_script(box: Sandbox) -> None:
    with box.session() as s:
        r = s.exec("echo out; echo err >&2; (exit 9)")
        assert (r.exit_code, r.stdout, r.stderr) == (9, b"out\n", b"err\n")
        assert s.exec("if then").exit_code != 0
        assert s.exec("echo 'unclosed").exit_code != 0
        assert s.exec("cat", stdin=b"in\0put").stdout == b"in\0put"
        assert s.exec("echo ready; echo 0; printf '%s\\n' 'anything at all'").exit_code == 0
        with pytest.raises(CommandFailed):
            s.exec("false", check=True)


def test_a_timeout_interrupts_and_the_session_goes_on(box: Sandbox) -> None:
    with box.session() as s:
        s.exec("x=5")
        for script in ("echo A; sleep 60; echo B", "echo A; while :; do :; done", "echo A; trap '' INT; sleep 60"):
            with pytest.raises(ExecTimeout) as e:
                s.exec(script, timeout=1)
            assert e.value.result.stdout == b"A\n"
        assert s.exec("echo $x").text == "5\n"


def test_interrupt_gives_the_script_up(box: Sandbox) -> None:
    with box.session() as s:
        p = s.start("echo started; sleep 60; echo after")
        for line in p.stdout.lines():
            assert line == "started"
            break
        begun = time.monotonic()
        s.interrupt()
        r = p.wait()
        assert r.exit_code == 130 and r.text == "started\n" and time.monotonic() - begun < 10
        assert s.exec("echo on").text == "on\n"


def test_exit_ends_the_session_with_its_status(box: Sandbox) -> None:
    s = box.session()
    assert s.exec("exit 3").exit_code == 3
    with pytest.raises(SessionLost):
        s.exec("true")


def test_a_killed_shell_is_told(box: Sandbox) -> None:
    s = box.session()
    with pytest.raises(SessionLost):
        s.exec("kill -9 $$; sleep 60", timeout=30)


def test_a_session_is_attached_again(box: Sandbox) -> None:
    s = box.session()
    s.exec("cd /tmp; x=7")
    again = box.attach_session(s.id)
    assert again.exec("pwd; echo $x").text == "/tmp\n7\n"
    again.close()


def test_a_large_script_and_a_large_output(box: Sandbox) -> None:
    with box.session() as s:
        script = "\n".join(f": {i} {'x' * 90}" for i in range(3000)) + "\necho last"
        assert s.exec(script).text == "last\n"
        r = s.exec("head -c 3000000 /dev/zero")
        assert r.truncated and r.stdout.total == 3_000_000


def test_a_session_as_another_user(box: Sandbox, real: Server) -> None:
    with box.session(user="1000") as s:
        assert s.exec("id -u").text == "1000\n"
