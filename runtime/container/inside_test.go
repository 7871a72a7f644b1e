package container

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

// everyPlan runs a test under both mount plans, and with shells made ahead.
func everyPlan(t *testing.T, f func(t *testing.T, w *world)) {
	t.Run("detached", func(t *testing.T) { f(t, newWorld(t)) })
	t.Run("attached", func(t *testing.T) { f(t, newWorld(t, attachedPlan)) })
	t.Run("shells", func(t *testing.T) { f(t, newWorld(t, readyShells)) })
}

func TestCreateExecDestroy(t *testing.T) {
	everyPlan(t, func(t *testing.T, w *world) {
		req := request(t)
		steps, err := w.r.Create(t.Context(), req)
		must(t, err)
		want := 10
		if w.r.mac.loader != nil {
			want++
		}
		if len(steps) != want {
			t.Errorf("steps %v", steps)
		}
		o := w.run(t, req.ID, process.Spec{Argv: []string{"echo", "hello"}})
		if o.Stdout != "hello\n" || o.ExitCode != 0 || o.Status != process.Exited {
			t.Errorf("%+v", o)
		}
		if _, err := w.r.Create(t.Context(), req); err != nil {
			t.Errorf("the same request again: %v", err)
		}
		other := req
		other.Spec.Labels = map[string]string{"other": "x"}
		if _, err := w.r.Create(t.Context(), other); !errors.Is(err, dsec.Conflict.Err()) {
			t.Errorf("another request: %v", err)
		}
		must(t, w.r.Destroy(t.Context(), req.ID))
		must(t, w.r.Destroy(t.Context(), req.ID))
		w.wantNothing(t)
		if _, err := w.r.Exec(t.Context(), req.ID, process.Spec{Argv: []string{"true"}}); !errors.Is(err, dsec.SandboxGone.Err()) {
			t.Errorf("exec after the end: %v", err)
		}
	})
}

func TestB8EnvironmentOfRootAndUser(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, func(r *runtime.Request) { r.Spec.Env = map[string]string{"SPEC": "1"} })
	script := "echo $HOME $USER $PATH $FROM $SPEC $OWN"
	for user, want := range map[string]string{
		"":     "/root root " + accounts.DefaultPath + " image 1 x\n",
		"1000": "/home/user user " + accounts.DefaultPath + " image 1 x\n",
		"user": "/home/user user " + accounts.DefaultPath + " image 1 x\n",
		"4321": "/ 4321 " + accounts.DefaultPath + " image 1 x\n",
	} {
		o := w.run(t, id, process.Spec{Argv: []string{"sh", "-c", script}, User: user, Env: map[string]string{"OWN": "x"}})
		if o.Stdout != want {
			t.Errorf("as %q: %q, want %q", user, o.Stdout, want)
		}
	}
	o := w.run(t, id, process.Spec{Argv: []string{"id"}, User: "user"})
	if o.Stdout != "uid=1000(user) gid=1000(user) groups=1000(user),1234(extra)\n" {
		t.Errorf("id: %q", o.Stdout)
	}
	// A user made inside is one.
	w.want(t, id, "echo 'late:x:2000:2000::/tmp:/bin/sh' >> /etc/passwd", "")
	if o := w.run(t, id, process.Spec{Argv: []string{"id", "-u"}, User: "late"}); o.Stdout != "2000\n" {
		t.Errorf("late user: %q", o.Stdout)
	}
}

func TestB16UnknownUserIsNamed(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	_, err := w.try(id, process.Spec{Argv: []string{"true"}, User: "nonexistent"})
	if err == nil || !strings.Contains(err.Error(), "nonexistent") || errors.Is(err, dsec.Internal.Err()) {
		t.Errorf("%v", err)
	}
	if o := w.run(t, id, process.Spec{Argv: []string{"id", "-u"}, User: "31337"}); o.Stdout != "31337\n" {
		t.Errorf("number without entry: %q", o.Stdout)
	}
	// What the files are, the sandbox decides; reading them is safe.
	for _, script := range []string{"rm /etc/passwd; ln -s /proc/self/mem /etc/passwd", "rm /etc/passwd; mkfifo /etc/passwd 2>/dev/null || ln -s /dev/zero /etc/passwd",
		"rm -f /etc/passwd; mkdir /etc/passwd", "rm -r /etc/passwd; ln -s passwd /etc/passwd"} {
		w.sh(t, id, script)
		if o := w.run(t, id, process.Spec{Argv: []string{"sh", "-c", "echo $HOME"}}); o.Stdout != "/root\n" {
			t.Errorf("after %q: %q", script, o.Stdout)
		}
	}
}

