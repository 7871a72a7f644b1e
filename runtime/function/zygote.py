# The interpreter that waits (docs/formats/function.md, "the zygote"). It imports what
# it is told to, says so, and forks one child for each call into the cell that it is
# given, before the call comes. It keeps two rights that no call has: to enter what the server of cells makes.
# It has as little in it as it can: each page that a child writes to is copied for it. That is
# also why its functions have names of their own: to look up an attribute writes to a cache.
import _socket, atexit, builtins, ctypes, gc, os, struct, sys
from os import _exit, chdir, close, closerange, dup2, fork, open as open_file, read, setsid, umask, wait4, write
from resource import RLIMIT_CORE, RLIMIT_CPU, RLIMIT_NOFILE, setrlimit

LIBC = ctypes.CDLL(None, use_errno=True)
setns, prctl, capset = LIBC.setns, LIBC.prctl, LIBC.capset
ZERO = ctypes.c_ulong(0)
MODE_FILTER = ctypes.c_ulong(2)
CLEAR_ALL = ctypes.c_ulong(4)
HEADER, NOTHING = struct.pack("=Ii", 0x20080522, 0), bytes(24)


def last_filter(setns_is, clone_is):
    """A filter that takes away the one system call that the zygote has before others, and to make
    a process that were a child of the zygote, which waits for no other than its own."""
    lines = ((0x20, 0, 0, 0), (0x15, 4, 0, setns_is), (0x15, 0, 2, clone_is),
             (0x20, 0, 0, 16), (0x45, 1, 0, 0x8000),  # CLONE_PARENT
             (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001))
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    return program, ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(program)))


def main(setns_is, clone_is, preload):
    port = _socket.socket(fileno=3)
    try:
        for name in preload:
            __import__(name)
    except BaseException as e:
        port.send(("import %s: %s: %s" % (name, type(e).__name__, e)).encode()[:4000])
        _exit(1)
    make_streams()
    program, filter_ = last_filter(setns_is, clone_is)
    warm()
    port.send(b"R")
    gc.collect()
    gc.freeze()  # what is here is not written to by a child's collector
    while True:
        word, ancillary, _, _ = port.recvmsg(1, 64, _socket.MSG_CMSG_CLOEXEC)
        if not word:
            _exit(0)
        fds = struct.unpack("=8i", ancillary[0][2][:32])
        try:
            check(setns(fds[0], 0))  # of children only
            pid = fork()
        except OSError:
            pid = -1
        if pid == 0:
            try:
                port.detach()
                settle(fds, filter_)
                run(wait())
            except BaseException as e:
                write(2, ("enter cell: %r\n" % e).encode())
            finally:
                _exit(125)  # nothing of this program goes on in a child
        for fd in fds:
            close(fd)
        status, cpu, memory = 125 << 8, 0, 0
        if pid > 0:
            _, status, used = wait4(pid, 0)
            cpu, memory = int((used.ru_utime + used.ru_stime) * 1e6), used.ru_maxrss
        port.send(struct.pack("=iIQQ", status, 0, cpu, memory))


def make_streams():
    """Those of all children: of pipes, as theirs are, which take the place of these."""
    r, w = os.pipe()
    for fd, to in ((r, 0), (w, 1), (w, 2)):
        dup2(fd, to)
    close(r)
    close(w)
    sys.stdin = sys.__stdin__ = open(0, "r", encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)


def warm():
    """Does once what every child does: what that makes, no child has to make again."""
    prctl(3, ZERO, ZERO, ZERO, ZERO)  # PR_GET_DUMPABLE
    out, sys.stdout = sys.stdout, open(os.devnull, "w", encoding="utf-8")
    try:
        for _ in range(2):
            execute(b"import sys\nfor i in range(3): print(f'{i}', [i], {i: (i,)}, sum([i]), 'x'.split())")
            sys.stdout.flush()
    finally:
        sys.stdout.close()
        sys.stdout = out


def space():
    return {"__name__": "__main__", "__builtins__": builtins}


def check(ok):
    if ok != 0:
        raise OSError(ctypes.get_errno(), "enter cell")


def settle(fds, filter_):
    """Goes into the cell for good: afterwards this process is a task like all others."""
    _, mnt, ipc, net, stdin, stdout, stderr, code = fds
    dup2(stdin, 0)
    dup2(stdout, 1)
    dup2(stderr, 2)
    dup2(code, 3)
    check(setns(mnt, 0))
    check(setns(ipc, 0))
    check(setns(net, 0))
    setsid()
    closerange(4, 1 << 16)
    score = open_file("/proc/self/oom_score_adj", os.O_WRONLY)
    write(score, b"900")
    close(score)
    setrlimit(RLIMIT_NOFILE, (4096, 4096))
    setrlimit(RLIMIT_CORE, (1, 1))
    umask(0o022)
    chdir("/task")
    # No rights any more, none that come back (no_new_privs is set), and no setns.
    check(prctl(47, CLEAR_ALL, ZERO, ZERO, ZERO))  # PR_CAP_AMBIENT
    check(capset(HEADER, NOTHING))
    check(prctl(22, MODE_FILTER, filter_, ZERO, ZERO))  # PR_SET_SECCOMP


def wait():
    """Says that it is there, and waits for the call."""
    write(3, b"R")
    parts = []
    while part := read(3, 1 << 20):
        parts.append(part)
    close(3)
    cpu, *call = b"".join(parts).split(b"\0")
    setrlimit(RLIMIT_CPU, (int(cpu), int(cpu) + 1))
    return call


def run(call):
    """What there is: as many arguments as the first says, variables likewise, the code."""
    n = int(call[0])
    sys.argv = ["call"] + [os.fsdecode(a) for a in call[1:n + 1]]
    m = n + 2 + int(call[n + 1])
    for pair in call[n + 2:m]:
        k, _, v = pair.partition(b"=")
        os.environb[k] = v
    sys.path.insert(0, "/task")
    status = execute(call[m])
    try:
        threads = sys.modules.get("threading")
        if threads:
            threads._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        status = status or 120
    _exit(status & 0xFF)


def execute(source):
    try:
        exec(compile(source, "<call>", "exec"), space())
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return (e.code or 0) if -1 << 63 <= (e.code or 0) < 1 << 63 else 255
        sys.stderr.write("%s\n" % (e.code,))
        return 1
    except BaseException as e:
        sys.__excepthook__(type(e), e, e.__traceback__ and e.__traceback__.tb_next)
        return 1
    return 0


main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
