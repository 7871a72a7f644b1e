/* PID 1 of a cell: it makes the cell, waits for a call, runs what is to be run, one thing after
 * the other, tells the agent what that writes and how it ends, ends all that is left,
 * looks for the files that are wanted, and exits. No code but ours runs in it. */

enum { MAXARGS = 4096 };
enum { R_TIMEOUT = 1, R_STDOUT = 2, R_STDERR = 4, R_NOEXEC = 8 };

struct run {
	u64 wall_us, cpu_s;
	char **candidates, **argv;
	char *input;
	u64 ninput;
	char out, err; /* frames of what it writes */
	int other;     /* the zygote runs it */
};

/* How a run ended; docs/formats/function.md. */
struct result {
	u32 what;     /* 0: compile, 1: the task */
	i32 status;   /* as wait has it; with R_NOEXEC an errno */
	u32 flags, pad;
	u64 wall_us, cpu_us, maxrss_kib;
};

static char *envp[MAXARGS];
static u64 out_most;
static char *payload;
static u64 npayload;
static char *decimal(char *at, u64 v)
{
	char b[20];
	int n = 0;
	do
		b[n++] = (char)('0' + v % 10);
	while (v /= 10);
	while (n)
		*at++ = b[--n];
	return at;
}

/* What may be in all that can be written: that of a call that says nothing else. */
enum { DISK = 64 << 20, INODES = 1 << 16 };

static void mount_disk(u64 how, u64 size, u64 inodes)
{
	char options[96] = "mode=755,size=";
	char *at = decimal(options + length(options), size);
	const char *more = ",nr_inodes=";
	memcpy(at, more, 11);
	*decimal(at + 11, inodes) = 0;
	must("mount /task", sys5(__NR_mount, "cell", "/task", "tmpfs", how | 2 | 4 /* nosuid, nodev */, options));
}

/* All that can be written is one tmpfs. */
static void build(void)
{
	must("mount /proc", sys5(__NR_mount, "proc", "/proc", "proc", K_MS_WALLED, "subset=pid"));
	mount_disk(0, DISK, INODES);
	must("make /tmp", sys3(__NR_mkdirat, AT_FDCWD, "/task/t", 0));
	must("make /dev/shm", sys3(__NR_mkdirat, AT_FDCWD, "/task/s", 0));
	must("make /task", sys3(__NR_mkdirat, AT_FDCWD, "/task/w", 0755));
	must("make /tmp", sys3(__NR_fchmodat, AT_FDCWD, "/task/t", 01777));
	must("make /dev/shm", sys3(__NR_fchmodat, AT_FDCWD, "/task/s", 01777));
	must("make /task", sys5(__NR_fchownat, AT_FDCWD, "/task/w", task_uid, task_gid, 0));
	must("mount /tmp", sys5(__NR_mount, "/task/t", "/tmp", 0, K_MS_BIND, 0));
	must("mount /var/tmp", sys5(__NR_mount, "/task/t", "/var/tmp", 0, K_MS_BIND, 0));
	must("mount /dev/shm", sys5(__NR_mount, "/task/s", "/dev/shm", 0, K_MS_BIND, 0));
	must("mount /task", sys5(__NR_mount, "/task/w", "/task", 0, K_MS_BIND, 0));
	must("enter /task", sys1(__NR_chdir, "/task"));
	if (flags & F_LOOPBACK)
		must("set lo up", lo_up());
}

static long set_limit(u32 what, u64 soft, u64 hard)
{
	u64 v[2] = { soft, hard };
	return sys4(__NR_prlimit64, 0, what, v, 0);
}

