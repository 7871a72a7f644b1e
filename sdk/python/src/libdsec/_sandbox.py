"""A sandbox: commands, files, ports and its life."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, AsyncIterator, Mapping, Sequence

from . import _wire as w
from ._files import AsyncFiles
from ._mux import Sub
from ._port import AsyncPort
from ._process import AsyncProcess, finish, raise_for
from ._screen import AsyncScreen
from ._session import AsyncSession
from ._transport import new_key
from ._wire import Json
from .errors import DsecError, NotFound, SandboxGone, Timeout
from .network import Egress, NetworkRule, rules
from .phases import PhaseState
from .types import (Artifact, AuditRecord, Checkpoint, Diff, Grade, HackFinding, OnLimit, Packed, Result, SandboxInfo, Scrub, Size, Spec, Stats,
                    argv_of, parse_duration, parse_size)

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from ._client import AsyncClient

Command = str | Sequence[str]


class AsyncSandbox:
    """A computer of its own. Use it as a context manager: it is deleted at the end.

    ``index`` is its number in ``create_many``. All methods may be used concurrently.
    Every method raises SandboxGone once the sandbox has ended.
    """

    index: int | None

    def __init__(self, client: AsyncClient, info: SandboxInfo, index: int | None = None) -> None:
        self._client = client
        self._info = info
        self.index = index

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._info.state}>"

    @property
    def client(self) -> AsyncClient:
        return self._client

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def spec(self) -> Spec:
        """As the node filled it in."""
        return self._info.spec

    @property
    def info(self) -> SandboxInfo:
        """As it was told last; ``refresh`` asks again."""
        return self._info

    @property
    def files(self) -> AsyncFiles:
        """Files as the sandbox's default user."""
        return AsyncFiles(self._client, self.id)

    @property
    def screen(self) -> AsyncScreen:
        """Its screen, keyboard and pointer, if it is a machine with one."""
        return AsyncScreen(self._client, self.id)

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            await self.delete()
            return
        try:
            await asyncio.shield(self.delete())
        except DsecError:
            pass  # what made the block end matters more; lifetimes end the sandbox

    def _told(self, answer: Json) -> SandboxInfo:
        m = w.message(answer, "sandbox")
        if m:
            self._info = SandboxInfo.from_wire(m)
        return self._info

    async def refresh(self) -> SandboxInfo:
        """Its state now; also after its end, from its record."""
        return self._told(await self._client._call("Sandboxes/Get", {"id": self.id}))

    # Commands.

    async def exec(self, cmd: Command, *, cwd: str = "", env: Mapping[str, str] | None = None, user: str = "",
                   stdin: bytes | str | None = None, timeout: float = 0.0, check: bool = False,
                   on_limit: OnLimit = "truncate", output_limit: Size = 0, shell: str = "/bin/sh",
                   call_id: str = "", kill_on_cancel: bool = False) -> Result:
        """Runs a command and returns its result.

        A string is a script for ``shell``, a sequence is run as it is. stdin is
        empty unless given. After ``timeout`` seconds (0: never) the command and all
        it started are killed: ExecTimeout, with the output until then. Of each
        stream the first and the last MiB are kept (with ``output_limit`` half of
        it each); ``on_limit="kill"`` ends the command there: OutputLimitExceeded.
        ``check`` raises CommandFailed unless it exits with 0.

        The same ``call_id`` again attaches to the same command. If the awaiting
        task is cancelled the command runs on, unless ``kill_on_cancel``.
        """
        spec = _exec_spec(argv_of(cmd, shell), cwd, env, user, timeout)
        spec.update(_limits(on_limit, output_limit))
        spec["stdin"] = stdin is not None
        sub = await self._start(spec, "kept", call_id, kill_on_cancel)
        try:
            if stdin is not None:
                await self._feed(sub, stdin)
            ended = await _within(sub, self.id, timeout)
        except asyncio.CancelledError:
            if kill_on_cancel:
                self._client._background(AsyncProcess(self, sub).kill())
            raise
        finally:
            self._client._state().mux.remove(sub)
        result = await finish(self, sub.exec_id, ended)
        raise_for(self.id, result, check)
        return result

    async def start(self, cmd: Command, *, cwd: str = "", env: Mapping[str, str] | None = None, user: str = "",
                    stdin: bool = False, pty: tuple[int, int] | None = None, timeout: float = 0.0,
                    on_limit: OnLimit = "truncate", output_limit: Size = 0, shell: str = "/bin/sh",
                    call_id: str = "", service: bool = False) -> AsyncProcess:
        """Starts a command and returns at once; follow it by the streams of the process.

        ``stdin=True`` keeps stdin open for ``write``. ``pty`` gives it a terminal of
        (rows, columns); all output is then in stdout. The rest is as in ``exec``.
        ``service=True``, in the first phase only (IllegalState): it goes on in later
        ones, as a user of its own that nobody there can signal or trace.
        """
        spec = _exec_spec(argv_of(cmd, shell), cwd, env, user, timeout)
        spec.update(_limits(on_limit, output_limit))
        spec["stdin"] = stdin
        if service:
            spec["service"] = True
        if pty is not None:
            spec["pty"] = {"rows": pty[0], "cols": pty[1]}
            spec["stdin"] = True
        return AsyncProcess(self, await self._start(spec, "stream", call_id))

    async def attach(self, exec_id: str, stdout_offset: int = 0, stderr_offset: int = 0) -> AsyncProcess:
        """Follows a command again, running or ended, from the given offsets on.

        Output that was neither kept nor read in time is skipped and counted in ``dropped``.
        """
        mux = self._client._state().mux
        sub = Sub(mux, self.id, exec_id, "stream", (stdout_offset, stderr_offset))
        waited = await self._client._call("Commands/Wait", {"sandbox": self.id, "exec": exec_id, "timeout": 0.001})
        mux.add(sub)
        sub.started = True
        try:
            await mux.subscribe([sub])
        except BaseException:
            mux.remove(sub)
            raise
        process = AsyncProcess(self, sub)
        process._written = None if w.message(waited, "result") is None else 0
        return process

    async def session(self, *, shell: str = "", cwd: str = "", env: Mapping[str, str] | None = None,
                      user: str = "") -> AsyncSession:
        """Opens a shell in which directory, environment and functions persist from command to command.

        ``shell`` is bash where there is one, else sh. Use it as a context manager.
        """
        return await AsyncSession.open(self, shell=shell, cwd=cwd, env=env, user=user)

    async def attach_session(self, id: str, user: str = "") -> AsyncSession:
        """A session that was opened before, here or elsewhere, by its id and user."""
        return await AsyncSession.attach(self, id, user)

    async def _start(self, spec: Json, mode: str, call_id: str, kill_on_cancel: bool = False) -> Sub:
        """Starts a command. A caller that is cancelled does not stop it half-way: it is killed after, or left."""
        sub = Sub(self._client._state().mux, self.id, call_id or new_key(), mode)
        starting = asyncio.ensure_future(self._begin(sub, spec))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._client._background(self._abandon(sub, starting, kill_on_cancel))
            raise
        return sub

    async def _abandon(self, sub: Sub, starting: asyncio.Future[None], kill: bool) -> None:
        await starting
        sub.mux.remove(sub)
        if kill:
            await AsyncProcess(self, sub).kill()

    async def _begin(self, sub: Sub, spec: Json) -> None:
        mux = sub.mux
        request = {"sandbox": self.id, "spec": w.drop_empty(spec), "call_id": sub.exec_id}
        mux.add(sub)
        try:
            while True:
                session = await mux.session()
                try:
                    await self._client._call("Commands/Exec", {
                        **request, "subscribe": {"session": session, **sub.wire()}})
                    break
                except NotFound:
                    if mux.current == session:
                        raise
            sub.started = True
            if mux.current not in (session, None):
                await mux.subscribe([sub])
        except BaseException:
            mux.remove(sub)
            raise

    async def _feed(self, sub: Sub, stdin: bytes | str) -> None:
        """Writes all of stdin; a command that ends before it has read it is no error."""
        process = AsyncProcess(self, sub)

        async def write() -> None:
            try:
                await process._write(stdin, close=True)
            except SandboxGone:
                raise
            except DsecError:
                await asyncio.shield(sub.ended)

        writer = asyncio.ensure_future(write())
        try:
            either: list[asyncio.Future[Any]] = [writer, sub.ended]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            writer.cancel()

    # What is inside.

    async def artifacts(self, globs: Sequence[str] | str, *, to: str | os.PathLike[str] | None = None, root: str = "/",
                        max_bytes: Size = 64 << 20) -> list[Artifact]:
        """Collects the files that match, also after a timeout, an OOM kill or a stop.

        Globs are absolute, or relative to ``root``; "**" crosses directories. With
        ``to`` the files are put below that directory of this machine, else they are
        in memory. More than ``max_bytes`` is ResourceExhausted.
        """
        wanted = [globs] if isinstance(globs, str) else list(globs)
        return await self.files._artifacts(wanted, root, to, parse_size(max_bytes))

    def port(self, number: int) -> AsyncPort:
        """A port inside, whatever the network mode: its URL, or an HTTP client for it."""
        return AsyncPort(self._client, self.id, number)

    async def stats(self) -> Stats:
        """What it uses at this moment."""
        return Stats.from_wire(await self._client._call("Sandboxes/Stats", {"id": self.id}))

    async def audit(self, since: int = 0, kinds: Sequence[str] = ()) -> list[AuditRecord]:
        """The evidence there is of what it did, in order, also after it was deleted.

        ``since``: only what comes after the record of that ``seq``. ``kinds``: only these; none: all.
        Raises Unsupported if its node keeps none.
        """
        request: Json = {"id": self.id, "since": since, "kinds": list(kinds)}
        async with self._client._stream("Sandboxes/Audit", request) as answers:
            return [AuditRecord.from_wire(r) async for m in answers if (r := w.message(m, "record"))]

    async def follow_audit(self, since: int = 0, kinds: Sequence[str] = ()) -> AsyncIterator[AuditRecord]:
        """The same as it comes, until the sandbox is deleted or the iteration is left.

        A broken connection is opened again where it was; no record comes twice.
        """
        failures = 0
        while True:
            request: Json = {"id": self.id, "since": since, "kinds": list(kinds), "follow": True}
            try:
                async with self._client._stream("Sandboxes/Audit", request, 30.0) as answers:
                    async for m in answers:
                        failures = 0
                        if r := w.message(m, "record"):
                            record = AuditRecord.from_wire(r)
                            since = record.seq
                            yield record
                return
            except DsecError as e:
                failures += 1
                if not e.retryable or failures > self._client.retries:
                    raise
            await self._client._pause(failures)

    async def findings(self, *, tests: Sequence[str] = (), harness: Sequence[str] = (), results: Sequence[str] = (),
                       trusted: Sequence[str] = (), phases: Sequence[str] = (), project: Sequence[str] = (),
                       least: float = 0.5) -> list[HackFinding]:
        """What in that evidence looks like a reward hack, by now; also after it was deleted.

        Say what the task is like, else much is a guess: patterns of files that judge the work (``tests``, like
        "/repo/tests/**"), of the harness's own (``harness``) and of those only it writes (``results``); ids of its
        commands (``trusted``, like "grade*"), ``phases`` in which only it runs commands, and names of what is worked
        on as others publish it (``project``). ``least``: only findings of that confidence or more, 0 to 1.
        Raises Unsupported if its node keeps no evidence, Invalid for a pattern that cannot be.
        """
        request: Json = {"id": self.id, "tests": list(tests), "harness": list(harness), "results": list(results),
                         "trusted": list(trusted), "phases": list(phases), "project_names": list(project)}
        answer = await self._client._call("Sandboxes/Findings", request)
        return [f for m in w.messages(answer, "findings") if (f := HackFinding.from_wire(m)).confidence >= least]

    # Its life.

    async def stop(self, cause: str = "") -> SandboxInfo:
        """Ends its processes and keeps its disk. ``cause`` is the owner's verdict: completed, cancelled, agent_error …"""
        return await self._change("Stop", timeout=120.0, cause=cause)

    async def start_again(self) -> SandboxInfo:
        """Runs a stopped sandbox again: same id, same disk."""
        return await self._change("Start", timeout=300.0)

    async def pause(self, *, to_disk: bool = False) -> SandboxInfo:
        """Freezes it; the clocks of its commands stop.

        ``to_disk``: what it has in memory goes to disk, until ``resume`` or whatever else reaches into it brings it
        back; connections to elsewhere are dead then. Raises Unsupported for a tier without a kernel of its own.
        """
        return await self._change("Pause", timeout=300.0 if to_disk else None, to_disk=to_disk)

    async def resume(self) -> SandboxInfo:
        """Has it go on, also one that was paused to disk."""
        return await self._change("Resume", timeout=300.0)

    async def fork(self, count: int = 1) -> list[AsyncSandbox]:
        """Makes ``count`` copies of it, which runs or is paused, and goes on.

        Each has its processes, memory and disk as they are at one moment; names, addresses, the time and the
        kernel's random numbers are its own. A generator in the memory of a program (``random`` in Python) is
        copied as it is: seed it again. All copies are made, or none. Raises Unsupported for a tier without a
        kernel of its own, ResourceExhausted beyond the quota.
        """
        if not 1 <= count <= 1000:
            raise ValueError(f"count of {count}: 1 to 1000")
        answer = await self._client._call("Sandboxes/Fork", {"id": self.id, "count": count, "call_id": new_key()}, timeout=300.0)
        return [AsyncSandbox(self._client, SandboxInfo.from_wire(m)) for m in w.messages(answer, "sandboxes")]

    async def checkpoint(self, keep: float | str = 0.0) -> Checkpoint:
        """Keeps it, which runs or is paused and goes on, where every node finds it that has the same object storage.

        ``keep`` is how long: seconds, or "24h"; 0 is seven days, at most 30. ``client.create(checkpoint=c.digest)`` goes on from
        there, also when it and its node are gone. Raises Unsupported for a tier without a kernel of its own.
        """
        request = w.drop_empty({"id": self.id, "call_id": new_key(), "keep": parse_duration(keep)})
        return Checkpoint.from_wire(await self._client._call("Sandboxes/Checkpoint", request, timeout=1800.0))

    async def set_timeout(self, seconds: float) -> SandboxInfo:
        """Ends it in so many seconds from now, unless renewed."""
        return await self._change("Renew", lifetime=seconds)

    async def mark(self, name: str) -> None:
        """Keeps what it is at this moment, its memory, programs and disk, to go back to. It counts for its disk limit."""
        await self._machine("Mark", name=name)

    async def revert(self, name: str) -> None:
        """Goes back to a mark, and runs on from there. Commands that were started since are gone."""
        await self._machine("Revert", name=name)

    async def marks(self) -> list[str]:
        """The names of its marks."""
        return w.strings(await self._client._call("Screens/Marks", {"id": self.id}), "names")

    async def console(self) -> str:
        """The end of what it wrote to its serial port, if it is a machine with one."""
        return w.data(await self._client._call("Screens/Console", {"id": self.id}), "text").decode("utf-8", "replace")

    async def power(self, how: str) -> None:
        """Presses a button of the machine: "button", upon which the system may shut down, or "reset"."""
        await self._machine("Power", power=how)

    async def renew(self) -> SandboxInfo:
        """It is in use: moves its idle clock."""
        return await self._change("Renew")

    async def set_network(self, mode: str, allow: Sequence[str | NetworkRule] = ()) -> SandboxInfo:
        """Changes what it may reach: "none", "allow-list" (what ``allow`` names), "mirror-only" or "open".

        When it returns, what the policy does not open is closed, and connections
        there are dead. ``info.network`` has the policy and its generation. Raises
        ``IllegalState`` for a sandbox that was made without a network.
        """
        return await self._change("SetNetwork", network=mode, allow=rules(allow))

    async def egress(self) -> Egress:
        """What it has reached by name on ports 80 and 443 and what it was refused there, while it lives.

        Refusals are events, too: ``network_refused``. Raises ``SandboxGone`` when it has ended.
        """
        return Egress.from_wire(await self._client._call("Sandboxes/Egress", {"id": self.id}))

    async def set_phase(self, name: str) -> SandboxInfo:
        """Moves it to another of the phases it was made with, forwards or where the phase says ``back``.

        When it returns, everything that ran has been killed, and files, network, limits and
        rights of the phase are in force; ``phase`` has its generation. The phase it is in
        changes nothing. Raises ``IllegalState`` where there is no way to it, ``Invalid`` for
        an unknown one. After any other error it stands still between the two
        (``phase.moving``) until the same call succeeds, which the node also tries itself.
        """
        return await self._change("SetPhase", timeout=600.0, name=name)

    @property
    def phase(self) -> PhaseState | None:
        """The phase it was in when it was last heard of (``refresh``); None: it has none."""
        return self.info.phase

    async def delete(self) -> bool:
        """Removes everything but the record. False if it was deleted before."""
        answer = await self._client._call("Sandboxes/Delete", {"id": self.id, "call_id": new_key()}, timeout=120.0)
        return w.boolean(answer, "existed")

    async def pack_diff(self, tag: str = "", *, scrub: Scrub | bool = False, call_id: str = "") -> Packed:
        """Makes a layer of what was changed in it, as the disk is at one moment; it runs on.

        ``tag``, or the digest, is an image then: a sandbox created from it goes on
        from there. ``scrub`` says what to leave out, True everything that has a rule;
        the report lists what was left out and what is in it and looks like a secret.
        The same ``call_id`` again gives the same layer.
        """
        rules = Scrub.all() if scrub is True else scrub or Scrub()
        request = w.drop_empty({"id": self.id, "tag": tag, "call_id": call_id or new_key(), "scrub": rules.wire()})
        return Packed.from_wire(await self._client._call("Sandboxes/Commit", request, timeout=1800.0))

    async def commit(self, tag: str, *, scrub: Scrub | bool = False) -> str:
        """Is ``pack_diff`` with a tag for those who want the digest only."""
        return (await self.pack_diff(tag, scrub=scrub)).digest

    async def grade(self, command: Command, *, paths: Sequence[str] = (), where: str = "fresh", exclude: Sequence[str] = (),
                    files: Mapping[str, bytes | str] | None = None, layers: Sequence[str] = (),
                    env: Mapping[str, str] | None = None, workdir: str = "", user: str = "", timeout: float = 600,
                    network: str = "", allow: Sequence[str | NetworkRule] = (), memory: Size = 0, cpu: float = 0,
                    verify: Sequence[str] = (), call_id: str = "") -> Grade:
        """Grades what was done in it, in a fresh sandbox of the same layers.

        That one gets what this one has at the declared ``paths`` (default: the working
        directory), and nothing else of it; then what only the grader has, ``layers``
        and ``files`` (content by path). ``command`` writes the reward, a JSON number or
        an object with one under "reward", to the file that $DSEC_REWARD names, and
        ends with 0, within ``timeout`` seconds. It runs as a user that nobody else is,
        unless ``user`` says otherwise. This sandbox may run, be paused or stopped.

        ``where="same"`` runs it here, if the programs and libraries that it stands on,
        and what ``verify`` names, are as in the layers.

        A Grade says what was found; an exception, that no grading took place. The same
        ``call_id`` again gives the same grade.
        """
        if timeout <= 0:
            raise ValueError(f"timeout of {timeout} s is not positive")
        content = {p: b.encode() if isinstance(b, str) else bytes(b) for p, b in (files or {}).items()}
        request = w.drop_empty({
            "id": self.id, "call_id": call_id or new_key(), "where": where, "command": argv_of(command, "/bin/sh"), "paths": list(paths),
            "exclude": list(exclude), "layers": list(layers), "env": dict(env or {}), "workdir": workdir, "user": user,
            "timeout": timeout, "network": network, "allow": rules(allow), "verify": list(verify),
            "files": [{"path": p, "data": w.b64(b)} for p, b in content.items()],
            "limits": w.drop_empty({"memory": str(parse_size(memory)) if memory else "", "cpu": cpu})})
        return Grade.from_wire(await self._client._call("Sandboxes/Grade", request, timeout=1800.0))

    async def diff(self, most: int = 0) -> Diff:
        """What its disk differs in from its layers; at most so many paths (0: 100,000)."""
        return await self._client.diff(self.id, most)

    async def _machine(self, method: str, **fields: str) -> None:
        await self._client._call(f"Screens/{method}", {"id": self.id, "call_id": new_key(), **fields}, timeout=600.0)

    async def _change(self, method: str, timeout: float | None = None, **fields: Any) -> SandboxInfo:
        request = w.drop_empty({"id": self.id, "call_id": new_key(), **fields})
        return self._told(await self._client._call(f"Sandboxes/{method}", request, timeout=timeout))


def _exec_spec(argv: list[str], cwd: str, env: Mapping[str, str] | None, user: str, timeout: float) -> Json:
    if timeout < 0:
        raise ValueError(f"timeout of {timeout} s is negative")
    return {"argv": argv, "cwd": cwd, "env": dict(env or {}), "user": user, "timeout": timeout}


def _limits(on_limit: OnLimit, output_limit: Size) -> Json:
    limit = parse_size(output_limit)
    return {"on_limit": "kill" if on_limit == "kill" else "", "head": (limit + 1) // 2, "tail": limit // 2}


async def _within(sub: Sub, sandbox: str, timeout: float) -> Any:
    """The end of a command. The node kills it in time; if even that is not heard of, the outcome is unknown."""
    if not timeout:
        return await asyncio.shield(sub.ended)
    try:
        return await asyncio.wait_for(asyncio.shield(sub.ended), 2 * timeout + 90)
    except asyncio.TimeoutError:
        raise Timeout("exec", sandbox, f"no word of {sub.exec_id} after its deadline") from None
