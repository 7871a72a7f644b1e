/* The files of a cell: those that come with a call, and those that go back with its answer. */

enum { MAXGLOBS = 64, MAXPATH = 1024, MAXENTRIES = 20000, MAXDEPTH = 32 };

static char *globs[MAXGLOBS];
static u64 files_most;
static char io[65536];

static void must(const char *step, long e)
{
	if (e < 0)
		broken(step, e);
}

/* Files of the call, before anybody of the call is there. Paths are relative and
 * without "..", which the agent has seen to. */
static void put_files(struct reader *r)
{
	for (u32 n = take_u32(r); n; n--) {
		u32 mode = take_u32(r);
		u64 len, size;
		char *path = take_blob(r, &len), *data = take_blob(r, &size);
		for (u64 i = 1; i < len; i++)
			if (path[i] == '/') {
				path[i] = 0;
				if (sys3(__NR_mkdirat, AT_FDCWD, path, 0755) >= 0)
					sys5(__NR_fchownat, AT_FDCWD, path, task_uid, task_gid, 0);
				path[i] = '/';
			}
		long fd = sys4(__NR_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
		if (fd < 0)
			broken("write files", fd);
		for (u64 at = 0; at < size;) {
			long w = sys3(__NR_write, fd, data + at, size - at);
			if (w <= 0)
				broken("write files", w ? w : -ENOSPC);
			at += (u64)w;
		}
		must("write files", sys2(__NR_fchmod, fd, mode & 0777));
		must("write files", sys3(__NR_fchown, fd, task_uid, task_gid));
		sys1(__NR_close, fd);
	}
}

/* A pattern ("*" and "?" stay within a name, "**" does not) against a path, in
 * time of the product of their lengths, whatever both are. */
static int matches(const char *pat, const char *s)
{
	static u8 now[MAXPATH], next[MAXPATH];
	u64 m = length(pat);
	memset(now, 0, m + 1);
	now[0] = 1;
	for (;; s++) {
		for (u64 i = 0; i < m; i++) /* a star may be nothing */
			if (now[i] && pat[i] == '*')
				now[i + 1] = 1;
		if (!*s)
			return now[m];
		memset(next, 0, m + 1);
		for (u64 i = 0; i < m; i++) {
			if (!now[i])
				continue;
			if (pat[i] == '*') {
				int twice = pat[i + 1] == '*' || (i && pat[i - 1] == '*');
				if (*s != '/' || twice)
					next[i] = 1;
			} else if ((pat[i] == '?' && *s != '/') || pat[i] == *s)
				next[i + 1] = 1;
		}
		memcpy(now, next, m + 1);
	}
}

struct kdirent { u64 ino; i64 off; u16 reclen; u8 type; char name[]; };

static u32 entries;
static u64 taken;
static u32 cut; /* files were left out */

static void send_file(int dir, const char *name, const char *path)
{
	struct stat st;
	long fd = sys4(__NR_openat, dir, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0);
	if (fd < 0)
		return;
	if (sys4(__NR_newfstatat, fd, "", &st, AT_EMPTY_PATH) >= 0 && (st.st_mode & 0170000) == 0100000) {
		u64 size = (u64)st.st_size;
		if (size > files_most - taken)
			cut = 1;
		else {
			u32 mode = st.st_mode & 0777;
			taken += size;
			tell('f', &mode, sizeof mode, path, length(path));
			for (long n; size && (n = sys3(__NR_read, fd, io, sizeof io)) > 0; size -= (u64)n)
				tell('d', io, (u64)n, 0, 0);
		}
	}
	sys1(__NR_close, fd);
}

/* Nobody but us is left who could change what is looked at. */
static void gather(int dir, char *path, u64 len, u32 depth)
{
	char buf[8192] __attribute__((aligned(8)));
	for (long n; (n = sys3(__NR_getdents64, dir, buf, sizeof buf)) > 0;)
		for (long at = 0; at < n;) {
			struct kdirent *d = (struct kdirent *)(buf + at);
			at += d->reclen;
			u64 l = length(d->name);
			if (d->name[0] == '.' && (l == 1 || (l == 2 && d->name[1] == '.')))
				continue;
			if (len + l + 2 > MAXPATH || ++entries > MAXENTRIES) {
				cut = 1;
				continue;
			}
			memcpy(path + len, d->name, l + 1);
			if (d->type == 4 /* DIR */ && depth < MAXDEPTH) {
				long sub = sys4(__NR_openat, dir, d->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
				if (sub < 0)
					continue;
				path[len + l] = '/';
				path[len + l + 1] = 0;
				gather((int)sub, path, len + l + 1, depth + 1);
				sys1(__NR_close, sub);
			} else if (d->type == 8 /* REG */)
				for (char **g = globs; *g; g++)
					if (matches(*g, path)) {
						send_file(dir, d->name, path);
						break;
					}
		}
}