static __attribute__((noreturn)) void become(struct run *u, int in, int out, int err, int report)
{
	u64 none = 0;
	long e;
	sys0(__NR_setsid);
	sys4(__NR_rt_sigprocmask, 2 /* SETMASK */, &none, 0, 8);
	struct ksigaction dfl = { 0 };
	sys4(__NR_rt_sigaction, 13, &dfl, 0, 8);
	sys3(__NR_dup3, report, 20, O_CLOEXEC);
	sys3(__NR_dup3, in, 30, 0);
	sys3(__NR_dup3, out, 31, 0);
	sys3(__NR_dup3, err, 32, 0);
	for (int i = 0; i < 3; i++)
		sys3(__NR_dup3, 30 + i, i, 0);
	sys3(__NR_close_range, 3, 19, 0);
	sys3(__NR_close_range, 21, ~0u, 0);
	e = write_text("/proc/self/oom_score_adj", "900");
	if (e >= 0)
		e = set_limit(4 /* CORE */, 1, 1); /* 0 would start a handler outside */
	if (e >= 0)
		e = set_limit(0 /* CPU */, u->cpu_s, u->cpu_s + 1);
	if (e >= 0)
		e = set_limit(7 /* NOFILE */, 4096, 4096);
	sys1(__NR_umask, 022);
	if (e >= 0)
		e = become_task(&task_filter, 0);
	if (e >= 0)
		for (char **c = u->candidates; *c; c++) {
			e = sys3(__NR_execve, *c, u->argv, envp);
			if (e != -ENOENT && e != -ENOTDIR)
				break;
		}
	i32 n = (i32)-e;
	sys3(__NR_write, 20, &n, sizeof n);
	leave(127);
}

/* The ends of a task: its stdin, stdout and stderr; on report whoever becomes it says
 * why it could not; on code a task of the zygote says that it is there, and gets the call. */
struct ends { int in[2], out[2], err[2], report[2], code[2]; };

static struct ends waiting; /* of the task of the zygote that is there before the call */

static void open_ends(struct ends *p)
{
	must("make pipes", sys2(__NR_pipe2, p->in, O_CLOEXEC));
	must("make pipes", sys2(__NR_pipe2, p->out, O_CLOEXEC));
	must("make pipes", sys2(__NR_pipe2, p->err, O_CLOEXEC));
	must("make pipes", sys2(__NR_pipe2, p->report, O_CLOEXEC));
	sys3(__NR_fcntl, p->in[1], 4 /* SETFL */, O_NONBLOCK);
	sys3(__NR_fcntl, p->out[0], 4, O_NONBLOCK);
	sys3(__NR_fcntl, p->err[0], 4, O_NONBLOCK);
}

/* A task of the zygote: it gets the ways in here, and its ends. It is there, and has no
 * rights any more, when it has said so. */
static void ask_zygote(struct ends *p)
{
	static const char *names[] = { "/proc/self/ns/pid", "/proc/self/ns/mnt", "/proc/self/ns/ipc", "/proc/self/ns/net" };
	int fds[8], n = 0;
	must("make pipes", sys4(__NR_socketpair, 1 /* AF_UNIX */, 1 /* STREAM */ | K_SOCK_CLOEXEC, 0, p->code));
	for (; n < 4; n++) {
		long fd = sys4(__NR_openat, AT_FDCWD, names[n], O_RDONLY | O_CLOEXEC, 0);
		must("open cell", fd);
		fds[n] = (int)fd;
	}
	fds[n++] = p->in[0];
	fds[n++] = p->out[1];
	fds[n++] = p->err[1];
	fds[n++] = p->code[1];
	char word = 'G';
	must("ask zygote", send_fds(ZYGOTE, &word, 1, fds, n));
	for (n = 0; n < 4; n++)
		sys1(__NR_close, fds[n]);
	sys1(__NR_close, p->code[1]);
	if (sys3(__NR_read, p->code[0], &word, 1) != 1)
		broken("enter cell", -EPIPE);
}

/* Ends everything in the cell but us and waits for it. What is killed cannot fork
 * any more; again, because who is being born meanwhile may not be seen. */
static void end_all(i32 *main_status, long main)
{
	i32 status;
	struct kusage u;
	for (;;) {
		sys2(__NR_kill, -1, SIG_KILL);
		long r = wait_for(-1, &status, &u, 0);
		if (r < 0)
			return; /* nobody is left */
		if (r == main)
			*main_status = status;
	}
}

static u64 cpu_of(struct kusage *u)
{
	return (u64)(u->user.sec + u->system.sec) * 1000000 + (u64)(u->user.usec + u->system.usec);
}

