# The interpreter that waits (docs/formats/function.md, "the zygote"). It imports what
# it is told to, says so, and forks one child for each call into the cell that it is
# given. It keeps two rights that no call has: to enter what the server of cells makes.
import array, atexit, builtins, ctypes, gc, json, linecache, os, resource, socket, struct, sys, threading, traceback



def main(setns_number, preload):
    port = socket.socket(fileno=3)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        for name in preload:
            __import__(name)
    except BaseException as e:
        port.send(("import %s: %s: %s" % (name, type(e).__name__, e)).encode()[:4000])
        os._exit(1)
    warm(libc)
    gc.collect()
    gc.freeze()  # what is here is not written to by a child's collector
    port.send(b"R")
    while True:
        word, ancillary, _, _ = port.recvmsg(1, socket.CMSG_SPACE(8 * 4), socket.MSG_CMSG_CLOEXEC)
        if not word:
            os._exit(0)
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data[: len(data) // 4 * 4])
        try:
            enter(libc, fds[0])  # of children only
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            try:
                port.detach()
                run(settle(libc, setns_number, fds))
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(125)  # nothing of this program goes on in a child
        for fd in fds:
            os.close(fd)
        status, cpu, memory = 125 << 8, 0, 0
        if pid > 0:
            _, status, used = os.wait4(pid, 0)
            cpu, memory = int((used.ru_utime + used.ru_stime) * 1e6), used.ru_maxrss
        port.send(struct.pack("=iIQQ", status, 0, cpu, memory))


def warm(libc):
    """Does once what every child does: what that makes, no child has to make again."""
    zero, environment, streams = ctypes.c_ulong(0), dict(os.environ), (sys.stdin, sys.stdout, sys.stderr)
    libc.prctl(3, zero, zero, zero, zero)  # PR_GET_DUMPABLE
    libc.capset, libc.setns, ctypes.create_string_buffer(struct.pack("@HP", 4, 0)), b"".join([bytes(8)])
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    os.environ.clear()
    os.environ.update(environment)
    try:
        call = json.loads(json.dumps({"code": "import sys\nfor i in range(3): print(f'{i}', [i], {i: (i,)}, 'x'.split())\n1/0", "argv": ["a"], "env": {}}))
        open_streams(os.open(os.devnull, os.O_RDWR))
        execute(call)
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
        linecache.cache.clear()
        sys.path[:1] = []


def check(ok):
    if ok != 0:
        raise OSError(ctypes.get_errno(), "enter cell")


def enter(libc, fd):
    check(libc.setns(fd, 0))


def settle(libc, setns_number, fds):
    """Goes into the cell for good: afterwards this process is a task like all others."""
    _, mnt, ipc, net, stdin, stdout, stderr, code = fds
    for fd, to in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, to)
    for fd in (mnt, ipc, net):
        enter(libc, fd)
    os.setsid()
    size = os.fstat(code).st_size
    call = json.loads(os.pread(code, size, 0))
    os.closerange(3, 1 << 16)
    with open("/proc/self/oom_score_adj", "w") as f:
        f.write("900")
    resource.setrlimit(resource.RLIMIT_CPU, (call["cpu"], call["cpu"] + 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    os.umask(0o022)
    os.chdir("/task")
    # No rights any more, none that come back (no_new_privs is set), and no setns.
    zero = ctypes.c_ulong(0)
    check(libc.prctl(47, ctypes.c_ulong(4), zero, zero, zero))  # PR_CAP_AMBIENT, CLEAR_ALL
    check(libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)))
    program = b"".join(struct.pack("=HBBI", *i) for i in (
        (0x20, 0, 0, 0), (0x15, 0, 1, setns_number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)))
    memory = ctypes.create_string_buffer(program)
    prog = struct.pack("@HP", 4, ctypes.addressof(memory))
    check(libc.prctl(22, ctypes.c_ulong(2), ctypes.create_string_buffer(prog), zero, zero))  # PR_SET_SECCOMP, FILTER
    return call


def open_streams(every=None):
    fds = (0, 1, 2) if every is None else (every,) * 3
    sys.stdin = sys.__stdin__ = open(fds[0], "r", encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = open(fds[1], "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = open(fds[2], "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)


def execute(call):
    sys.argv = ["call"] + call["argv"]
    sys.path.insert(0, "/task")
    source = call["code"]
    linecache.cache["<call>"] = (len(source), None, source.splitlines(True), "<call>")
    try:
        exec(compile(source, "<call>", "exec"), {"__name__": "__main__", "__builtins__": builtins})
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except BaseException as e:
        traceback.print_exception(type(e), e, e.__traceback__ and e.__traceback__.tb_next)
        return 1
    return 0


def run(call):
    os.environ.clear()
    os.environ.update(call["env"])
    open_streams()
    status = execute(call)
    try:
        if threading.active_count() > 1:
            threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        status = status or 120
    os._exit(status & 0xFF)


main(int(sys.argv[1]), sys.argv[2:])
