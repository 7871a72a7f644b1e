# Those who were before: each tries to leave something. sys.argv[1] says who.
import array, builtins, ctypes, fcntl, os, resource, signal, socket, subprocess, sys, threading, time

libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"


def daemon(f):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for s in range(1, 65):
                try:
                    signal.signal(s, signal.SIG_IGN)
                except (OSError, ValueError):
                    pass
            f()
            while True:
                time.sleep(60)
        os._exit(0)


def attempt(f, *args):
    try:
        return f(*args)
    except BaseException:
        pass


def put(path):
    with open(path, "w") as f:
        f.write("leak")


def write_everywhere():
    for d in ("/tmp", "/var/tmp", "/dev/shm", "/task", "/", "/etc", "/root", "/usr/bin", "/bin", "/var/spool/cron", "/dev", "/dev/mqueue", "/dev/pts", "/proc", "/proc/1", "/sys", "/run", "/home"):
        attempt(put, d + "/leak")
        attempt(os.mkdir, d + "/leak.d")
        attempt(os.symlink, "/etc/passwd", d + "/leak.l")
        attempt(os.mkfifo, d + "/leak.f")
        attempt(os.mknod, d + "/leak.n", 0o60666, os.makedev(7, 0))


def change_system():
    for p in ("/etc/writable", "/etc/passwd", "/etc/hosts", "/bin/busybox", "/usr/bin/python3"):
        attempt(put, p)
        attempt(os.chmod, p, 0o777)
        attempt(os.utime, p, (1, 1))
        attempt(os.rename, p, p + ".old")
        attempt(os.unlink, p)
        attempt(os.setxattr, p, "user.leak", b"x")
    for p in ("/dev/null", "/dev/zero", "/dev/tty", "/dev/urandom", "/dev/shm", "/tmp", "/var/tmp", "/dev"):
        attempt(os.chmod, p, 0o600)
        attempt(os.chown, p, 65534, 65534)


def ipc():
    for key in (4242, 4243):
        libc.shmat(libc.shmget(key, 1 << 16, 0o1666), None, 0)
        libc.semget(key, 8, 0o1666)
        libc.msgget(key, 0o1666)
    libc.syscall(240 if X86 else 180, b"leak", 0o102, 0o666, None)
    attempt(put, "/dev/shm/sem.leak")


def sockets():
    def hold():
        keep = []
        for make in (lambda: ("\0leak", socket.AF_UNIX), lambda: ("/tmp/leak.sock", socket.AF_UNIX), lambda: (("127.0.0.1", 4242), socket.AF_INET), lambda: (("::1", 4242), socket.AF_INET6)):
            def one():
                a, family = make()
                s = socket.socket(family)
                keep.append(s)
                s.bind(a)
                s.listen()
            attempt(one)
        time.sleep(60)
    daemon(hold)
    attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)
    attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 0)


def in_flight():
    """Descriptors in sockets that are in each other: nobody has them, and they are there."""
    a, b = socket.socketpair(), socket.socketpair()
    for x, y in ((a, b), (b, a)):
        for s in y + (sys.stdout, sys.stderr):
            x[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [s.fileno()]))])


def timers():
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    fd = libc.timerfd_create(1, 0)
    libc.timerfd_settime(fd, 0, (ctypes.c_long * 4)(0, 1000000, 0, 1000000), None)
    daemon(lambda: signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01))


def watches():
    def watch():
        fd = libc.inotify_init()
        for p in (b"/etc/passwd", b"/tmp", b"/task", b"/bin/busybox"):
            libc.inotify_add_watch(fd, p, 0xFFF)
        libc.fanotify_init(0x200, 0)
    watch()
    daemon(watch)


def keys():
    add, ctl = (248, 250) if X86 else (217, 219)
    for ring in (-1, -2, -3, -4, -5):
        libc.syscall(add, b"user", b"leak", b"secret", 6, ring)
    libc.syscall(ctl, 1, b"leak")
    libc.syscall(ctl, 22, os.getuid(), -4)


def mounts():
    for flags in (0x20000, 0x10000000, 0x10020000, 0x40000000, 0x8000000, 0x4000000, 0x20000000, 0x2000000, 0x80):
        libc.unshare(flags)
    for args in ((b"leak", b"/tmp", b"tmpfs", 0, None), (b"/etc", b"/task", None, 4096, None), (None, b"/", None, 32, None), (b"proc", b"/proc", b"proc", 0, None)):
        libc.mount(*args)
    libc.umount2(b"/tmp", 2)
    attempt(os.chroot, "/tmp")
    libc.syscall(155 if X86 else 41, b"/tmp", b"/tmp")
    libc.setns(0, 0)
    for n in ("mnt", "pid", "net", "ipc", "user", "uts"):
        def join():
            libc.setns(os.open("/proc/1/ns/" + n, os.O_RDONLY), 0)
        attempt(join)
    libc.sethostname(b"leak", 4)


