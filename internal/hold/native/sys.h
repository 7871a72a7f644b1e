/* System calls without a libc, for x86-64 and arm64, and the few structures
 * that the kernel's own headers do not give. */
#define _GNU_SOURCE
#include <asm/ioctls.h>
#include <asm/unistd.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/errno.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long i64;
typedef unsigned long u64;

#ifdef __x86_64__
static inline long sys6(long n, long a, long b, long c, long d, long e, long f)
{
	long r;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	__asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return r;
}
__asm__(".globl _start\n_start:\n xor %ebp,%ebp\n and $-16,%rsp\n call main_loop\n hlt\n");
#else
static inline long sys6(long n, long a, long b, long c, long d, long e, long f)
{
	register long x8 __asm__("x8") = n;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
}
__asm__(".globl _start\n_start:\n mov x29,#0\n mov x30,#0\n bl main_loop\n");
#endif
#define SYS(n, a, b, c, d, e, f) sys6(n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
#define sys0(n) SYS(n, 0, 0, 0, 0, 0, 0)
#define sys1(n, a) SYS(n, a, 0, 0, 0, 0, 0)
#define sys2(n, a, b) SYS(n, a, b, 0, 0, 0, 0)
#define sys3(n, a, b, c) SYS(n, a, b, c, 0, 0, 0)
#define sys4(n, a, b, c, d) SYS(n, a, b, c, d, 0, 0)
#define sys5(n, a, b, c, d, e) SYS(n, a, b, c, d, e, 0)

#define WALLED (MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
enum { K_MS_RDONLY = 1, K_MS_WALLED = 2 | 4 | 8 /* nosuid, nodev, noexec */, K_MS_REMOUNT = 32, K_MS_BIND = 4096 };
enum { K_MS_REC = 16384, K_MS_PRIVATE = 1 << 18, K_MNT_DETACH = 2 };
enum { K_SOCK_CLOEXEC = 02000000, K_IFF_UP = 1, K_SIOCSIFFLAGS = 0x8914, K_CMSG_CLOEXEC = 0x40000000 };

struct kmsghdr { void *name; i32 namelen, pad; void *iov; u64 iovlen; void *control; u64 controllen; u32 flags, pad2; };
struct kiovec { void *base; u64 len; };
struct kcmsg { u64 len; i32 level, type; i32 fds[40]; };
struct kifreq { char name[16]; u16 flags; char rest[22]; };
struct ksigaction { u64 handler, flags, restorer, mask; };
struct kwinsize { u16 rows, cols, x, y; };
struct kfilter { u16 code; u8 jt, jf; u32 k; };
struct kfprog { u16 len; void *filter; };

void *memset(void *p, int c, u64 n)
{
	for (char *q = p; n--;)
		*q++ = (char)c;
	return p;
}

static u64 length(const char *s)
{
	u64 n = 0;
	while (s[n])
		n++;
	return n;
}

static long send_fds(int sock, void *p, u64 n, int *fds, int nfds)
{
	struct kcmsg c = { sizeof(u64) + 8 + 4 * (u64)nfds, 1 /* SOL_SOCKET */, 1 /* SCM_RIGHTS */, { 0 } };
	struct kiovec v = { p, n };
	struct kmsghdr m = { 0, 0, 0, &v, 1, nfds ? &c : 0, nfds ? (c.len + 7) & ~7ul : 0, 0, 0 };
	for (int i = 0; i < nfds; i++)
		c.fds[i] = fds[i];
	return sys3(__NR_sendmsg, sock, &m, 0x4000 /* MSG_NOSIGNAL */);
}

static __attribute__((unused)) long recv_fds(int sock, void *p, u64 n, int *fds, int *nfds)
{
	struct kcmsg c = { 0, 0, 0, { 0 } };
	struct kiovec v = { p, n };
	struct kmsghdr m = { 0, 0, 0, &v, 1, &c, sizeof c, 0, 0 };
	long r;
	do
		r = sys3(__NR_recvmsg, sock, &m, K_CMSG_CLOEXEC);
	while (r == -EINTR);
	*nfds = r < 0 || m.controllen < 16 ? 0 : (int)((c.len - 16) / 4);
	for (int i = 0; i < *nfds; i++)
		fds[i] = c.fds[i];
	return r;
}
