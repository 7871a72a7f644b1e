/*
 * The forker, and what it forks: PID 1 of a sandbox, and the process that
 * becomes a command. One thread, no libc, no allocation: joining a user
 * namespace is refused to processes with threads, and a PID 1 that is never
 * exec'd costs nothing to start and keeps an mm that belongs to the initial
 * user namespace, so that nobody inside can trace it.
 *
 * Everything that needs thought is done by the hold (Go), which compiles it to
 * flat binary requests; docs/formats/hold.md describes them. The forker trusts
 * the hold and nobody else: it reads nothing that a sandbox wrote.
 */
#include "sys.h"

enum { CTL = 3, PROC = 4 };        /* descriptors the hold started us with */
enum { MAXFD = 40, MAXMSG = 65536 };

/* Steps that errors name; the order is known to native.go. */
enum {
	S_NONE, S_SETUP, S_CLONE, S_OOM, S_TASKS, S_SETNS, S_FORK, S_IMAGE, S_PTY, S_STDIO, S_RLIMIT,
	S_BOUNDING, S_GROUPS, S_UID, S_NNP, S_SECCOMP, S_CAPS, S_CWD, S_EXEC, S_FSPROC, S_APPARMOR, S_LANDLOCK, S_PLAN
};

/* Hold to forker. Owner is of the user namespace (SPAWN), count of tasks files (EXEC). */
struct request { u32 op, flags, owner, count; };
enum { OP_SPAWN = 1, OP_EXEC = 2 };
enum { F_MEMFD = 1 };                              /* EXEC: the image is the first descriptor */
struct reply { i32 step, err, pid, self; };        /* everybody to hold */
enum { LISTENER = -1 };                            /* pid: the descriptor is the filter's listener */

static char buf[MAXMSG] __attribute__((aligned(16)));

static void say(int sock, int step, long err, int pid, int self, int fd1, int fd2)
{
	struct reply r = { step, (i32)(err < 0 ? -err : err), pid, self };
	int fds[2] = { fd1, fd2 };
	send_fds(sock, &r, sizeof r, fds, fd1 < 0 ? 0 : fd2 < 0 ? 1 : 2);
}

static __attribute__((noreturn)) void die(int sock, int step, long err)
{
	say(sock, step, err, 0, (int)sys0(__NR_getpid), -1, -1);
	for (;;)
		sys1(__NR_exit_group, 127);
}

static void keep_out(void)
{
	sys2(__NR_prctl, PR_SET_DUMPABLE, 0);
	sys2(__NR_prctl, PR_SET_PDEATHSIG, 9);
}

/* What a sandbox uses of limits that the kernel counts for each user, such as
 * inotify instances, is charged to the owner of its user namespace: its own
 * first uid, so that it uses up nobody else's. Capabilities stay as they are;
 * a change of ids resets what is set again here. */
static long own(u32 uid)
{
	long e = sys3(__NR_setresuid, -1, uid, -1);
	keep_out();
	return e;
}

/* Leaves the machine's mounts for a read-only file system with four empty
 * directories, which is all that is ever below the root of a sandbox: three to
 * prepare mounts on, and one to hide directories with. */