def limits():
    for i in range(16):
        attempt(lambda: resource.setrlimit(i, (1, 1)) if i not in (0, 3, 9, 7) else None)
    attempt(os.nice, 19)
    for w in (os.PRIO_PROCESS, os.PRIO_PGRP, os.PRIO_USER):
        attempt(os.setpriority, w, 0, 19)
    attempt(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0))
    attempt(os.sched_setaffinity, 0, {min(os.sched_getaffinity(0))})
    libc.personality(0x0040000)
    os.umask(0)
    attempt(lambda: open("/proc/self/oom_score_adj", "w").write("1000"))
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))


def attack_others():
    for pid in [1, os.getppid(), -1] + [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]:
        if pid in (0, os.getpid()):
            continue
        for s in (signal.SIGSTOP, signal.SIGKILL):
            attempt(os.kill, pid, s)
        libc.ptrace(16, pid, 0, 0)
        attempt(lambda: open("/proc/%d/mem" % pid, "r+b").write(b"leak"))
        attempt(lambda: open("/proc/%d/oom_score_adj" % pid, "w").write("1000"))
        attempt(lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)))
        attempt(lambda: os.listdir("/proc/%d/root/" % pid))
    for fd in range(3, 64):
        attempt(os.write, fd, b"\0" * 64)
        attempt(os.close, fd)
    for p in ("kernel/hostname", "kernel/shmmax", "net/ipv4/ip_forward", "vm/drop_caches", "user/max_user_namespaces"):
        attempt(put, "/proc/sys/" + p)


def fork_bomb():
    def bomb():
        while True:
            attempt(os.fork)
    for _ in range(4):
        daemon(bomb)
    time.sleep(0.02)


def stopped():
    for _ in range(8):
        p = os.fork()
        if p == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)
    if os.fork() == 0:
        os._exit(0)  # a zombie


def files_in_memory():
    fd = os.memfd_create("leak")
    os.write(fd, b"x" * (1 << 20))
    daemon(lambda: None)
    ring = libc.syscall(425, 8, ctypes.create_string_buffer(256))
    uffd = libc.syscall(323 if X86 else 282, 0)
    bpf = libc.syscall(321 if X86 else 280, 0, ctypes.create_string_buffer(128), 128)
    libc.syscall(298 if X86 else 241, ctypes.create_string_buffer(128), 0, -1, -1, 0)
    return fd, ring, uffd, bpf


def locks():
    def hold():
        keep = []
        for p in ("/etc/passwd", "/etc/writable", "/bin/busybox", "/tmp"):
            def one():
                f = os.open(p, os.O_RDONLY)
                keep.append(f)
                fcntl.flock(f, fcntl.LOCK_EX)
                fcntl.fcntl(f, 1024, 0)
            attempt(one)
        time.sleep(60)
    daemon(hold)


def terminals():
    keep = [attempt(os.openpty) for _ in range(16)]
    daemon(lambda: keep)


def fill():
    with open("/tmp/fill", "wb") as f:
        while True:
            f.write(b"x" * (1 << 16))


def flood():
    while True:
        os.write(1, b"leak\n" * 10000)


def crash():
    ctypes.string_at(0)


def interpreter():
    builtins.leak = 1
    builtins.print = lambda *a, **k: None
    sys.modules["leak"] = sys
    sys.path.insert(0, "/tmp")
    sys.setrecursionlimit(99999)
    sys.excepthook = lambda *a: None
    os.environ["LEAK"] = "1"
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    for m in list(sys.modules.values()):
        attempt(setattr, m, "leak", 1)
    os.getcwd = lambda: "leak"


def many_files():
    for i in range(100000):
        open("/tmp/%d" % i, "w").close()


def cron():
    for c in ("crontab -", "at now", "nohup setsid sleep 60 >/dev/null 2>&1 &", "(sleep 60 &) ; trap '' HUP", "mount -t tmpfs x /tmp", "echo x >/var/spool/cron/leak"):
        attempt(subprocess.run, ["/bin/sh", "-c", c], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=5)


WHO = [write_everywhere, change_system, ipc, sockets, in_flight, timers, watches, keys, mounts, limits, attack_others, fork_bomb, stopped,
       files_in_memory, locks, terminals, fill, flood, crash, interpreter, many_files, cron]
if sys.argv[1] == "count":
    sys.stdout.write(str(len(WHO)))
else:
    WHO[int(sys.argv[1])]()
