package container

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	goruntime "runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

// compile makes a program of C on this machine.
func compile(t testing.TB, out, source string, flags ...string) {
	t.Helper()
	cmd := exec.Command("gcc", append(flags, "-O1", "-o", out, source)...)
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("gcc: %v: %s", err, b)
	}
}

// withTools is a layer of programs and the libraries the linker loads for them.
func withTools(t testing.TB, programs map[string]string) layer.Local {
	t.Helper()
	return layertest.New(t, func(dir string) error {
		copyTo := func(to, from string, mode os.FileMode) error {
			b, err := os.ReadFile(from)
			if err != nil {
				return err
			}
			to = filepath.Join(dir, to)
			if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, b, 0o755)); err != nil {
				return err
			}
			return os.Chmod(to, mode)
		}
		for to, from := range programs {
			if err := copyTo(to, from, 0o755); err != nil {
				return err
			}
			libs, err := exec.Command("ldd", from).Output()
			if err != nil {
				continue // static
			}
			for f := range strings.FieldsSeq(string(libs)) {
				if strings.HasPrefix(f, "/") {
					if err := copyTo(f, f, 0o755); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
}

// abilities is a layer with /ab, and /su, the same with the setuid bit.
func abilities(t testing.TB) layer.Local {
	t.Helper()
	ab := filepath.Join(t.TempDir(), "ab")
	compile(t, ab, "testdata/abilities.c", "-static", "-Wall", "-Wextra", "-Werror")
	return layertest.New(t, func(dir string) error {
		b, err := os.ReadFile(ab)
		if err != nil {
			return err
		}
		su := filepath.Join(dir, "su")
		return errors.Join(os.WriteFile(filepath.Join(dir, "ab"), b, 0o755), os.WriteFile(su, b, 0o755), unix.Chmod(su, unix.S_ISUID|0o755))
	})
}

func under(p confine.Profile, layers ...layer.Local) func(*runtime.Request) {
	return func(r *runtime.Request) {
		r.Spec.Profile = string(p)
		r.Layers.Layers = append(r.Layers.Layers, layers...)
	}
}

// answers runs a subcommand of /ab as a user and returns what it printed.
func (w *world) answers(t testing.TB, id dsec.SandboxID, user string, args ...string) map[string]string {
	t.Helper()
	o := w.run(t, id, process.Spec{Argv: append([]string{"/ab"}, args...), User: user})
	all := map[string]string{}
	for line := range strings.Lines(o.Stdout) {
		name, v, _ := strings.Cut(strings.TrimSpace(line), " ")
		all[name] = v
	}
	if len(all) == 0 {
		t.Errorf("%v said nothing: %q %+v", args, o.Stderr, o.Result)
	}
	return all
}

func wantAnswers(t testing.TB, what string, got map[string]string, want map[string]any) {
	t.Helper()
	for name, v := range want {
		if n, ok := v.(unix.Errno); ok {
			v = int(n)
		}
		if got[name] != fmt.Sprint(v) {
			t.Errorf("%s: %s is %q, want %v", what, name, got[name], v)
		}
	}
}

func TestPwnTracesSniffsAndDumps(t *testing.T) {
	if goruntime.GOARCH != "amd64" {
		t.Skip("the breakpoint is written for amd64; this is", goruntime.GOARCH)
	}
	w := newWorld(t)
	l := abilities(t)
	id := w.create(t, under(confine.Pwn, l))
	for _, user := range []string{"", "user"} {
		wantAnswers(t, "breakpoint as "+user, w.answers(t, id, user, "breakpoint"), map[string]any{"attach": 0, "poke": 0, "hit": 1, "exit": 7})
	}
	wantAnswers(t, "packet", w.answers(t, id, "", "packet"), map[string]any{"packet": 0, "bind": 0, "ring": unix.EPERM, "seen": ""})
	wantAnswers(t, "packet as user", w.answers(t, id, "user", "packet"), map[string]any{"packet": unix.EPERM})
	wantAnswers(t, "raw", w.answers(t, id, "", "raw"), map[string]any{"raw": 0})
	w.want(t, id, "ping -c 1 -W 5 127.0.0.1 | grep -c 'seq=0'; setsid ping -c 1 127.0.0.1 >/dev/null && echo up", "1\nup\n")
	if o := w.run(t, id, process.Spec{Argv: []string{"/su", "euid"}, User: "user"}); o.Stdout != "0\n" {
		t.Errorf("setuid: %q %s", o.Stdout, o.Stderr)
	}
	w.want(t, id, `a=$(/ab stack); b=$(/ab stack); test "$a" = "$b" && echo same; /ab crash 2>/dev/null; test $(cat core* | wc -c) -gt 4096 && echo dumped`, "same\ndumped\n")
	build := w.create(t, under(confine.Build, l))
	wantAnswers(t, "build", w.answers(t, build, "", "breakpoint"), map[string]any{"attach": unix.EPERM})
	wantAnswers(t, "build", w.answers(t, build, "", "packet"), map[string]any{"packet": unix.EAFNOSUPPORT})
	wantAnswers(t, "build", w.answers(t, build, "", "raw"), map[string]any{"raw": unix.EACCES})
	w.want(t, build, "/ab crash 2>/dev/null; test -e core && echo dumped; echo end", "end\n")
}

func TestDebuggersAndSanitizersRun(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	src := filepath.Join(dir, "a.c")
	must(t, os.WriteFile(src, []byte(`#include <stdlib.h>
#include <stdio.h>
int shared = 41;
void stop(int n) { shared += n; }
int main(int argc, char **argv) {
	volatile char *p = malloc(8);
	stop(argc);
	printf("%d\n", shared);
	if (argc > 1) p[8] = 1;
	free((void *)p);
	return 0;
}
`), 0o644))
	plain, asan := filepath.Join(dir, "plain"), filepath.Join(dir, "asan")
	compile(t, plain, src, "-g", "-fno-inline")
	compile(t, asan, src, "-g", "-fsanitize=address", "-static-libasan")
	programs := map[string]string{"plain": plain, "asan": asan}
	for _, tool := range []string{"gdb", "strace"} {
		p, err := exec.LookPath(tool)
		if err != nil {
			t.Skip(err)
		}
		programs["bin/"+tool] = p
	}
	l := withTools(t, programs)
	for _, p := range []confine.Profile{confine.Debug, confine.Pwn} {
		id := w.create(t, under(p, l))
		o := w.sh(t, id, "gdb -nx -batch -ex 'break stop' -ex run -ex 'print shared + n' -ex finish -ex continue /plain 2>&1")
		if !strings.Contains(o.Stdout, "Breakpoint 1, stop") || !strings.Contains(o.Stdout, "$1 = 42") || !strings.Contains(o.Stdout, "exited normally") {
			t.Errorf("gdb under %s: %s%s", p, o.Stdout, o.Stderr)
		}
		o = w.sh(t, id, "strace -f -e trace=execve,write sh -c '/plain; true' 2>&1")
		if !strings.Contains(o.Stdout, `execve("/plain"`) || !strings.Contains(o.Stdout, `write(1, "42\n"`) {
			t.Errorf("strace under %s: %s%s", p, o.Stdout, o.Stderr)
		}
		w.want(t, id, "/asan", "42\n") // its leak checker traces
	}
	id := w.create(t, under(confine.Build, l))
	w.want(t, id, "ASAN_OPTIONS=detect_leaks=0 /asan", "42\n")
	if o := w.sh(t, id, "ASAN_OPTIONS=detect_leaks=0 /asan x"); !strings.Contains(o.Stderr, "heap-buffer-overflow") || o.ExitCode == 0 {
		t.Errorf("ASan under build: %q %q %d", o.Stdout, o.Stderr, o.ExitCode)
	}
}

// roadsClosed are the answers of a process that has all rights over namespaces
// of its own.
var roadsClosed = map[string]any{"mount": unix.EPERM, "fsopen": unix.EPERM, "setns": unix.EPERM, "keyctl": unix.ENOSYS, "unshare-mounts": unix.EPERM,
	"netlink": unix.EAFNOSUPPORT, "netfilter": unix.EAFNOSUPPORT, "packet": unix.EAFNOSUPPORT, "tables": unix.EPERM, "link-up": unix.EPERM,
	"ptrace": unix.EPERM, "bpf": unix.EPERM, "hostname": unix.EPERM, "limits": unix.EROFS}

func TestDesktopGivesChromiumItsSandboxAndNoMore(t *testing.T) {
	w := newWorld(t)
	l := abilities(t)
	id := w.create(t, under(confine.Desktop, l))
	for _, user := range []string{"user", ""} {
		got := w.answers(t, id, user, "zygote")
		wantAnswers(t, "zygote as "+user, got, map[string]any{"uid-map": 0, "gid-map": 0, "pid": 1, "renderer": 0, "chroot": 0,
			"outside": unix.ESRCH, "capset": 0, "seccomp": 0, "exit": 0})
		wantAnswers(t, "inside as "+user, got, roadsClosed)
	}
	wantAnswers(t, "without namespaces", w.answers(t, id, "4320", "roads"), map[string]any{"mount": unix.EPERM, "netlink": unix.EAFNOSUPPORT, "tables": unix.EPERM})
	// Of each user, as many as are allowed and not one more.
	most := confine.NestedMax()["max_user_namespaces"]
	for _, user := range []string{"4321", "4322"} {
		if o := w.run(t, id, process.Spec{Argv: []string{"/ab", "many"}, User: user}); o.Stdout != fmt.Sprintf("%d then %d\n", most, unix.ENOSPC) {
			t.Errorf("many as %s: %q %s", user, o.Stdout, o.Stderr)
		}
	}
	build := w.create(t, under(confine.Build, l))
	wantAnswers(t, "build", w.answers(t, build, "user", "zygote"), map[string]any{"clone": unix.EPERM})
}

// A profile that needs more than this tier is refused, and rightly: with its
// filter, the first thing that a container engine does fails all the same.
func TestNestedNeedsAKernelOfItsOwn(t *testing.T) {
	w := newWorld(t)
	_, err := w.r.Create(t.Context(), request(t, under(confine.Nested)))
	if !errors.Is(err, dsec.Unsupported.Err()) || !regexp.MustCompile(`nested.*mounts.*tier container.*fullvm`).MatchString(err.Error()) {
		t.Errorf("%v", err)
	}
	w.wantNothing(t)
	program, err := confine.Program(confine.Nested, confine.Arch(goruntime.GOARCH))
	must(t, err)
	w.r.programs[confine.Build] = program
	id := w.create(t, under(confine.Build, abilities(t)))
	wantAnswers(t, "nested", w.answers(t, id, "", "nested"), map[string]any{"clone": 0, "private": 0, "tmpfs": 0, "proc": unix.EPERM})
}

// allowAll is a filter that says yes to everything.
func allowAll() []byte {
	return []byte{0x06, 0, 0, 0, 0, 0, 0xff, 0x7f}
}

// Where the kernel has AppArmor: its profile is on every command, and holds
// where the filter of system calls does not.
func TestAppArmorHoldsWithoutSeccomp(t *testing.T) {
	w := newWorld(t)
	if w.r.mac.loader == nil {
		if c := w.r.probeAppArmor(t.Context()); c.OK || !strings.Contains(c.Detail, "without it") {
			t.Errorf("%+v", c)
		}
		t.Skip(w.r.mac.why)
	}
	for p := range w.r.programs {
		w.r.programs[p] = allowAll()
	}
	names := map[string]bool{}
	for _, p := range []confine.Profile{confine.Build, confine.Build, confine.Pwn} {
		id := w.create(t, under(p))
		name := w.r.boxes.Reserve(id).record().AppArmor
		if names[name] || !strings.HasPrefix(name, "dsec-"+string(p)+"-") {
			t.Errorf("profile %q after %v", name, names)
		}
		names[name] = true
		for _, user := range []string{"", "user"} {
			o := w.run(t, id, process.Spec{Argv: []string{"cat", "/proc/self/attr/apparmor/current"}, User: user})
			if o.Stdout != name+" (enforce)\n" {
				t.Errorf("as %q: %q %s", user, o.Stdout, o.Stderr)
			}
		}
		w.want(t, id, "ping -c 1 127.0.0.1 >/dev/null 2>&1 && echo raw; echo end", map[bool]string{false: "end\n", true: "raw\nend\n"}[p == confine.Pwn])
		if o := w.sh(t, id, "mount -t tmpfs none /tmp"); o.ExitCode == 0 || !strings.Contains(o.Stderr, "ermission denied") {
			t.Errorf("mount: %q %d", o.Stderr, o.ExitCode)
		}
		w.want(t, id, "sleep 100 & kill $! && wait $!; echo $?", "143\n")
		must(t, w.r.Stop(t.Context(), id, 0))
		wantLoaded(t, w, name, false)
		_, err := w.r.Start(t.Context(), id)
		must(t, err)
		wantLoaded(t, w, name, true)
		w.want(t, id, "cat /proc/self/attr/apparmor/current", name+" (enforce)\n")
	}
	must(t, w.r.Close()) // another agent finds what is loaded, and removes what nobody has
	must(t, w.r.mac.load(t.Context(), "dsec-build-"+fmt.Sprint(w.uidBase/accounts.IDs+999), confine.Build))
	for name := range names {
		must(t, w.r.mac.loader.Remove(name)) // as aa-remove-unknown does
	}
	w.openRuntime(t)
	for _, sb := range w.r.boxes.All() {
		w.want(t, sb.ID, "cat /proc/self/attr/apparmor/current", sb.record().AppArmor+" (enforce)\n")
	}
	left, err := w.r.mac.loader.Loaded("dsec-")
	must(t, err)
	if len(left) != len(names) {
		t.Errorf("loaded %v, want %v", left, names)
	}
	for _, sb := range w.r.boxes.All() {
		must(t, w.r.Destroy(t.Context(), sb.ID))
	}
	if left, err := w.r.mac.loader.Loaded("dsec-"); err != nil || len(left) != 0 {
		t.Errorf("left: %v %v", left, err)
	}
}

func wantLoaded(t testing.TB, w *world, name string, want bool) {
	t.Helper()
	names, err := w.r.mac.loader.Loaded(name)
	if must(t, err); (len(names) > 0) != want {
		t.Errorf("%s is loaded: %v, want %v", name, names, want)
	}
}