static void hide(void)
{
	static const char *dirs[] = { "dev", "proc", "sys", "empty" };
	long fs, m, e;
	own(0);
	sys2(__NR_prctl, PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP);
	if ((e = sys1(__NR_unshare, CLONE_NEWNS)) < 0 ||
	    (e = sys5(__NR_mount, "none", "/", 0, K_MS_REC | K_MS_PRIVATE, 0)) < 0)
		die(CTL, S_SETUP, e);
	fs = sys2(__NR_fsopen, "tmpfs", FSOPEN_CLOEXEC);
	sys5(__NR_fsconfig, fs, FSCONFIG_SET_STRING, "mode", "0555", 0);
	sys5(__NR_fsconfig, fs, FSCONFIG_SET_STRING, "size", "4096", 0);
	if ((e = sys5(__NR_fsconfig, fs, FSCONFIG_CMD_CREATE, 0, 0, 0)) < 0)
		die(CTL, S_SETUP, e);
	m = sys3(__NR_fsmount, fs, FSMOUNT_CLOEXEC, WALLED | MOUNT_ATTR_NOEXEC);
	for (int i = 0; i < 4; i++)
		if ((e = sys3(__NR_mkdirat, m, dirs[i], 0555)) < 0)
			die(CTL, S_SETUP, e);
	if ((e = sys5(__NR_move_mount, m, "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH)) < 0 ||
	    (e = sys1(__NR_fchdir, m)) < 0 || (e = sys2(__NR_pivot_root, ".", ".")) < 0 ||
	    (e = sys2(__NR_umount2, ".", K_MNT_DETACH)) < 0 || (e = sys1(__NR_chdir, "/")) < 0 ||
	    (e = sys5(__NR_mount, 0, "/", 0, K_MS_REMOUNT | K_MS_BIND | K_MS_WALLED | K_MS_RDONLY, 0)) < 0 ||
	    (e = sys5(__NR_mount, 0, "/", 0, K_MS_REMOUNT | K_MS_WALLED | K_MS_RDONLY, "size=4096")) < 0)
		die(CTL, S_SETUP, e);
	sys1(__NR_close, m);
	sys1(__NR_close, fs);
}

/* ---- PID 1 ---- */

static long open_fs(const char *type)
{
	long fs = sys2(__NR_fsopen, type, FSOPEN_CLOEXEC), e;
	if (fs < 0)
		return fs;
	e = sys5(__NR_fsconfig, fs, FSCONFIG_CMD_CREATE, 0, 0, 0);
	return e < 0 ? e : fs;
}

static long find(const char *path, int nolinks)
{
	struct open_how how = { .flags = O_PATH | O_CLOEXEC,
		.resolve = RESOLVE_NO_MAGICLINKS | (nolinks ? RESOLVE_NO_SYMLINKS : 0) };
	return sys4(__NR_openat2, AT_FDCWD, path, &how, sizeof how);
}

static long attach(long m, const char *path, int nolinks)
{
	long t = m < 0 ? m : find(path, nolinks), e;
	if (t < 0)
		return t;
	e = sys5(__NR_move_mount, m, "", t, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
	sys1(__NR_close, t);
	return e;
}

static long again(long dir, const char *path)
{
	return sys3(__NR_open_tree, dir, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH);
}

/* A new file system: data is its type, then "key=value" or "flag" strings. */
static long new_fs(const char *path, char *data, u32 len, u32 attr)
{
	long fs = sys2(__NR_fsopen, data, FSOPEN_CLOEXEC), e = 0, m;
	char *p = data, *end = data + len;
	if (fs < 0)
		return fs;
	for (p += length(p) + 1; p < end && e >= 0; p += length(p) + 1) {
		char *v = p;
		while (*v && *v != '=')
			v++;
		if (!*v) {
			e = sys5(__NR_fsconfig, fs, FSCONFIG_SET_FLAG, p, 0, 0);
			continue;
		}
		*v = 0;
		e = sys5(__NR_fsconfig, fs, FSCONFIG_SET_STRING, p, v + 1, 0);
		p = v + 1;
	}
	if (e >= 0)
		e = sys5(__NR_fsconfig, fs, FSCONFIG_CMD_CREATE, 0, 0, 0);
	if (e >= 0) {
		m = sys3(__NR_fsmount, fs, FSMOUNT_CLOEXEC, attr);
		e = attach(m, path, 0);
		if (m >= 0)
			sys1(__NR_close, m);
	}
	sys1(__NR_close, fs);
	return e;
}

/* Masks and read-only paths are below what we have mounted ourselves, so that
 * nobody else can have put a link there. */
static long cover(long m, const char *path)
{
	return m < 0 ? m : sys5(__NR_move_mount, m, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH);
}

static long read_only(const char *path)
{
	struct mount_attr a = { .attr_set = MOUNT_ATTR_RDONLY };
	long m = again(AT_FDCWD, path), e;
	if (m < 0)
		return m;
	e = sys5(__NR_mount_setattr, m, "", AT_EMPTY_PATH, &a, sizeof a);
	return e < 0 ? e : cover(m, path);
}

/* The sandbox's tmpfs is at /dev: shm stays writable, the rest does not. */
static long dev_shm(void)
{
	struct mount_attr shm = { .attr_set = MOUNT_ATTR_NODEV }, ro = { .attr_set = MOUNT_ATTR_RDONLY };
	long m = again(AT_FDCWD, "/dev/shm"), e = m;
	if (m >= 0 && (e = sys5(__NR_mount_setattr, m, "", AT_EMPTY_PATH, &shm, sizeof shm)) >= 0 && (e = cover(m, "/dev/shm")) >= 0)
		e = sys5(__NR_mount_setattr, AT_FDCWD, "/dev", 0, &ro, sizeof ro);
	return e;
}

static long write_file(const char *path, const char *data, u32 len, long flags)
{
	long fd = sys4(__NR_openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC | flags, 0644), e;
	if (fd < 0)
		return fd;
	e = len ? sys3(__NR_write, fd, data, len) : 0;
	sys1(__NR_close, fd);
	return e;
}

static long lo_up(void)
{
	struct kifreq r = { "lo", K_IFF_UP, { 0 } };
	long s = sys3(__NR_socket, 2 /* AF_INET */, 2 /* SOCK_DGRAM */ | K_SOCK_CLOEXEC, 0), e;
	if (s < 0)
		return s;
	e = sys3(__NR_ioctl, s, K_SIOCSIFFLAGS, &r);
	sys1(__NR_close, s);
	return e;
}

/* What was prepared goes along into the new root, by P_MOVE. */
static const char *prepared[] = { "/dev", "/proc", "/sys" };
static long kept[3];

static long enter_root(long root)
{
	long e;
	for (int i = 0; i < 3; i++)
		kept[i] = sys4(__NR_openat, AT_FDCWD, prepared[i], O_PATH | O_CLOEXEC, 0);
	e = sys5(__NR_move_mount, root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH);
	if (e >= 0 && (e = sys1(__NR_fchdir, root)) >= 0)
		e = sys1(__NR_chroot, ".");
	return e;
}

struct op { u8 kind, flags; u16 fd; u32 attr, len1, len2; };   /* then two strings, padded to 8 */
enum { P_ROOT = 1, P_DIR, P_FILE, P_ATTACH, P_FS, P_MASK, P_READONLY, P_WRITE, P_LO, P_HOSTNAME, P_MOVE, P_SHM };
enum { PF_OPTIONAL = 1, PF_NOLINKS = 2, PF_DIRECTORY = 4 };

static long one_op(struct op *o, char *s1, char *s2, int *fds)
{
	long e;
	switch (o->kind) {
	case P_ROOT: return enter_root(fds[o->fd]);
	case P_DIR:
		e = sys3(__NR_mkdirat, AT_FDCWD, s1, o->attr);
		return e == -EEXIST ? 0 : e;
	case P_FILE:
		e = write_file(s1, "", 0, O_CREAT | O_EXCL);
		return e == -EEXIST ? 0 : e;
	case P_ATTACH: return attach(fds[o->fd], s1, o->flags & PF_NOLINKS);
	case P_FS: return new_fs(s1, s2, o->len2, o->attr);
	case P_MASK: return cover(again(AT_FDCWD, o->flags & PF_DIRECTORY ? "/empty" : "/dev/null"), s1);
	case P_READONLY: return read_only(s1);
	case P_WRITE: return write_file(s1, s2, o->len2 - 1, 0);
	case P_LO: return lo_up();
	case P_HOSTNAME: return sys2(__NR_sethostname, s1, o->len1 - 1);
	case P_SHM: return dev_shm();
	case P_MOVE: return attach(kept[o->attr], s1, 1);
	}
	return -ENOSYS;
}

/* Waits for a plan and runs it. Descriptors are left for close_range. */
static void run_plan(int sock)
{
	static int fds[MAXFD];
	int nfds, i = 0;
	long n = recv_fds(sock, buf, MAXMSG, fds, &nfds), e;
	if (n <= 0)
		sys1(__NR_exit_group, 1); /* the end of the hold, or of the shell */
	for (char *p = buf; p < buf + n; i++) {
		struct op *o = (struct op *)p;
		char *s1 = p + sizeof *o, *s2 = s1 + o->len1;
		e = one_op(o, s1, s2, fds);
		if (e < 0 && !(o->flags & PF_OPTIONAL && (e == -ENOENT || e == -ENOTDIR || e == -ELOOP)))
			die(sock, S_PLAN + i, e);
		p += (sizeof *o + o->len1 + o->len2 + 7) & ~7ul;
	}
}

/* The first message carries the tasks files to join, the second the plan of
 * what needs no root, the third that of the rest. */
static void init(int sock)
{
	static int fds[MAXFD];
	struct __user_cap_data_struct none[2] = { { 0, 0, 0 }, { 0, 0, 0 } };
	struct __user_cap_header_struct hdr = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct ksigaction ign = { 1 /* SIG_IGN: the kernel reaps */, 0, 0, 0 };
	long e, proc;
	int nfds;

	sys4(__NR_rt_sigaction, 17 /* SIGCHLD */, &ign, 0, 8);
	sys2(__NR_prctl, PR_SET_NAME, "init");
	sys1(__NR_umask, 0);
	if (recv_fds(sock, buf, MAXMSG, fds, &nfds) <= 0)
		sys1(__NR_exit_group, 1);
	for (int i = 0; i < nfds; i++)
		if ((e = sys3(__NR_write, fds[i], "0", 1)) < 0)
			die(sock, S_TASKS, e);
	if ((e = sys1(__NR_unshare, CLONE_NEWCGROUP)) < 0)
		die(sock, S_CLONE, e);
	if ((e = sys2(__NR_setgroups, 0, 0)) < 0 || (e = sys3(__NR_setresgid, 0, 0, 0)) < 0 || (e = sys3(__NR_setresuid, 0, 0, 0)) < 0)
		die(sock, S_UID, e);
	keep_out();
	if ((proc = open_fs("proc")) < 0)
		die(sock, S_FSPROC, proc);
	say(sock, 0, 0, 1, 1, (int)proc, -1);
	run_plan(sock);
	sys3(__NR_close_range, sock + 1, ~0u, 0);
	say(sock, 0, 0, 1, 1, -1, -1);
	run_plan(sock);
	sys1(__NR_chdir, "/");
	sys2(__NR_capset, &hdr, none);
	keep_out();
	say(sock, 0, 0, 1, 1, -1, -1);
	sys3(__NR_close_range, 0, ~0u, 0);
	for (;;)
		sys4(__NR_ppoll, 0, 0, 0, 0);
}

#include "exec.h"

static void spawn(struct request *q, int *fds)
{
	int pidfd = -1;
	struct clone_args a = { .flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET |
		CLONE_PARENT | CLONE_PIDFD | CLONE_INTO_CGROUP, .pidfd = (u64)&pidfd, .cgroup = (u64)fds[0] };
	long pid = own(q->owner);
	if (pid >= 0)
		pid = sys2(__NR_clone3, &a, sizeof a);
	if (pid == 0) {
		sys3(__NR_dup3, fds[1], CTL, O_CLOEXEC);
		sys3(__NR_close_range, CTL + 1, ~0u, 0);
		init(CTL);
	}
	own(0);
	say(CTL, pid < 0 ? S_CLONE : 0, pid < 0 ? pid : 0, (int)pid, 0, pid < 0 ? -1 : pidfd, -1);
	if (pidfd >= 0)
		sys1(__NR_close, pidfd);
}

int main_loop(void)
{
	static int fds[MAXFD];
	struct ksigaction dfl = { 0 };
	for (int sig = 1; sig <= 64; sig++) /* whatever who started us ignored */
		sys4(__NR_rt_sigaction, sig, &dfl, 0, 8);
	hide();
	for (;;) {
		int nfds = 0;
		long n = recv_fds(CTL, buf, MAXMSG, fds, &nfds);
		struct request *q = (struct request *)buf;
		if (n < (long)sizeof *q)
			sys1(__NR_exit_group, 0);
		if (q->op == OP_SPAWN)
			spawn(q, fds);
		else
			start_exec(q, (u64)n - sizeof *q, fds);
		for (int i = 0; i < nfds; i++)
			sys1(__NR_close, fds[i]);
	}
}