func TestB10MissingDirectoryIsNamed(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	_, err := w.try(id, process.Spec{Argv: []string{"pwd"}, Cwd: "/nope"})
	if !errors.Is(err, dsec.FileNotFound.Err()) || !strings.Contains(err.Error(), "/nope") {
		t.Errorf("cwd: %v", err)
	}
	_, err = w.try(id, process.Spec{Argv: []string{"nosuchprogram"}})
	if !errors.Is(err, dsec.FileNotFound.Err()) || !strings.Contains(err.Error(), "nosuchprogram") {
		t.Errorf("program: %v", err)
	}
	_, err = w.try(id, process.Spec{Argv: []string{"/etc/passwd"}})
	if !errors.Is(err, dsec.PermissionDenied.Err()) || !strings.Contains(err.Error(), "/etc/passwd") {
		t.Errorf("no program: %v", err)
	}
}

func TestB11WorkdirIsMadeAlsoWithoutAShell(t *testing.T) {
	w := newWorld(t)
	only := layertest.New(t, func(dir string) error {
		b, err := os.ReadFile("/bin/busybox")
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, "pwd"), b, 0o755)
	})
	id := w.create(t, func(r *runtime.Request) {
		r.Layers.Layers = []layer.Local{only}
		r.Layers.Config = image.Config{Workdir: "/app/deep"}
	})
	o := w.run(t, id, process.Spec{Argv: []string{"/pwd"}})
	if o.Stdout != "/app/deep\n" || o.ExitCode != 0 {
		t.Errorf("%q %q %d", o.Stdout, o.Stderr, o.ExitCode)
	}
}

func TestB18LongHostnameIsShortened(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, func(r *runtime.Request) { r.Spec.Hostname = strings.Repeat("x", 200) })
	name := strings.Repeat("x", 63)
	w.want(t, id, "hostname; cat /etc/hostname; grep -c $(hostname) /etc/hosts", name+"\n"+name+"\n1\n")
	id = w.create(t)
	w.want(t, id, "hostname", string(id)+"\n")
}

func TestA23VisibleCPUsFollowTheLimit(t *testing.T) {
	w := newWorld(t)
	w.want(t, w.create(t, func(r *runtime.Request) { r.Spec.Limits.CPU = 0.5 }), "nproc", "1\n")
	w.want(t, w.create(t, func(r *runtime.Request) { r.Spec.Limits.CPU = 1.5 }), "nproc", "2\n")
}

func TestDevHoldsWhatProgramsNeedAndNoMore(t *testing.T) {
	everyPlan(t, func(t *testing.T, w *world) {
		id := w.create(t)
		w.want(t, id, `cd /dev; echo *
			echo x > null; head -c 4 zero | wc -c; head -c 8 urandom | wc -c; head -c 8 random | wc -c
			{ echo x > full; } 2>/dev/null || echo full
			ls -l null | cut -c1-10; stat -c %u:%g null
			echo hi > shm/a && cat shm/a; echo one | cat fd/0
			{ touch new; } 2>/dev/null || echo read-only; rm -f null 2>/dev/null; test -c null && echo still`,
			"fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero\n4\n8\n8\nfull\ncrw-rw-rw-\n0:0\nhi\none\nread-only\nstill\n")
		if o := w.run(t, id, process.Spec{Argv: []string{"sh", "-c", "tty; test -t 0 && test -c /dev/tty && echo x > /dev/tty"}, PTY: &process.Size{Rows: 24, Cols: 80}}); o.Stdout != "/dev/pts/0\r\nx\r\n" {
			t.Errorf("terminal: %q", o.Stdout)
		}
	})
}