enum { P_END, P_MORE, P_EMPTY };

/* Reads what is there of a stream. What is over the limit is not told, and ends
 * the run. */
static int pump(int fd, char what, u64 *had, u32 over, struct result *res)
{
	long n = sys3(__NR_read, fd, io, sizeof io);
	if (n == -EAGAIN)
		return P_EMPTY;
	if (n == -EINTR)
		return P_MORE;
	if (n <= 0)
		return P_END;
	u64 room = out_most - *had, take = (u64)n < room ? (u64)n : room;
	if (take)
		tell(what, io, take, 0, 0);
	*had += take;
	if ((u64)n > room)
		res->flags |= over;
	return P_MORE;
}

struct zygote_word { i32 status; u32 pad; u64 cpu_us, maxrss_kib; };

static struct result run(struct run *u, u32 what)
{
	struct result res = { .what = what };
	struct kusage before, after;
	struct zygote_word z = { 0 };
	struct ends own, *p = &own;
	u64 begun, chld = 1ul << (SIG_CHLD - 1), written = 0, had[2] = { 0, 0 };
	long e, main = 0;
	i32 failed = 0;
	int ended = 0, killed = 0;

	if (u->other)
		p = &waiting;
	else
		open_ends(p);
	sys4(__NR_rt_sigprocmask, 0 /* BLOCK */, &chld, 0, 8);
	long sig = sys4(__NR_signalfd4, -1, &chld, 8, O_CLOEXEC | O_NONBLOCK);
	must("watch children", sig);
	sys2(__NR_getrusage, -1 /* CHILDREN */, &before);
	begun = now_us();
	if (u->other) {
		if (!write_all(p->code[0], payload, npayload))
			broken("give call to interpreter", -EPIPE);
		sys1(__NR_close, p->code[0]);
	} else {
		main = fork_with(0);
		if (main == 0)
			become(u, p->in[0], p->out[1], p->err[1], p->report[1]);
		must("fork", main);
	}
	sys1(__NR_close, p->in[0]);
	sys1(__NR_close, p->out[1]);
	sys1(__NR_close, p->err[1]);
	sys1(__NR_close, p->report[1]);
	if (!u->other && sys3(__NR_read, p->report[0], &failed, sizeof failed) == sizeof failed)
		res.flags |= R_NOEXEC;
	if (!u->ninput) {
		sys1(__NR_close, p->in[1]);
		p->in[1] = -1;
	}
	for (int live[2] = { 1, 1 }; !ended;) {
		struct kpoll ev[6] = { { live[0] ? p->out[0] : -1, K_POLLIN, 0 }, { live[1] ? p->err[0] : -1, K_POLLIN, 0 }, { p->in[1], K_POLLOUT, 0 },
			{ (i32)sig, K_POLLIN, 0 }, { AGENT, K_POLLRDHUP, 0 }, { u->other ? ZYGOTE : -1, K_POLLIN, 0 } };
		u64 spent = now_us() - begun, left = spent < u->wall_us ? u->wall_us - spent : 0;
		if (!left && !killed)
			res.flags |= R_TIMEOUT;
		if (res.flags & (R_TIMEOUT | R_STDOUT | R_STDERR)) {
			sys2(__NR_kill, -1, SIG_KILL); /* and again: who is being born may not be seen */
			killed = 1;
			left = 10000;
		}
		struct ktime t = { (long)(left / 1000000), (long)(left % 1000000 * 1000) };
		e = sys5(__NR_ppoll, ev, 6, &t, 0, 8);
		if (e < 0 && e != -EINTR)
			broken("poll", e);
		if (e <= 0)
			continue;
		if (ev[4].revents)
			leave(1); /* nobody waits: the end of PID 1 ends all */
		if (ev[0].revents)
			live[0] = pump(p->out[0], u->out, &had[0], R_STDOUT, &res) != P_END;
		if (ev[1].revents)
			live[1] = pump(p->err[0], u->err, &had[1], R_STDERR, &res) != P_END;
		if (ev[2].revents) {
			e = sys3(__NR_write, p->in[1], u->input + written, u->ninput - written);
			if (e > 0)
				written += (u64)e;
			if (written == u->ninput || (e < 0 && e != -EAGAIN && e != -EINTR)) {
				sys1(__NR_close, p->in[1]);
				p->in[1] = -1;
			}
		}
		if (ev[3].revents) {
			i32 status;
			struct kusage one;
			while (sys3(__NR_read, sig, io, sizeof io) > 0)
				;
			for (long r; (r = wait_for(-1, &status, &one, 1 /* NOHANG */)) > 0;)
				if (r == main) {
					res.status = status;
					ended = 1;
				}
		}
		if (ev[5].revents) {
			e = sys3(__NR_read, ZYGOTE, &z, sizeof z);
			if (e != sizeof z)
				broken("hear zygote", e < 0 ? e : -EPIPE);
			res.status = z.status;
			ended = 1;
		}
	}
	end_all(&res.status, main);
	res.wall_us = now_us() - begun;
	/* All who could write are gone: what is not there now does not come. */
	while (pump(p->out[0], u->out, &had[0], R_STDOUT, &res) == P_MORE)
		;
	while (pump(p->err[0], u->err, &had[1], R_STDERR, &res) == P_MORE)
		;
	sys2(__NR_getrusage, -1, &after);
	res.cpu_us = cpu_of(&after) - cpu_of(&before) + z.cpu_us;
	res.maxrss_kib = (u64)after.maxrss > z.maxrss_kib ? (u64)after.maxrss : z.maxrss_kib;
	if (res.flags & R_NOEXEC)
		res.status = failed;
	sys3(__NR_close_range, ZYGOTE + 1, ~0u, 0);
	for (int fd = 3; fd < ZYGOTE; fd++)
		sys1(__NR_close, fd);
	tell('r', &res, sizeof res, 0, 0);
	return res;
}

