package confine

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// childEnv makes the test binary load a profile and then do something else
// than run tests.
const childEnv = "CONFINE_TEST_PROFILE"

func TestMain(m *testing.M) {
	if p := os.Getenv(childEnv); p != "" {
		child(Profile(p))
	}
	os.Exit(m.Run())
}

// child loads the profile into every thread, then runs its arguments as a
// command, or without arguments tries the calls and prints the answers.
func child(p Profile) {
	_ = os.Unsetenv(childEnv)
	prog, err := Program(p, Arch(runtime.GOARCH))
	if err == nil {
		err = load(prog)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(99)
	}
	if len(os.Args) > 1 {
		err := unix.Exec(os.Args[1], os.Args[1:], os.Environ())
		fmt.Fprintln(os.Stderr, "exec", os.Args[1], err)
		os.Exit(99)
	}
	answers := map[uint32]int{}
	for _, nr := range refusedNumbers(p) {
		_, _, e := unix.Syscall6(uintptr(nr), 0, 0, 0, 0, 0, 0)
		answers[nr] = int(e)
	}
	if err := json.NewEncoder(os.Stdout).Encode(answers); err != nil {
		os.Exit(99)
	}
	os.Exit(0)
}

func load(prog []byte) error {
	f := unix.SockFprog{Len: uint16(len(prog) / 8), Filter: (*unix.SockFilter)(unsafe.Pointer(&prog[0]))}
	_, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&f)))
	if e != 0 {
		return os.NewSyscallError("seccomp", e)
	}
	return nil
}

// refusedNumbers are the calls refused whatever their arguments.
func refusedNumbers(p Profile) []uint32 {
	var all []uint32
	m := machines()[Arch(runtime.GOARCH)]
	for name, r := range rulesOf(p) {
		if nr, ok := m.number[name]; ok && r.clauses == nil && !r.otherwise.allow {
			all = append(all, nr)
		}
	}
	return all
}

func under(t *testing.T, p Profile, argv ...string) *exec.Cmd {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("loading a filter without no_new_privs needs root; uid is", os.Getuid())
	}
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		t.Skip("no table for", runtime.GOARCH)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, argv...)
	cmd.Env = append(os.Environ(), childEnv+"="+string(p), "HOME="+t.TempDir())
	cmd.Dir = t.TempDir()
	return cmd
}

func TestKernelAnswersAsExplained(t *testing.T) {
	for _, p := range Profiles {
		out, err := under(t, p).Output()
		if err != nil {
			t.Fatal(err, string(out))
		}
		answers := map[uint32]int{}
		if err := json.Unmarshal(out, &answers); err != nil {
			t.Fatal(err)
		}
		if len(answers) < 40 {
			t.Errorf("only %d calls were tried", len(answers))
		}
		for nr, got := range answers {
			want := int(answerOf(Explain(p, Arch(runtime.GOARCH), nr, [6]uint64{})) & 0xffff)
			if got != want {
				t.Errorf("%s under %s: errno %d, want %d", machines()[Arch(runtime.GOARCH)].name[nr], p, got, want)
			}
		}
	}
}

// tool finds a program or skips.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not installed here: %v", name, err)
	}
	return path
}

func TestToolsWorkUnderBuild(t *testing.T) {
	for _, c := range []struct{ name, tool, script, want string }{
		{"python", "python3", `python3 -c '
import threading, multiprocessing, asyncio, subprocess, tempfile, socket, os, mmap
def f(x): return x*x
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as p: assert p.map(f, [1,2,3]) == [1,4,9]
    t = threading.Thread(target=f, args=(1,)); t.start(); t.join()
    assert subprocess.check_output(["echo","x"]) == b"x\n"
    async def g():
        r, w = await asyncio.open_connection(*s.sockets[0].getsockname()); w.close()
    async def h():
        global s
        s = await asyncio.start_server(lambda r,w: w.close(), "127.0.0.1", 0); await g()
    asyncio.run(h())
    print("ok", os.cpu_count() > 0)'`, "ok True"},
		{"git", "git", `git init -q r && cd r && echo a > f && git add f && git -c user.name=x -c user.email=x@y commit -qm m && git log --oneline | wc -l && git gc -q && git fsck`, "1"},
		{"gcc", "gcc", `printf '#include <stdio.h>\n#include <pthread.h>\nvoid*f(void*p){return p;}int main(){pthread_t t;pthread_create(&t,0,f,0);pthread_join(t,0);puts("ran");}' > a.c && gcc -O2 -pthread a.c -o a && ./a`, "ran"},
		{"tar", "tar", `mkdir d && echo x > d/a && ln -s a d/b && ln d/a d/c && mkfifo d/p && tar -cpf t.tar d && rm -r d && tar -xpf t.tar && cat d/b`, "x"},
		{"make and shell jobs", "make", `printf 'all: a b\na b:\n\t@sleep 0; echo $@ > $@\n' > Makefile && make -s -j4 && cat a b | tr -d '\n'`, "ab"},
		{"chroot", "chroot", `mkdir r && cp "$(command -v busybox)" r/ && chroot r /busybox echo in`, "in"},
		{"go", "go", `HOME=/nonexistent go version | cut -c1-2`, "go"},
		{"perl", "perl", `perl -e 'my $p = fork; exit 0 if !$p; wait; print "ok\n"'`, "ok"},
		{"zstd", "zstd", `head -c 1000000 /dev/zero | zstd -q -T2 | zstd -dq | wc -c`, "1000000"},
		{"dpkg-deb", "dpkg-deb", `mkdir -p p/DEBIAN && printf 'Package: x\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n' > p/DEBIAN/control && dpkg-deb -b p x.deb >/dev/null && dpkg-deb -f x.deb Package`, "x"},
	} {
		t.Run(c.name, func(t *testing.T) {
			tool(t, c.tool)
			out, err := under(t, Build, "/bin/bash", "-c", c.script).CombinedOutput()
			if got := strings.TrimSpace(string(out)); err != nil || !strings.HasPrefix(got, c.want) {
				t.Errorf("%v: %q, want %q", err, got, c.want)
			}
		})
	}
}

