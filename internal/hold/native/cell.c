/*
 * The server of cells: one process of ours in a container of the function tier,
 * its root's user namespace and every right in that, and none of anybody's code.
 * For each call there is a cell: a PID 1 (cellrun.h) in a pid, mount and ipc
 * namespace that are new, on the root of the container, read-only, with one new
 * tmpfs for all that can be written. It is made before its call comes, and waits.
 * When that PID 1 is reaped, the kernel has ended every process of the call, and
 * what they could change is gone.
 *
 * It hears and tells the agent by the socket that is its stdin; see "the cell
 * socket" in docs/formats/function.md. It trusts the agent and nobody else: what it reads is
 * what the agent wrote, and statuses from the kernel or the zygote.
 */
#include "sys.h"

void *memcpy(void *to, const void *from, u64 n)
{
	char *d = to;
	for (const char *s = from; n--;)
		*d++ = *s++;
	return to;
}

enum { AGENT = 0, ZYGOTE = 10 };
enum { MAGIC = 0x314c4344 /* DCL1 */, K_SETUP = 1, K_CALL = 2, MAXTEXT = 4096, MAXREQ = 128 << 20 };
enum { F_LOOPBACK = 1, F_ZYGOTE = 2, F_OTHER = 4 /* of a call: run by the zygote */ };
enum { NOBODY_ASKED = 3 /* how PID 1 of a cell exits at the end of the agent */ };
enum { SIG_KILL = 9, SIG_CHLD = 17, AT_REC = 0x8000, K_EINTR = 4, K_ECHILD = 10 };
enum { K_POLLIN = 1, K_POLLOUT = 4, K_POLLERR = 8, K_POLLHUP = 16, K_POLLRDHUP = 0x2000 };

struct kpoll { i32 fd; u16 events, revents; };
struct ktime { long sec, nsec; };
struct kusage { struct { long sec, usec; } user, system; long maxrss, rest[13]; };

/* What the agent said once. */
static u32 flags, task_uid, task_gid;
static struct kfprog task_filter, zygote_filter;

static u64 now_us(void)
{
	struct ktime t;
	sys2(__NR_clock_gettime, 1 /* MONOTONIC */, &t);
	return (u64)t.sec * 1000000 + (u64)t.nsec / 1000;
}

static __attribute__((noreturn)) void leave(int code)
{
	for (;;)
		sys1(__NR_exit_group, code);
}

/* read_all is false at the end of the agent. */
static int read_all(void *p, u64 n)
{
	for (char *at = p; n;) {
		long r = sys3(__NR_read, AGENT, at, n);
		if (r == -EINTR)
			continue;
		if (r <= 0)
			return 0;
		at += r;
		n -= (u64)r;
	}
	return 1;
}

static int write_all(int fd, const void *p, u64 n)
{
	for (const char *at = p; n;) {
		long r = sys3(__NR_write, fd, at, n);
		if (r == -EINTR)
			continue;
		if (r <= 0)
			return 0;
		at += r;
		n -= (u64)r;
	}
	return 1;
}

/* A frame to the agent: what it is, its size, and up to two pieces. Without the
 * agent there is nothing to do. */
static void tell(char what, const void *a, u64 na, const void *b, u64 nb)
{
	u32 head[2] = { (u32)what, (u32)(na + nb) };
	if (!write_all(AGENT, head, sizeof head) || !write_all(AGENT, a, na) || !write_all(AGENT, b, nb))
		leave(1);
}

/* Ends with the step that went wrong, and why: an infrastructure error. */
static __attribute__((noreturn)) void broken(const char *step, long e)
{
	i32 n = (i32)-e;
	tell('x', &n, sizeof n, step, length(step));
	leave(1);
}

/* A request, read from its front; whatever is not there reads as nothing. */
struct reader { char *at, *end; };

static u32 take_u32(struct reader *r)
{
	u32 v = 0;
	if (r->end - r->at >= 4) {
		memcpy(&v, r->at, 4);
		r->at += 4;
	} else
		r->at = r->end;
	return v;
}

static u64 take_u64(struct reader *r)
{
	u64 low = take_u32(r);
	return low | (u64)take_u32(r) << 32;
}

/* Bytes with their length before them and a 0 behind them. */
static char *take_blob(struct reader *r, u64 *n)
{
	*n = take_u32(r);
	if ((u64)(r->end - r->at) <= *n)
		broken("read request", -EINVAL);
	char *p = r->at;
	r->at += *n + 1;
	return p;
}

