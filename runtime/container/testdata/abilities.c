/*
 * What programs ask of the kernel under the profiles beside "build", one
 * subcommand each. It prints "name errno" lines, 0 for what worked, and needs
 * no library inside.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/if_packet.h>
#include <linux/seccomp.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

static void say(const char *name, long result) { printf("%s %d\n", name, result < 0 ? errno : 0); fflush(stdout); }

static long put(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	long e = fd < 0 ? fd : write(fd, text, strlen(text));
	if (fd >= 0)
		close(fd);
	return e;
}

static long raw_clone(unsigned long flags) { return syscall(SYS_clone, flags, 0, 0, 0, 0); }

static __attribute__((noinline)) void marker(void) { __asm__ volatile("nop" ::: "memory"); }

/* A breakpoint: int3 over the first byte of a function of a stopped child. */
static void breakpoint(void)
{
#ifdef __x86_64__
	struct user_regs_struct r;
	int st;
	pid_t p = fork();
	if (!p) {
		raise(SIGSTOP);
		marker();
		_exit(7);
	}
	waitpid(p, &st, WUNTRACED);
	long e = ptrace(PTRACE_ATTACH, p, 0, 0);
	say("attach", e);
	if (e < 0) {
		kill(p, SIGKILL);
		return;
	}
	waitpid(p, &st, 0);
	long was = ptrace(PTRACE_PEEKTEXT, p, marker, 0);
	say("poke", ptrace(PTRACE_POKETEXT, p, marker, (void *)((was & ~0xffL) | 0xcc)));
	kill(p, SIGCONT);
	do {
		ptrace(PTRACE_CONT, p, 0, 0);
		waitpid(p, &st, 0);
	} while (WIFSTOPPED(st) && WSTOPSIG(st) != SIGTRAP);
	ptrace(PTRACE_GETREGS, p, 0, &r);
	printf("hit %d\n", WIFSTOPPED(st) && r.rip == (unsigned long)marker + 1);
	ptrace(PTRACE_POKETEXT, p, marker, was);
	r.rip = (unsigned long)marker;
	ptrace(PTRACE_SETREGS, p, 0, &r);
	ptrace(PTRACE_DETACH, p, 0, 0);
	waitpid(p, &st, 0);
	printf("exit %d\n", WEXITSTATUS(st));
#endif
}

/* A frame of a datagram that it sends to itself over lo. */
static void packet(void)
{
	char frame[256];
	struct sockaddr_ll at = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = (int)if_nametoindex("lo") };
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(9999), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct tpacket_req ring = { 1 << 20, 64, 2048, 64 * 512 };
	int s = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL)), u = socket(AF_INET, SOCK_DGRAM, 0);
	say("packet", s);
	if (s < 0)
		return;
	say("bind", bind(s, (struct sockaddr *)&at, sizeof at));
	say("ring", setsockopt(s, SOL_PACKET, PACKET_RX_RING, &ring, sizeof ring));
	sendto(u, "in a frame", 10, 0, (struct sockaddr *)&to, sizeof to);
	for (int i = 0; i < 16; i++) {
		long n = recv(s, frame, sizeof frame, 0);
		if (n > 10 && memmem(frame, (size_t)n, "in a frame", 10)) {
			printf("seen\n");
			return;
		}
	}
}

static void raw(void) { say("raw", socket(AF_INET, SOCK_RAW, 253)); }

/* Where the stack is, with randomization off for this process: re-executed once. */
static void stack(char **argv)
{
	int x;
	if (argv[2]) {
		printf("%p\n", (void *)&x);
		return;
	}
	if (personality(ADDR_NO_RANDOMIZE) < 0)
		say("personality", -1);
	execl(argv[0], argv[0], "stack", "again", (char *)0);
}

/* What a process tries with all rights over namespaces of its own. */
static void roads(void)
{
	struct ifreq up = { .ifr_name = "lo", .ifr_flags = IFF_UP };
	char blob[256] = { 0 };
	int s = socket(AF_INET, SOCK_DGRAM, 0), self = open("/proc/self/ns/user", O_RDONLY);
	say("mount", mount("none", "/tmp", "tmpfs", 0, 0));
	say("fsopen", syscall(SYS_fsopen, "tmpfs", 0));
	say("setns", setns(self, 0));
	say("keyctl", syscall(SYS_keyctl, 0, -3, 1));
	say("unshare-mounts", unshare(CLONE_NEWNS));
	say("netlink", socket(AF_NETLINK, SOCK_RAW, 0));
	say("netfilter", socket(AF_NETLINK, SOCK_RAW, 12));
	say("packet", socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL)));
	say("tables", setsockopt(s, 0, 64, blob, sizeof blob));
	say("link-up", ioctl(s, SIOCSIFFLAGS, &up));
	say("ptrace", ptrace(PTRACE_SEIZE, getppid(), 0, 0));
	say("bpf", syscall(SYS_bpf, 0, blob, 64));
	say("hostname", sethostname("x", 1));
	say("limits", put("/proc/sys/user/max_user_namespaces", "100000"));
}

