/* From the forker to a command: see "exec image" in docs/formats/hold.md. */
struct rlim { u32 resource, pad; u64 cur, max; };
struct image {
	u32 magic, size, flags, nsflags;
	u32 uid, gid, ngroups, groups;                 /* groups and all below named …s: offsets */
	u64 bounding, permitted, inheritable, ambient, effective;
	u32 nfilter, filter, nrlimits, rlimits;
	u32 umask, landlock, cwd, oom;                 /* landlock 0: none */
	u32 argv, envp, paths, apparmor;               /* arrays of u64 offsets, 0 ends them; text, 0: none */
	u16 rows, cols, pad2[2];
};
enum { I_NNP = 1, I_PTY = 2, I_FILE = 4, I_NOTICE = 8 }; /* I_FILE: run the descriptor after stdio; I_NOTICE: the filter has a listener */

static char **strings(char *base, u32 off)
{
	u64 *p = (u64 *)(base + off);
	for (u64 *q = p; *q; q++)
		*q += (u64)base;
	return (char **)p;
}

static void terminal(struct image *m, int report)
{
	struct kwinsize w = { m->rows, m->cols, 0, 0 };
	int zero = 0, master, slave;
	long e;
	if ((master = (int)sys4(__NR_openat, AT_FDCWD, "/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK, 0)) < 0)
		die(report, S_PTY, master);
	if ((e = sys3(__NR_ioctl, master, TIOCSPTLCK, &zero)) < 0 || (e = sys3(__NR_ioctl, master, TIOCSWINSZ, &w)) < 0 ||
	    (e = slave = (int)sys3(__NR_ioctl, master, TIOCGPTPEER, O_RDWR | O_NOCTTY)) < 0 ||
	    (e = sys3(__NR_ioctl, slave, TIOCSCTTY, 0)) < 0)
		die(report, S_PTY, e);
	say(report, 0, 0, 0, 0, master, -1);
	for (int i = 0; i < 3; i++)
		sys3(__NR_dup3, slave, i, 0);
}

/* A filter that asks a listener about some calls; the hold gets that. Without one
 * it says itself what the low byte of the question is: it refuses just the same. */
static void filter(struct image *m, char *base, int report)
{
	struct kfilter *f = (struct kfilter *)(base + m->filter);
	struct kfprog prog = { (u16)m->nfilter, f };
	long e = -EINVAL;
	if (m->flags & I_NOTICE)
		e = sys3(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW | SECCOMP_FILTER_FLAG_NEW_LISTENER |
			SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, &prog);
	if (e >= 0) {
		say(report, 0, 0, LISTENER, 0, (int)e, -1);
		sys1(__NR_close, e);
		return;
	}
	for (u32 i = 0; i < m->nfilter; i++)
		if (f[i].code == 6 /* return */ && (f[i].k & SECCOMP_RET_ACTION_FULL) == SECCOMP_RET_USER_NOTIF)
			f[i].k = SECCOMP_RET_ERRNO | (f[i].k & 0xff);
	if ((e = sys3(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &prog)) < 0)
		die(report, S_SECCOMP, e);
}

static void credentials(struct image *m, char *base, int report)
{
	struct __user_cap_header_struct h = { _LINUX_CAPABILITY_VERSION_3, 0 };
	u64 all = m->permitted | m->ambient | 1ul << CAP_SYS_ADMIN | 1ul << CAP_SETPCAP;
	struct __user_cap_data_struct d[2] = { { (u32)all, (u32)all, 0 }, { (u32)(all >> 32), (u32)(all >> 32), 0 } };
	long e;
	for (u32 c = 0; c < 64; c++) {
		e = m->bounding >> c & 1 ? 0 : sys2(__NR_prctl, PR_CAPBSET_DROP, c);
		if (e == -EINVAL)
			break; /* the kernel has no more */
		if (e < 0)
			die(report, S_BOUNDING, e);
	}
	if ((e = sys2(__NR_setgroups, m->ngroups, base + m->groups)) < 0 || (e = sys3(__NR_setresgid, m->gid, m->gid, m->gid)) < 0)
		die(report, S_GROUPS, e);
	sys2(__NR_prctl, PR_SET_KEEPCAPS, 1);
	if ((e = sys3(__NR_setresuid, m->uid, m->uid, m->uid)) < 0)
		die(report, S_UID, e);
	if ((e = sys2(__NR_capset, &h, d)) < 0)
		die(report, S_CAPS, e);
	if (m->flags & I_NNP && (e = sys5(__NR_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) < 0)
		die(report, S_NNP, e);
	if (m->nfilter)
		filter(m, base, report);
	d[0] = (struct __user_cap_data_struct){ (u32)m->effective, (u32)m->permitted, (u32)m->inheritable };
	d[1] = (struct __user_cap_data_struct){ (u32)(m->effective >> 32), (u32)(m->permitted >> 32), (u32)(m->inheritable >> 32) };
	if ((e = sys2(__NR_capset, &h, d)) < 0)
		die(report, S_CAPS, e);
	for (u32 c = 0; c < 64; c++)
		if (m->ambient >> c & 1 && (e = sys5(__NR_prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, c, 0, 0)) < 0)
			die(report, S_CAPS, e);
}

/* What the command may do to files, whoever it becomes: accesses that are handled,
 * then pairs of accesses and a path, no access ends them. A missing path, and one
 * with a link on the way, gives nothing. It comes while the process still has
 * CAP_SYS_ADMIN inside, so that it needs no no_new_privs. */
static void landlock(u64 *r, char *base, int report)
{
	struct open_how how = { .flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS };
	struct { u64 access; i32 parent; } __attribute__((packed)) rule;
	struct stat st;
	long set = sys3(__NR_landlock_create_ruleset, r, 8, 0), e = set, fd;
	for (r++; e >= 0 && *r; r += 2) {
		fd = sys4(__NR_openat2, AT_FDCWD, base + r[1], &how, sizeof how);
		if (fd == -ENOENT || fd == -ENOTDIR || fd == -ELOOP)
			continue;
		if ((e = fd) < 0 || (e = sys4(__NR_newfstatat, fd, "", &st, AT_EMPTY_PATH)) < 0)
			break;
		rule.access = (st.st_mode & 0170000) == 0040000 ? *r : *r & 0x4007; /* of a file: execute, write, read, truncate */
		rule.parent = (i32)fd;
		if (rule.access)
			e = sys4(__NR_landlock_add_rule, set, 1 /* path beneath */, &rule, 0);
		sys1(__NR_close, fd);
	}
	if (e < 0 || (e = sys2(__NR_landlock_restrict_self, set, 0)) < 0)
		die(report, S_LANDLOCK, e);
	sys1(__NR_close, set);
}

/* The last steps of the process that becomes the command. It borrows the memory
 * of its maker, which waits: so it must be a call, and never returns. */
static __attribute__((noinline, noreturn)) void become(struct image *m, char *base, int *fds, int report)
{
	struct rlim *r = (struct rlim *)(base + m->rlimits);
	char **argv = strings(base, m->argv), **envp = strings(base, m->envp), **path = strings(base, m->paths);
	long e, worst = -ENOENT;
	sys0(__NR_setsid);
	sys3(__NR_dup3, report, CTL, O_CLOEXEC);
	report = CTL;
	if (m->flags & I_PTY)
		terminal(m, report);
	else
		for (int i = 0; i < 3; i++)
			if ((e = sys3(__NR_dup3, fds[i], i, 0)) < 0)
				die(report, S_STDIO, e);
	if (m->flags & I_FILE)
		sys3(__NR_dup3, fds[3], PROC, O_CLOEXEC);
	sys3(__NR_close_range, m->flags & I_FILE ? PROC + 1 : CTL + 1, ~0u, 0);
	for (u32 i = 0; i < m->nrlimits; i++, r++)
		if ((e = sys4(__NR_prlimit64, 0, r->resource, &r->cur, 0)) < 0)
			die(report, S_RLIMIT, e);
	sys1(__NR_umask, m->umask);
	if (m->landlock)
		landlock((u64 *)(base + m->landlock), base, report);
	credentials(m, base, report);
	if ((e = sys1(__NR_chdir, base + m->cwd)) < 0)
		die(report, S_CWD, e);
	if (m->flags & I_FILE)
		die(report, S_EXEC, sys5(__NR_execveat, PROC, "", argv, envp, AT_EMPTY_PATH));
	for (; *path; path++) {
		e = sys3(__NR_execve, *path, argv, envp);
		if (e != -ENOENT && e != -ENOTDIR && e != -EACCES)
			die(report, S_EXEC, e);
		if (e == -EACCES)
			worst = e;
	}
	die(report, S_EXEC, worst);
}

/* A process of the machine on its way into a sandbox: it joins the cgroups
 * while it still may, then the namespaces, and makes a child there whose parent
 * is the hold. When that has become the command or has failed, it tells and ends.
 * The image is behind the request, or in the first descriptor. */
static void join(struct request *q, u64 size, int *fds)
{
	char *base = (char *)(q + 1);
	struct clone_args a = { .flags = CLONE_PARENT | CLONE_VM | CLONE_VFORK };
	struct stat st;
	long e = 0, fd;
	if (q->flags & F_MEMFD) {
		e = sys4(__NR_newfstatat, *fds, "", &st, AT_EMPTY_PATH);
		size = (u64)st.st_size;
		base = (char *)SYS(__NR_mmap, 0, size, 3 /* RW */, 2 /* MAP_PRIVATE */, *fds++, 0);
	}
	int report = fds[1];
	struct image *m = (struct image *)base;
	if (e < 0 || (u64)base >= -4095ul || size < sizeof *m || m->magic != 0x32586d49 || m->size != size)
		die(report, S_IMAGE, -EINVAL);
	if (m->oom) {
		fd = sys4(__NR_openat, PROC, "self/oom_score_adj", O_WRONLY | O_CLOEXEC, 0);
		if (fd < 0 || (e = sys3(__NR_write, fd, base + m->oom, length(base + m->oom))) < 0)
			die(report, S_OOM, fd < 0 ? fd : e);
	}
	if (m->apparmor) { /* here, where /proc is the machine's: the child takes it over */
		fd = sys4(__NR_openat, PROC, "self/attr/apparmor/exec", O_WRONLY | O_CLOEXEC, 0);
		if (fd < 0 || (e = sys3(__NR_write, fd, base + m->apparmor, length(base + m->apparmor))) < 0)
			die(report, S_APPARMOR, fd < 0 ? fd : e);
	}
	for (u32 i = 0; i < q->count; i++)
		if ((e = sys3(__NR_write, fds[3 + i], "0", 1)) < 0)
			die(report, S_TASKS, e);
	if ((e = sys2(__NR_setns, fds[0], m->nsflags)) < 0)
		die(report, S_SETNS, e);
	e = sys2(__NR_clone3, &a, sizeof a);
	if (e == 0)
		become(m, base, fds + 3 + q->count, report);
	if (e < 0)
		die(report, S_FORK, e);
	say(report, 0, 0, (int)e, (int)sys0(__NR_getpid), -1, -1);
	sys1(__NR_exit_group, 0);
}

static void start_exec(struct request *q, u64 size, int *fds)
{
	int at = q->flags & F_MEMFD ? 1 : 0;
	struct clone_args a = { .flags = CLONE_PARENT | CLONE_INTO_CGROUP, .cgroup = (u64)fds[at + 2] };
	long pid = sys2(__NR_clone3, &a, sizeof a);
	if (pid == 0)
		join(q, size, fds);
	if (pid < 0)
		say(fds[at + 1], S_CLONE, pid, 0, 0, -1, -1);
}