static void *map(u64 n)
{
	return (void *)SYS(__NR_mmap, 0, n, 3 /* RW */, 0x22 /* PRIVATE, ANONYMOUS */, -1, 0);
}

/* The next request of that kind. Its memory stays. */
static int take_request(struct reader *r, u32 kind)
{
	u32 head[2];
	if (!read_all(head, sizeof head))
		return 0;
	if (head[0] != MAGIC || head[1] < 4 || head[1] > MAXREQ)
		broken("read request", -EINVAL);
	char *p = map((u64)head[1]);
	if ((u64)p >= -4095ul)
		broken("read request", (long)p);
	if (!read_all(p, head[1]))
		return 0;
	*r = (struct reader){ p, p + head[1] };
	if (take_u32(r) != kind)
		broken("read request", -EINVAL);
	return 1;
}

static u32 take_list(struct reader *r, char **into, u32 most)
{
	u32 n = take_u32(r);
	u64 size;
	if (n >= most)
		broken("read request", -EINVAL);
	for (u32 i = 0; i < n; i++)
		into[i] = take_blob(r, &size);
	into[n] = 0;
	return n;
}

static long fork_with(u64 more)
{
	struct clone_args a = { .flags = more, .exit_signal = SIG_CHLD };
	return sys2(__NR_clone3, &a, sizeof a);
}

