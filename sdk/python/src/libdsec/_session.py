"""A shell that persists between commands.

The shell is a command of its own that waits at a FIFO in a private directory of
the sandbox. Each command of the session is an exec of its own too: it hands its
script and its three standard streams (/proc/PID/fd) to the shell and waits at
another FIFO for the status. So output, offsets, limits, timeouts and attaching
again are those of any exec, and nothing that a command prints can pass for a
status or for the end of its output.

All of this runs inside, as the user of the session: whoever controls that user
controls the session too.
"""

from __future__ import annotations

import asyncio
import secrets
import signal as signals
from typing import TYPE_CHECKING, Any, Awaitable, Mapping, TypeVar

from ._process import AsyncProcess, raise_for
from ._transport import new_key
from .errors import DsecError, ExecTimeout, SandboxGone, SessionLost
from .types import OnLimit, Result, Size

if TYPE_CHECKING:
    from ._sandbox import AsyncSandbox

T = TypeVar("T")

LARGEST_ARGUMENT = 100_000  # the kernel takes 128 KiB
SETTLE = 5.0  # seconds an interrupted command has to end
NO_SHELL = 125

# Waits for commands. $1 is the private directory. A command that was asked for by
# a process that is gone, or whose pid is somebody else's now, is passed over.
_SHELL = """
__d=$1 __n=
umask 077 && mkdir "$__d" && mkfifo "$__d/in" && echo "$$" >"$__d/pid" || exit 125
umask 022
exec 9<>"$__d/in"
trap '__s=$?; [ -z "$__n" ] || printf "%s\\n" "$__s" 1<>"$__d/o$__n"; rm -rf "$__d"' EXIT
trap '[ -z "$__n" ] || return 130' INT
echo ready
while :; do
  IFS=" " read -r __p __n <&9 || { __n=; continue; }
  case $(tr "\\0" " " <"/proc/$__p/cmdline" 2>/dev/null) in *" $__d $__n "*) ;; *) __n=; continue ;; esac
  { command . "$__d/c$__n"; } <"/proc/$__p/fd/7" >>"/proc/$__p/fd/1" 2>>"/proc/$__p/fd/2" 9>&-
  __s=$?
  printf "%s\\n" "$__s" 1<>"$__d/o$__n"
  rm -f "$__d/c$__n" "$__d/o$__n"
  __n=
done
"""

# Hands a command over: $1 directory, $2 its name, $3 the script unless it is there already.
_HAND_OVER = """
[ -p "$1/in" ] || exit 125
umask 077
[ -e "$1/c$2" ] || printf "%s\\n" "$3" >"$1/c$2" || exit 125
mkfifo "$1/o$2" || exit 125
exec 7<&0 8<>"$1/o$2"
printf "%s %s\\n" "$$" "$2" >"$1/in"
read -r s <&8
exit "$s"
"""

# Sends signal $2 to the shell of directory $1 (unless $3) and to all it started.
_SIGNAL = """
below() { for c in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do echo "$c"; below "$c"; done; }
read -r p <"$1/pid" || exit 125
[ -n "$3" ] || kill -s "$2" "$p"
for c in $(below "$p"); do kill -s "$2" "$c"; done 2>/dev/null
exit 0
"""