// Trap 1, with the wall of the control group behind that of the mount.
func TestDeviceNodesOpenNothing(t *testing.T) {
	everyPlan(t, func(t *testing.T, w *world) {
		var disk unix.Stat_t
		must(t, unix.Stat("/", &disk))
		hostile := layertest.New(t, func(dir string) error {
			return errors.Join(
				unix.Mknod(dir+"/block", unix.S_IFBLK|0o666, int(disk.Dev)),
				unix.Mknod(dir+"/mem", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 1))),
				unix.Mknod(dir+"/kmsg", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 11))),
				unix.Mknod(dir+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))),
				os.Symlink("../../../../../../etc/shadow", dir+"/up"), os.Symlink("/proc/1/root/etc/shadow", dir+"/pid1"))
		})
		id := w.create(t, func(r *runtime.Request) { r.Layers.Layers = append(r.Layers.Layers, hostile) })
		w.want(t, id, `for f in block mem kmsg null up pid1; do head -c 1 /$f >/dev/null 2>&1 && echo opened $f; done
			mknod /tmp/b b 254 0 2>/dev/null && head -c1 /tmp/b 2>/dev/null && echo opened made
			mknod /dev/shm/b b 254 0 2>/dev/null && head -c1 /dev/shm/b 2>/dev/null && echo opened made in shm
			mount -o remount,dev / 2>/dev/null && echo remounted
			mount -t tmpfs none /tmp 2>/dev/null && echo mounted
			echo done`, "done\n")
	})
}

func TestMaskedAndReadOnlyPaths(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	for _, p := range confine.MaskedPaths() {
		o := w.sh(t, id, fmt.Sprintf("if test -d %[1]s; then ls -A %[1]s; else cat %[1]s; fi 2>/dev/null | head -c 1 | wc -c", p))
		if o.Stdout != "0\n" {
			t.Errorf("%s can be read: %s", p, o.Stdout)
		}
	}
	for _, p := range confine.ReadOnlyPaths() {
		o := w.sh(t, id, fmt.Sprintf("test -e %[1]s || exit 0; test -d %[1]s && exec touch %[1]s/x; echo 1 > %[1]s", p))
		if o.ExitCode == 0 && o.Stderr == "" && w.sh(t, id, "test -e "+p).ExitCode == 0 {
			t.Errorf("%s can be written", p)
		}
	}
	w.want(t, id, "touch /sys/x 2>/dev/null || echo refused; echo 1 > /proc/sys/kernel/panic 2>/dev/null || echo refused; dmesg 2>/dev/null || echo refused",
		"refused\nrefused\nrefused\n")
}

func TestRootInsideIsNobodyOutside(t *testing.T) {
	w := newWorld(t)
	a, b := w.create(t), w.create(t)
	w.want(t, a, "echo secret > /root/f; chmod 600 /root/f; id -u; sed -n 's/  */ /gp' /proc/self/uid_map | wc -l", "0\n1\n")
	first := w.r.boxes.Reserve(a).record().UID
	second := w.r.boxes.Reserve(b).record().UID
	if first == second || first < 1<<28 {
		t.Errorf("uids %d and %d", first, second)
	}
	known, err := w.hold.List(t.Context())
	must(t, err)
	for _, s := range known {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.PID))
		must(t, err)
		uid := w.r.boxes.Reserve(dsec.SandboxID(s.ID)).record().UID
		if !strings.Contains(string(status), fmt.Sprintf("Uid:\t%d\t", uid)) {
			t.Errorf("PID 1 of %s does not run as %d:\n%s", s.ID, uid, status)
		}
	}
	dir, err := w.disks.Open(t.Context(), string(a))
	must(t, err)
	defer dir.Close()
	var st unix.Stat_t
	must(t, unix.Fstatat(int(dir.Fd()), "upper/root/f", &st, 0))
	if st.Uid != first {
		t.Errorf("the file belongs to %d, want %d", st.Uid, first)
	}
}