static __attribute__((noreturn)) void cell(int ready)
{
	struct reader asked, *r = &asked;
	static char *candidates[2][64], *argv[2][MAXARGS], path[MAXPATH + 8];
	struct run u[2] = { { .out = 'e', .err = 'e' }, { .out = 'o', .err = 'e' } };
	sys5(__NR_prctl, PR_SET_PDEATHSIG, SIG_KILL, 0, 0, 0);
	sys1(__NR_umask, 0);
	build();
	if (flags & F_ZYGOTE) {
		open_ends(&waiting);
		ask_zygote(&waiting);
	}
	sys3(__NR_write, ready, "", 1);
	sys1(__NR_close, ready);
	if (!take_request(r, K_CALL))
		leave(NOBODY_ASKED);
	u32 how = take_u32(r);
	u64 disk, inodes;
	for (int i = 0; i < 2; i++) {
		u[i].wall_us = take_u64(r);
		u[i].cpu_s = take_u64(r);
	}
	out_most = take_u64(r);
	disk = take_u64(r);
	inodes = take_u64(r);
	files_most = take_u64(r);
	for (int i = 0; i < 2; i++) {
		take_list(r, u[i].candidates = candidates[i], 64);
		take_list(r, u[i].argv = argv[i], MAXARGS);
	}
	take_list(r, envp, MAXARGS);
	take_list(r, globs, MAXGLOBS);
	u[1].input = take_blob(r, &u[1].ninput);
	payload = take_blob(r, &npayload);
	u[1].other = !!(how & F_OTHER);
	if (u[1].other != !!(flags & F_ZYGOTE) || (u[1].other && u[0].argv[0]))
		broken("read request", -EINVAL);
	if (disk != DISK || inodes != INODES)
		mount_disk(K_MS_REMOUNT, disk, inodes);
	put_files(r);
	struct result res = { 0 };
	if (u[0].argv[0])
		res = run(&u[0], 0);
	if (!res.flags && !res.status)
		run(&u[1], 1);
	if (globs[0]) {
		long dir = sys4(__NR_openat, AT_FDCWD, "/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
		if (dir >= 0)
			gather((int)dir, path, 0, 0);
	}
	tell('g', &cut, sizeof cut, 0, 0);
	leave(0);
}