func TestSetuidProgramsWorkWithoutNoNewPrivs(t *testing.T) {
	id := tool(t, "id")
	dir := t.TempDir()
	for d := dir; d != "/tmp" && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(id)
	if err != nil {
		t.Fatal(err)
	}
	suid := filepath.Join(dir, "id")
	if err := os.WriteFile(suid, b, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Chmod(suid, unix.S_ISUID|0o755); err != nil {
		t.Fatal(err)
	}
	out, err := under(t, Build, tool(t, "setpriv"), "--reuid=65534", "--clear-groups", suid, "-u").CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "0" {
		t.Errorf("effective uid %q, %v, want 0", out, err)
	}
}

func TestStraceWorksUnderDebugOnly(t *testing.T) {
	strace := tool(t, "strace")
	if out, err := under(t, Debug, strace, "-f", "-e", "trace=execve", "/bin/true").CombinedOutput(); err != nil || !strings.Contains(string(out), "execve") {
		t.Errorf("strace under debug: %v %s", err, out)
	}
	if out, err := under(t, Build, strace, "/bin/true").CombinedOutput(); err == nil {
		t.Errorf("strace under build worked: %s", out)
	}
}

func TestForeignConventionEndsTheProcess(t *testing.T) {
	gcc := tool(t, "gcc")
	dir := t.TempDir()
	src := filepath.Join(dir, "a.c")
	// getpid by the 32-bit entry, as a 64-bit program.
	if err := os.WriteFile(src, []byte("int main(){int r;__asm__ volatile(\"int $0x80\":\"=a\"(r):\"a\"(20));return r==0;}"), 0o644); err != nil {
		t.Fatal(err)
	}
	if runtime.GOARCH != "amd64" {
		t.Skip("only x86 has another entry; this is", runtime.GOARCH)
	}
	exe := filepath.Join(dir, "a")
	if out, err := exec.Command(gcc, "-o", exe, src).CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	cmd := under(t, Build, exe)
	_ = cmd.Run()
	if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signal() != unix.SIGSYS {
		t.Errorf("int 0x80 ended with %v, want SIGSYS", cmd.ProcessState)
	}
}

func TestNewNamespacesAndExoticSocketsAreRefused(t *testing.T) {
	tool(t, "unshare")
	for _, c := range []struct{ script, want string }{
		{"unshare -U true", "not permitted"},
		{"unshare -n true", "not permitted"},
		{`python3 -c 'import socket; socket.socket(38, socket.SOCK_SEQPACKET)'`, "not supported"},
		{`python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'`, "not supported"},
		{`python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)'`, "not supported"},
		{`python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 253)'`, "Permission denied"},
		{`python3 -c 'import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM, 58)'`, "Permission denied"},
		{`python3 -c 'import fcntl; fcntl.fcntl(open("f","w"), 1024, fcntl.F_WRLCK)'`, "Permission denied"},
		{`python3 -c 'import fcntl; fcntl.ioctl(0, 0x5412, b"x")'`, "not permitted"},
		{`python3 -c 'import fcntl; fcntl.ioctl(open("f","w"), 0xc0c0586d, bytes(192))'`, "not permitted"},
	} {
		out, err := under(t, Build, "/bin/bash", "-c", c.script).CombinedOutput()
		if err == nil || !strings.Contains(string(out), c.want) {
			t.Errorf("%s: %v %s, want %q", c.script, err, out, c.want)
		}
	}
}

func BenchmarkLoad(b *testing.B) {
	prog, err := Program(Build, Arch(runtime.GOARCH))
	if err != nil {
		b.Fatal(err)
	}
	if os.Getuid() != 0 {
		b.Skip("needs root; uid is", os.Getuid())
	}
	f := unix.SockFprog{Len: uint16(len(prog) / 8), Filter: (*unix.SockFilter)(unsafe.Pointer(&prog[0]))}
	b.ReportMetric(float64(f.Len), "instructions")
	for range b.N {
		done := make(chan struct{})
		go func() { // the thread is thrown away with its filter
			defer close(done)
			runtime.LockOSThread()
			_, _, _ = unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&f)))
		}()
		<-done
	}
}
