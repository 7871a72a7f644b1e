"""The errors of dsec: one class of exception for each error class of the system.

Decide on the type; the text ("operation object: cause") is for people. Every
exception tells in ``retryable`` whether the same call with the same key may
succeed later without anybody changing anything. libdsec itself has retried
such calls before it raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .types import Result, SandboxResult

__all__ = [
    "AlreadyExists", "Canceled", "CommandBlamed", "CommandFailed", "Conflict", "Corrupt", "DsecError", "ExecTimeout",
    "FileExists", "FileNotFound", "IllegalState", "Internal", "Invalid", "IsADirectory", "NoSpace", "NotADirectory", "NotEnough",
    "NotFound", "OutputLimit", "OutputLimitExceeded", "PermissionDenied", "ResourceExhausted", "SandboxGone",
    "SessionLost", "Timeout", "Unauthenticated", "Unavailable", "Unsupported", "from_class",
]


class DsecError(Exception):
    """Anything that dsec, or the way to it, refuses or breaks.

    ``op`` is what was tried, ``object`` on what, ``cause`` the innermost reason.
    ``retry_after`` is in seconds, 0 if the server did not say. ``index`` is the
    number of the spec in ``create_many``, else None.
    """

    class_: ClassVar[str] = "internal"
    retryable_class: ClassVar[bool] = False

    def __init__(self, op: str, object: str = "", cause: str = "", *, retryable: bool | None = None,
                 retry_after: float = 0.0) -> None:
        text = f"{op} {object}" if object else op
        super().__init__(f"{text}: {cause or self.class_}")
        self.op = op
        self.object = object
        self.cause = cause
        self.retryable = self.retryable_class if retryable is None else retryable
        self.retry_after = retry_after
        self.index: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(kind: type[DsecError], state: dict[str, Any]) -> DsecError:
    """Makes pickling work (results cross process borders in training code)."""
    e = kind.__new__(kind)
    DsecError.__init__(e, state["op"], state["object"], state["cause"])
    e.__dict__.update(state)
    return e


class Invalid(DsecError, ValueError):
    """The request can never succeed as it is."""

    class_ = "invalid"


class NotFound(DsecError):
    """The named object does not exist."""

    class_ = "not_found"


class AlreadyExists(DsecError):
    """The name is taken."""

    class_ = "already_exists"


class Conflict(DsecError):
    """The same idempotency key with other parameters, or a lost race."""

    class_ = "conflict"


class IllegalState(DsecError):
    """The object exists but is not in a state that allows this."""

    class_ = "illegal_state"


class SandboxGone(DsecError):
    """The sandbox ended, or ended during the call.

    ``result`` says how and whose fault it was, where that is known. A command
    that was cut off is in ``exec_result`` with the output it had made.
    """

    class_ = "sandbox_gone"
    result: SandboxResult | None = None
    exec_result: Result | None = None


class Timeout(DsecError, TimeoutError):
    """A deadline passed. The outcome is unknown, not failure."""

    class_ = "timeout"
    retryable_class = True


class ExecTimeout(Timeout):
    """A command ran into its own timeout and was killed with all it started.

    ``result`` holds the partial output. Running it again is the caller's choice.
    If ``result.blame`` is not empty, an error of the platform may be why.
    """

    retryable_class = False

    def __init__(self, sandbox: str, result: Result) -> None:
        super().__init__("exec", sandbox, f"command killed after {result.wall:.3g} s")
        self.result = result


class Canceled(DsecError):
    """The caller went away."""

    class_ = "canceled"


class PermissionDenied(DsecError, PermissionError):
    """The principal, or the user inside the sandbox, may not."""

    class_ = "permission_denied"


class Unauthenticated(DsecError):
    """No valid key."""

    class_ = "unauthenticated"


class ResourceExhausted(DsecError):
    """A quota or budget is used up; later may work."""

    class_ = "resource_exhausted"
    retryable_class = True


class NotEnough(ResourceExhausted):
    """``create_many`` could not make ``min_count`` sandboxes.

    ``made`` is how many there are, ``errors`` why the others are not.
    """

    retryable_class = False

    def __init__(self, min_count: int, made: int, errors: list[DsecError]) -> None:
        first = f"; first error: {errors[0]}" if errors else ""
        super().__init__("create many", "", f"{made} sandboxes made, at least {min_count} wanted{first}")
        self.made = made
        self.errors = errors


class NoSpace(DsecError):
    """A disk limit: that of the sandbox if ``object`` names it."""

    class_ = "no_space"


class OutputLimit(DsecError):
    """A command wrote more than it was allowed to and was killed for it."""

    class_ = "output_limit"


class OutputLimitExceeded(OutputLimit):
    """``on_limit="kill"`` fired; ``result`` holds the kept part.

    If ``result.blame`` is not empty, an error of the platform may be why.
    """

    def __init__(self, sandbox: str, result: Result) -> None:
        total = result.stdout.total + result.stderr.total
        super().__init__("exec", sandbox, f"command killed after {total} bytes of output")
        self.result = result


class Unsupported(DsecError):
    """This tier, kernel or machine cannot; the text says what it needs."""

    class_ = "unsupported"


class Unavailable(DsecError):
    """A part of the platform is away, or cannot be reached."""

    class_ = "unavailable"
    retryable_class = True


class Corrupt(DsecError):
    """Bytes do not match their digest or format."""

    class_ = "corrupt"


class FileNotFound(DsecError, FileNotFoundError):
    """A path inside a sandbox does not exist."""

    class_ = "file_not_found"


class IsADirectory(DsecError, IsADirectoryError):
    """A path inside a sandbox is a directory."""

    class_ = "is_a_directory"


class NotADirectory(DsecError, NotADirectoryError):
    """A path inside a sandbox is no directory."""

    class_ = "not_a_directory"


class FileExists(DsecError, FileExistsError):
    """A path inside a sandbox exists already."""

    class_ = "file_exists"


class Internal(DsecError):
    """A defect of dsec."""


class CommandFailed(DsecError):
    """``check=True`` and the command did not exit with 0; see ``result``."""

    class_ = "command_failed"

    def __init__(self, sandbox: str, result: Result) -> None:
        tail = result.stderr.text.strip().rsplit("\n", 1)[-1][-200:]
        how = f"killed by signal {result.signal}" if result.signal else f"exit code {result.exit_code}"
        if result.oom:
            how += ", out of memory"
        if result.blame:
            how += f", blamed on {result.blame}"
        super().__init__("exec", sandbox, f"{how}: {tail}" if tail else how)
        self.result = result


class CommandBlamed(CommandFailed):
    """``check=True``, the command failed, and an error of the platform may be why (``result.blame``).

    Do not train on it; try again in a new sandbox, with a new key. ``retryable``
    is False: the same key gives the same result.
    """


class SessionLost(DsecError):
    """The shell of a session ended (``exit``, a kill, its timeout)."""

    class_ = "session_lost"


_BY_CLASS: dict[str, type[DsecError]] = {
    c.class_: c
    for c in (Invalid, NotFound, AlreadyExists, Conflict, IllegalState, SandboxGone, Timeout, Canceled,
              PermissionDenied, Unauthenticated, ResourceExhausted, NoSpace, OutputLimit, Unsupported, Unavailable,
              Corrupt, FileNotFound, IsADirectory, NotADirectory, FileExists, Internal)
}


def from_class(class_: str) -> type[DsecError]:
    """The exception of an error class; Internal for one this version does not know."""
    return _BY_CLASS.get(class_, Internal)