/* What Chromium does for its zygote, and then what an escape would try. */
static void zygote(void)
{
	char map[64];
	int st;
	unsigned uid = getuid(), gid = getgid();
	pid_t p = (pid_t)raw_clone(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | SIGCHLD);
	if (p < 0) {
		say("clone", p);
		return;
	}
	if (p == 0) {
		struct __user_cap_header_struct h = { _LINUX_CAPABILITY_VERSION_3, 0 };
		struct __user_cap_data_struct none[2] = { 0 };
		struct sock_filter ok[] = { BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
		struct sock_fprog prog = { 1, ok };
		put("/proc/self/setgroups", "deny");
		snprintf(map, sizeof map, "%u %u 1\n", uid, uid);
		say("uid-map", put("/proc/self/uid_map", map));
		snprintf(map, sizeof map, "%u %u 1\n", gid, gid);
		say("gid-map", put("/proc/self/gid_map", map));
		printf("pid %d\n", (int)syscall(SYS_getpid));
		fflush(stdout);
		roads();
		pid_t r = (pid_t)raw_clone(CLONE_NEWPID | SIGCHLD);
		say("renderer", r);
		if (r == 0)
			_exit(0);
		waitpid(r, &st, 0);
		pid_t c = (pid_t)raw_clone(CLONE_FS | SIGCHLD);
		if (c == 0)
			_exit(chroot("/proc/self/fdinfo/") || chdir("/") ? errno : 0); /* and with it the directory goes */
		waitpid(c, &st, 0);
		printf("chroot %d\n", WEXITSTATUS(st));
		say("outside", open("/etc/passwd", O_RDONLY));
		say("capset", syscall(SYS_capset, &h, none));
		prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
		say("seccomp", prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog));
		_exit(0);
	}
	waitpid(p, &st, 0);
	printf("exit %d\n", WIFEXITED(st) ? WEXITSTATUS(st) : -WTERMSIG(st));
}

/* As many user namespaces at one time as there may be. */
static void many(void)
{
	int n = 0;
	pid_t p;
	while (n < 2000 && (p = (pid_t)raw_clone(CLONE_NEWUSER | SIGCHLD)) >= 0) {
		if (p == 0) {
			pause();
			_exit(0);
		}
		n++;
	}
	printf("%d then %d\n", n, errno);
	fflush(stdout);
	signal(SIGTERM, SIG_IGN);
	kill(0, SIGTERM);
	while (wait(0) > 0)
		;
}

/* What an engine of containers needs first. */
static void nested(void)
{
	int st;
	pid_t p = (pid_t)raw_clone(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | SIGCHLD);
	if (p == 0) {
		say("private", mount("none", "/", 0, MS_REC | MS_PRIVATE, 0));
		say("tmpfs", mount("none", "/tmp", "tmpfs", 0, 0));
		say("proc", mount("proc", "/tmp", "proc", 0, 0));
		_exit(0);
	}
	say("clone", p);
	waitpid(p, &st, 0);
}

static void listener(void)
{
	struct sock_filter allow[] = { BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
	struct sock_fprog prog = { 1, allow };
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	long fd = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &prog);
	printf("listener %d\n", fd < 0 ? errno : 0);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	if (!strcmp(what, "breakpoint")) breakpoint();
	else if (!strcmp(what, "packet")) packet();
	else if (!strcmp(what, "raw")) raw();
	else if (!strcmp(what, "listener")) listener();
	else if (!strcmp(what, "stack")) stack(argv);
	else if (!strcmp(what, "roads")) roads();
	else if (!strcmp(what, "zygote")) zygote();
	else if (!strcmp(what, "many")) many();
	else if (!strcmp(what, "nested")) nested();
	else if (!strcmp(what, "euid")) printf("%d\n", (int)geteuid());
	else if (!strcmp(what, "crash")) *(volatile int *)0 = 1;
	else return 2;
	return 0;
}