func TestNamespacesAreTheSandboxsOwn(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	for _, ns := range []string{"user", "mnt", "pid", "ipc", "uts", "net", "cgroup"} {
		ours, err := os.Readlink("/proc/self/ns/" + ns)
		must(t, err)
		o := w.run(t, id, process.Spec{Argv: []string{"readlink", "/proc/self/ns/" + ns}})
		if o.ExitCode != 0 || strings.TrimSpace(o.Stdout) == ours {
			t.Errorf("%s: inside %q, outside %q", ns, o.Stdout, ours)
		}
	}
	w.want(t, id, "test $(ls /proc | grep -c '^[0-9]') -lt 10 && cat /proc/1/comm; ip addr show lo | grep -c 'inet 127.0.0.1'; ip link | grep -c '^[0-9]'; cat /proc/self/cgroup | grep -v '/exec-' | grep -c ':/..' || true", "init\n1\n1\n0\n")
	w.want(t, id, "ls /proc/1/fd 2>/dev/null || echo hidden; cat /proc/1/environ 2>/dev/null || echo hidden; kill -9 1; sleep 0; echo alive", "hidden\nhidden\nalive\n")
}

func TestNetworkDefaultsNeedNoPrivilege(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	o := w.run(t, id, process.Spec{User: "user", Argv: []string{"sh", "-c", "cat /proc/sys/net/ipv4/ping_group_range /proc/sys/net/ipv4/ip_unprivileged_port_start; echo hi | nc -l -p 80 & until nc 127.0.0.1 80 </dev/null; do :; done 2>/dev/null"}})
	if o.Stdout != "0\t65535\n0\nhi\n" {
		t.Errorf("%q %q", o.Stdout, o.Stderr)
	}
}

func TestF23HostMountsOnlyUnderAllowedRoots(t *testing.T) {
	w := newWorld(t)
	allowed := filepath.Join(t.TempDir(), "allowed")
	must(t, os.MkdirAll(filepath.Join(allowed, "data"), 0o755))
	must(t, os.WriteFile(filepath.Join(allowed, "data/f"), []byte("shown"), 0o644))
	must(t, os.Symlink("/etc", filepath.Join(allowed, "link")))
	must(t, os.Mkdir(allowed+"-not", 0o755))
	w.r.cfg.HostMounts = []string{allowed}
	mount := func(src string) func(*runtime.Request) {
		return func(r *runtime.Request) { r.Spec.Mounts = []dsec.HostMount{{Source: src, Target: "/mnt/host"}} }
	}
	id := w.create(t, mount(filepath.Join(allowed, "data")))
	w.want(t, id, "cat /mnt/host/f; touch /mnt/host/g 2>/dev/null || echo read-only; mount -o remount,rw /mnt/host 2>/dev/null || echo refused", "shownread-only\nrefused\n")
	for _, src := range []string{"/", "/etc", "/var/run/docker.sock", allowed + "/link", allowed + "/../..", allowed + "-not", allowed + "/missing"} {
		if _, err := w.r.Create(t.Context(), request(t, mount(src))); !errors.Is(err, dsec.PermissionDenied.Err()) || !strings.Contains(err.Error(), filepath.Base(src)) {
			t.Errorf("%s: %v", src, err)
		}
	}
}

func TestD13_DiskLimitHolds(t *testing.T) {
	for name, options := range map[string][]func(*world){"pool": nil, "a file for each disk": {loopDisks}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, options...)
			id := w.create(t, func(r *runtime.Request) { r.Spec.Limits.Disk = 32 << 20 })
			overfill := func(when string) {
				t.Helper()
				if o := w.sh(t, id, "dd if=/dev/zero of=/big bs=1M count=45"); o.ExitCode == 0 {
					t.Errorf("%s: 45 MiB fit into 32: %s", when, o.Stderr)
				}
				w.want(t, id, "echo alive", "alive\n")
				s, err := w.r.Stats(t.Context(), id)
				must(t, err)
				if s.Disk < 20<<20 || s.Disk > 33<<20 || s.DiskLimit > 32<<20 {
					t.Errorf("%s: %+v", when, s)
				}
			}
			overfill("at first")
			for range 3 { // a later session starts, and is as limited
				must(t, w.r.Stop(t.Context(), id, 0))
				if _, err := w.r.Start(t.Context(), id); err != nil {
					t.Fatal("start on a full disk:", err)
				}
				overfill("after a start")
			}
			w.want(t, id, "rm /big; echo more > /small; cat /small", "more\n")
		})
	}
}

