# Prints all that a call can see of those before it; of a place where nobody was it is
# always the same.
import builtins, ctypes, errno, fcntl, glob, json, os, re, resource, signal, socket, stat, sys, threading

libc = ctypes.CDLL(None, use_errno=True)
seen = {}


def note(name, f):
    try:
        seen[name] = f()
    except BaseException as e:
        seen[name] = "%s %s" % (type(e).__name__, getattr(e, "errno", ""))


def listing(top):
    found = []
    for d, dirs, names in os.walk(top):
        dirs[:] = sorted(x for x in dirs if os.path.join(d, x) not in ("/proc", "/sys", "/usr"))
        for n in sorted(dirs + names):
            s = os.lstat(os.path.join(d, n))
            found.append([os.path.join(d, n), s.st_mode, s.st_uid, s.st_size if stat.S_ISREG(s.st_mode) else 0, s.st_nlink])
    return found


def free(call, *args):
    ctypes.set_errno(0)
    return "free" if call(*args) >= 0 else errno.errorcode[ctypes.get_errno()]


def unix(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path)
    return "free"


def locked(path):
    with open(path) as f:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return "free"


note("files", lambda: listing("/"))
note("contents", lambda: {p: open(p, "rb").read().decode() for p in ("/etc/writable", "/etc/passwd", "/etc/group", "/etc/hosts")})
note("times", lambda: [os.stat(p).st_mtime_ns for p in ("/etc/writable", "/bin/busybox", "/var/spool/cron")])
note("processes", lambda: len([p for p in os.listdir("/proc") if p.isdigit()]))
note("mounts", lambda: [re.sub(r"^\d+ \d+ \d+:\d+ ", "", l) for l in open("/proc/self/mountinfo")])
note("shm", lambda: free(libc.shmget, 4242, 4096, 0o3600))
note("sem", lambda: free(libc.semget, 4242, 1, 0o3600))
note("msg", lambda: free(libc.msgget, 4242, 0o3600))
note("first shm", lambda: libc.shmget(0, 4096, 0o1600) & 0xFFFF)
note("mq", lambda: free(libc.syscall, 240 if os.uname().machine == "x86_64" else 180, b"leak", 0o302, 0o600, None))
note("abstract", lambda: unix("\0leak"))
note("socket", lambda: unix("/tmp/leak.sock"))
note("inet", lambda: socket.socket(socket.AF_INET).bind(("127.0.0.1", 4242)))
note("locks", lambda: [locked(p) for p in ("/etc/passwd", "/etc/writable", "/bin/busybox")])
note("limits", lambda: [resource.getrlimit(i) for i in range(16) if i != resource.RLIMIT_CPU])
note("priority", lambda: [os.getpriority(w, 0) for w in (os.PRIO_PROCESS, os.PRIO_PGRP, os.PRIO_USER)])
note("scheduling", lambda: [os.sched_getscheduler(0), len(os.sched_getaffinity(0)), open("/proc/self/oom_score_adj").read()])
note("personality", lambda: libc.personality(0xFFFFFFFF))
note("ids", lambda: [os.getresuid(), os.getresgid(), os.getgroups(), os.getsid(0) == os.getpgid(0)])
note("rights", lambda: [l for l in open("/proc/self/status") if l.startswith(("Cap", "NoNewPrivs", "Seccomp:", "SigBlk", "SigIgn", "SigPnd", "Threads"))])
note("umask", lambda: os.umask(0o22))
note("cwd", os.getcwd)
note("environment", lambda: sorted(os.environ.items()))
note("descriptors", lambda: sorted(int(f) for f in os.listdir("/proc/self/fd"))[:-1])
note("host", lambda: [os.uname().nodename, libc.getpid() > 0])
note("terminals", lambda: os.listdir("/dev/pts"))
note("keys", lambda: free(libc.syscall, 250 if os.uname().machine == "x86_64" else 219, 0, -4, 0))
note("timers", lambda: [signal.getitimer(i) for i in (0, 1, 2)])
note("builtins", lambda: sorted(set(dir(builtins)) - {"__IPYTHON__"}))
note("modules", lambda: sorted(m for m in sys.modules if "leak" in m))
note("path", lambda: sys.path)
note("hooks", lambda: [repr(sys.excepthook)[:25], repr(sys.settrace and sys.gettrace()), repr(print)[:25], threading.active_count(), sys.getrecursionlimit()])
print(json.dumps(seen, indent=0, sort_keys=True))