static long wait_for(long pid, i32 *status, struct kusage *u, long options)
{
	long r;
	do
		r = sys4(__NR_wait4, pid, status, options, u);
	while (r == -EINTR);
	return r;
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

static long write_text(const char *path, const char *text)
{
	long fd = sys4(__NR_openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0), e = fd;
	if (fd >= 0) {
		e = sys3(__NR_write, fd, text, length(text));
		sys1(__NR_close, fd);
	}
	return e;
}

/* Whose rights a process of a call has: none, and no way to any. With keep it
 * holds those two for as long as it takes to enter a cell. */
static long become_task(struct kfprog *filter, u64 keep)
{
	struct __user_cap_header_struct h = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct d[2] = { { (u32)keep, (u32)keep, (u32)keep }, { 0, 0, 0 } };
	long e;
	if ((e = sys2(__NR_setgroups, 0, 0)) < 0 || (e = sys3(__NR_setresgid, task_gid, task_gid, task_gid)) < 0)
		return e;
	sys2(__NR_prctl, PR_SET_KEEPCAPS, keep ? 1 : 0);
	if ((e = sys3(__NR_setresuid, task_uid, task_uid, task_uid)) < 0 || (e = sys2(__NR_capset, &h, d)) < 0)
		return e;
	for (u32 c = 0; c < 32; c++)
		if (keep >> c & 1 && (e = sys5(__NR_prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, c, 0, 0)) < 0)
			return e;
	if ((e = sys5(__NR_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) < 0)
		return e;
	return sys3(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, filter);
}

#include "cellfiles.h"
#include "cellrun.h"

/* What every cell sees, made once in a mount namespace of our own: the root of
 * the container with nothing on it that can be written. */
static void make_view(void)
{
	static const char *dirs[] = { "/tmp", "/var", "/var/tmp", "/task" };
	struct mount_attr ro = { .attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID };
	long e = sys1(__NR_unshare, CLONE_NEWNS);
	if (e >= 0)
		e = sys5(__NR_mount, 0, "/", 0, K_MS_REC | K_MS_PRIVATE, 0);
	if (e < 0)
		broken("make mount namespace", e);
	for (u32 i = 0; i < sizeof dirs / sizeof *dirs; i++)
		if ((e = sys3(__NR_mkdirat, AT_FDCWD, dirs[i], 0755)) < 0 && e != -EEXIST)
			broken(dirs[i], e);
	sys2(__NR_umount2, "/dev/mqueue", K_MNT_DETACH); /* of this container's, which outlives calls */
	/* Each cell has a /proc of its own, for which the kernel wants to see one here, anywhere:
	 * one that cells cover stands for the container's, whose masks each would copy. */
	if (sys5(__NR_mount, "proc", "/task", "proc", K_MS_WALLED, "subset=pid") >= 0)
		sys2(__NR_umount2, "/proc", K_MNT_DETACH);
	if ((e = sys5(__NR_mount_setattr, AT_FDCWD, "/", AT_REC, &ro, sizeof ro)) < 0)
		broken("make root read-only", e);
	sys1(__NR_chdir, "/");
}

/* The zygote is a program of the image: it may enter what we make and do nothing
 * else that the tasks may not. */
static void start_zygote(char **candidates, char **argv, char **envp)
{
	int pair[2];
	long e = sys4(__NR_socketpair, 1 /* AF_UNIX */, 5 /* SEQPACKET */ | K_SOCK_CLOEXEC, 0, pair), pid;
	char word[MAXTEXT];
	if (e < 0 || (e = pid = fork_with(0)) < 0)
		broken("start zygote", e);
	if (pid == 0) {
		sys3(__NR_dup3, pair[1], 3, 0);
		sys3(__NR_dup3, 1, 0, 0); /* the agent is not its business */
		sys3(__NR_close_range, 4, ~0u, 0);
		sys5(__NR_prctl, PR_SET_PDEATHSIG, SIG_KILL, 0, 0, 0);
		e = become_task(&zygote_filter, 1ul << CAP_SYS_ADMIN | 1ul << CAP_SYS_CHROOT);
		sys5(__NR_prctl, PR_SET_PDEATHSIG, SIG_KILL, 0, 0, 0);
		for (; e >= 0 && *candidates; candidates++)
			sys3(__NR_execve, *candidates, argv, envp);
		leave(127);
	}
	sys3(__NR_dup3, pair[0], ZYGOTE, O_CLOEXEC);
	sys1(__NR_close, pair[0]);
	sys1(__NR_close, pair[1]);
	e = sys3(__NR_read, ZYGOTE, word, sizeof word);
	if (e <= 0)
		broken("start interpreter: it ended, or is not there", e ? e : -ENOENT);
	if (word[0] != 'R') {
		i32 none = 0;
		tell('z', &none, sizeof none, word, (u64)e);
		leave(1);
	}
}

static void set_up(struct reader *r)
{
	static char *candidates[16], *argv[16], *envp[256];
	u64 n;
	flags = take_u32(r);
	task_uid = take_u32(r);
	task_gid = take_u32(r);
	task_filter.filter = take_blob(r, &n);
	task_filter.len = (u16)(n / 8);
	zygote_filter.filter = take_blob(r, &n);
	zygote_filter.len = (u16)(n / 8);
	take_list(r, candidates, 16);
	take_list(r, argv, 16);
	take_list(r, envp, 256);
	make_view();
	if (flags & F_ZYGOTE)
		start_zygote(candidates, argv, envp);
}

/* The next cell, as soon as all is in it that is there before a call; or one that has
 * ended. */
static long make_cell(void)
{
	u64 net = flags & F_LOOPBACK ? CLONE_NEWNET : 0;
	struct ktime pause = { 0, 2000000 };
	int said[2];
	char word;
	long e = sys2(__NR_pipe2, said, O_CLOEXEC), pid;
	if (e < 0)
		broken("make cell", e);
	pid = fork_with(CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | net);
	/* Of networks so many are allowed, and the kernel takes its time to remove old ones. */
	for (int i = 0; pid == -ENOSPC && i < 1000; i++) {
		sys4(__NR_ppoll, 0, 0, &pause, 0);
		pid = fork_with(CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | net);
	}
	if (pid == 0) {
		sys1(__NR_close, said[0]);
		cell(said[1]);
	}
	if (pid < 0)
		broken("make cell", pid);
	sys1(__NR_close, said[1]);
	while (sys3(__NR_read, said[0], &word, 1) == -EINTR)
		;
	sys1(__NR_close, said[0]);
	return pid;
}

/* Calls, one after the other. The last frame of one says how PID 1 of its cell ended;
 * the kernel has ended everything in it by then, and the next cell is there. After one
 * that did not end as it should there is none: nobody knows what is here. */
static __attribute__((noreturn)) void serve(void)
{
	i32 status = -1;
	long pid = make_cell();
	tell('R', 0, 0, 0, 0);
	for (;;) {
		wait_for(pid, &status, 0, 0);
		if (status == NOBODY_ASKED << 8)
			leave(0);
		if (!status)
			pid = make_cell();
		tell('C', &status, sizeof status, 0, 0);
		if (status)
			leave(1);
	}
}

int main_loop(void)
{
	struct ksigaction dfl = { 0 }, ign = { 1, 0, 0, 0 };
	struct reader r;
	for (int sig = 1; sig <= 64; sig++)
		sys4(__NR_rt_sigaction, sig, sig == 13 /* PIPE */ ? &ign : &dfl, 0, 8);
	sys2(__NR_prctl, PR_SET_NAME, "cells");
	sys2(__NR_prctl, PR_SET_DUMPABLE, 0);
	if (!take_request(&r, K_SETUP))
		leave(0);
	set_up(&r); /* its memory stays: the filters are in it */
	serve();
}