func TestLocaleIsUTF8WhereTheImageHasIt(t *testing.T) {
	w := newWorld(t)
	l := layertest.New(t, func(dir string) error { return os.MkdirAll(dir+"/usr/lib/locale/C.utf8", 0o755) })
	w.want(t, w.create(t), "echo $LANG", "\n")
	w.want(t, w.create(t, func(r *runtime.Request) { r.Layers.Layers = append(r.Layers.Layers, l) }), "echo $LANG", "C.UTF-8\n")
}

func TestKeptOutputIsWithinTheSandboxsLimit(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, func(r *runtime.Request) { r.Spec.Limits.Output = 256 << 10 })
	for range 3 {
		p, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"head", "-c", "1000000", "/dev/zero"}})
		must(t, err)
		_, err = p.Wait(t.Context())
		must(t, err)
		// Not released: what it keeps counts for the next.
	}
	var kept int64
	entries, err := os.ReadDir(w.r.dir(id))
	must(t, err)
	for _, e := range entries {
		i, err := e.Info()
		must(t, err)
		kept += i.Size()
	}
	if kept > 256<<10+6*(2*hold.KeptLeast+16<<10) {
		t.Errorf("%d bytes kept", kept)
	}
}

// TestNoInodeIsShared: what two sandboxes both have open can be locked and
// watched across them, and each watcher slows the others down.
func TestNoInodeIsShared(t *testing.T) {
	everyPlan(t, func(t *testing.T, w *world) {
		script := "for f in /dev /dev/null /dev/zero /dev/tty /dev/shm /dev/pts /dev/mqueue /proc/keys /proc/kcore; do stat -c '%n %d:%i' $f; done"
		var seen []map[string]string
		for range 2 {
			o := w.run(t, w.create(t), process.Spec{Argv: []string{"sh", "-c", script}})
			m := map[string]string{}
			for line := range strings.Lines(o.Stdout) {
				name, inode, _ := strings.Cut(strings.TrimSpace(line), " ")
				m[name] = inode
			}
			if len(m) < 7 {
				t.Fatalf("%q %q", o.Stdout, o.Stderr)
			}
			seen = append(seen, m)
		}
		for name, inode := range seen[0] {
			if seen[1][name] == inode {
				t.Errorf("%s is %s in both", name, inode)
			}
		}
	})
}

// TestRootsThatCannotBeSetUpAreTheImagesFault: a layer that has something else
// where a directory must be is no failure of the platform.
func TestRootsThatCannotBeSetUpAreTheImagesFault(t *testing.T) {
	w := newWorld(t)
	for name, fill := range map[string]func(dir string) error{
		"etc leads nowhere": func(dir string) error { return os.Symlink("/tmp/x", filepath.Join(dir, "etc")) },
		"etc is a file":     func(dir string) error { return os.WriteFile(filepath.Join(dir, "etc"), nil, 0o644) },
		"etc is a loop":     func(dir string) error { return os.Symlink("etc", filepath.Join(dir, "etc")) },
		"hosts is a directory": func(dir string) error {
			return os.MkdirAll(filepath.Join(dir, "etc/hosts/x"), 0o755)
		},
		"dev is a file":  func(dir string) error { return os.WriteFile(filepath.Join(dir, "dev"), nil, 0o644) },
		"proc is a link": func(dir string) error { return os.Symlink("/tmp", filepath.Join(dir, "proc")) },
		"sys is a fifo":  func(dir string) error { return unix.Mkfifo(filepath.Join(dir, "sys"), 0o644) },
	} {
		bad := layertest.New(t, fill)
		_, err := w.r.Create(t.Context(), request(t, func(r *runtime.Request) { r.Layers.Layers = []layer.Local{bad} }))
		switch dsec.ClassOf(err) {
		case dsec.NotADirectory, dsec.IsADirectory, dsec.Invalid:
		default:
			t.Errorf("%s: %v", name, err)
		}
		w.wantNothing(t)
	}
}