class AsyncSession:
    """A shell in a sandbox; one command at a time, others wait."""

    def __init__(self, sandbox: AsyncSandbox, shell: AsyncProcess, user: str) -> None:
        self._sandbox = sandbox
        self._shell = shell
        self._user = user
        self._directory = _directory(shell.exec_id)
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} in {self._sandbox.id}>"

    @property
    def id(self) -> str:
        """Names the session; see ``AsyncSandbox.attach_session``."""
        return self._shell.exec_id

    @classmethod
    async def open(cls, sandbox: AsyncSandbox, *, shell: str, cwd: str, env: Mapping[str, str] | None,
                   user: str) -> AsyncSession:
        name = new_key()
        program = f'exec {_quote(shell)} -c "$0" sh "$1"' if shell else (
            'if command -v bash >/dev/null; then exec bash -c "$0" sh "$1"; else exec sh -c "$0" sh "$1"; fi')
        process = await sandbox.start(["/bin/sh", "-c", program, _SHELL, _directory(name)], cwd=cwd, env=env,
                                      user=user, call_id=name)
        async for line in process.stdout.lines():
            if line == "ready":
                return cls(sandbox, process, user)
        result = await process.wait()
        raise SessionLost("open session", sandbox.id, result.stderr.text.strip() or f"exit code {result.exit_code}")

    @classmethod
    async def attach(cls, sandbox: AsyncSandbox, id: str, user: str) -> AsyncSession:
        return cls(sandbox, await sandbox.attach(id), user)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self.close()
        except SandboxGone:
            pass

    async def exec(self, cmd: str, *, stdin: bytes | str | None = None, timeout: float = 0.0, check: bool = False,
                   on_limit: OnLimit = "truncate", output_limit: Size = 0) -> Result:
        """Runs a script in the shell: it may change directory, variables and functions.

        Arguments, result and errors are those of ``AsyncSandbox.exec``. A timeout
        interrupts the script; the session goes on. SessionLost once the shell ended.
        """
        async with self._turn:
            argv = await self._command(cmd)
            try:
                result = await self._while_alive(self._sandbox.exec(
                    argv, user=self._user, stdin=stdin, timeout=timeout, on_limit=on_limit,
                    output_limit=output_limit, kill_on_cancel=True))
            except (ExecTimeout, asyncio.CancelledError):
                await asyncio.shield(self._quieten())
                raise
        if result.exit_code == NO_SHELL and await self._ended(0.2):
            raise self._lost()
        if check:
            raise_for(self._sandbox.id, result, check=True)
        return result

    async def start(self, cmd: str, *, stdin: bool = False, timeout: float = 0.0) -> AsyncProcess:
        """Starts a script in the shell and follows it; the next command begins when it has ended."""
        return await self._sandbox.start(await self._command(cmd), user=self._user, stdin=stdin, timeout=timeout)

    async def interrupt(self) -> None:
        """What ctrl-C does: the running script is given up with status 130."""
        await self._signal(signals.SIGINT)

    async def close(self) -> None:
        """Ends the shell and all it started."""
        await self._shell.kill()

    async def _command(self, cmd: str) -> list[str]:
        name = secrets.token_hex(6)
        if len(cmd.encode()) > LARGEST_ARGUMENT:
            await self._sandbox.files.as_user(self._user).write(f"{self._directory}/c{name}", cmd + "\n", mode=0o600)
            cmd = ""
        return ["/bin/sh", "-c", _HAND_OVER, "sh", self._directory, name, cmd]

    async def _signal(self, number: signals.Signals, children_only: bool = False) -> None:
        argv = ["/bin/sh", "-c", _SIGNAL, "sh", self._directory, number.name[3:], "1" if children_only else ""]
        await self._sandbox.exec(argv, user=self._user, timeout=10)

    async def _quieten(self) -> None:
        """Gets the shell back to waiting; the hard way if need be."""
        steps = [(signals.SIGINT, False), (signals.SIGTERM, True), (signals.SIGKILL, True)]
        for number, children_only in steps:
            if await self._ended(0):
                return
            await self._signal(number, children_only)
            try:
                await self._sandbox.exec(await self._command(":"), user=self._user, timeout=SETTLE)
                return
            except ExecTimeout:
                continue
        await self.close()

    async def _ended(self, within: float) -> bool:
        await asyncio.wait([self._shell._sub.ended], timeout=within)
        return self._shell._sub.ended.done()

    def _lost(self) -> DsecError:
        return SessionLost("exec in session", self.id, "the shell has ended")

    async def _while_alive(self, work: Awaitable[T]) -> T:
        """The result of work, unless the shell ends without answering it."""
        task = asyncio.ensure_future(work)
        ended = self._shell._sub.ended
        either: list[asyncio.Future[Any]] = [task, ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait([task], timeout=1.0)  # an exit of the script answers first
            if task.done():
                return task.result()
            if ended.exception() is not None:
                raise ended.exception() or self._lost()
            raise self._lost()
        finally:
            if not task.done():
                task.cancel()


def _directory(name: str) -> str:
    return f"/tmp/.dsec-session-{name}"


def _quote(s: str) -> str:
    return "'" + s.replace("'", "'\\''") + "'"
