package rootfs

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
)

const (
	testBase  = 600_000_000 // first host id of the tests' user namespaces
	insideEnv = "DSEC_ROOTFS_TEST_INSIDE"
)

// TestMain is also what runs inside a stacked root.
func TestMain(m *testing.M) {
	if uid := os.Getenv(insideEnv); uid != "" {
		fmt.Fprintln(os.Stderr, inside(uid))
		os.Exit(99)
	}
	os.Exit(m.Run())
}

// inside receives a root mount on descriptor 3, makes it the root and runs a
// script in it.
func inside(uid string) error {
	conn, err := net.FileConn(os.NewFile(3, "socket"))
	if err != nil {
		return err
	}
	buf, oob := make([]byte, 1), make([]byte, 64)
	_, n, _, _, err := conn.(*net.UnixConn).ReadMsgUnix(buf, oob)
	if err != nil {
		return err
	}
	fds, err := linux.Received(oob[:n])
	if err != nil || len(fds) != 1 {
		return fmt.Errorf("descriptors: %v %w", fds, err)
	}
	root := os.NewFile(uintptr(fds[0]), "root")
	if err := linux.Move(root, nil, "/"); err != nil {
		return err
	}
	if err := unix.Fchdir(int(root.Fd())); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	if uid != "0" {
		if err := syscall.Setresgid(1000, 1000, 1000); err != nil {
			return err
		}
		if err := syscall.Setresuid(1000, 1000, 1000); err != nil {
			return err
		}
	}
	return unix.Exec("/bin/sh", []string{"sh", "-c", os.Args[1]}, []string{"PATH=/bin"})
}

func newKeeper(t *testing.T) *linux.Keeper {
	k := linux.NewKeeper()
	t.Cleanup(k.Close)
	return k
}

// makeLayer lets fill make a tree and turns it into a layer of two files.
func makeLayer(t *testing.T, fill func(dir string)) layer.Local {
	t.Helper()
	tmp := t.TempDir()
	tree, meta, data := filepath.Join(tmp, "tree"), filepath.Join(tmp, "meta"), filepath.Join(tmp, "data")
	must(t, os.Mkdir(tree, 0o755))
	fill(tree)
	out, err := exec.Command("mkfs.erofs", "-d0", "--quiet", "--chunksize=4096", "--blobdev="+data, meta, tree).CombinedOutput()
	if err != nil {
		t.Fatalf("mkfs.erofs: %v: %s", err, out)
	}
	sum := sha256.Sum256([]byte(tmp))
	return layer.Local{Info: layer.Info{Digest: layer.Digest(fmt.Sprintf("sha256:%x", sum))}, Meta: meta, Data: data}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// busyboxLayer is a base with a shell.
func busyboxLayer(t *testing.T, more func(dir string)) layer.Local {
	t.Helper()
	return makeLayer(t, func(dir string) {
		must(t, os.MkdirAll(filepath.Join(dir, "bin"), 0o755))
		must(t, os.Mkdir(filepath.Join(dir, "tmp"), 0o755))
		must(t, os.Chmod(filepath.Join(dir, "tmp"), 0o777|os.ModeSticky))
		copyFile(t, "/bin/busybox", filepath.Join(dir, "bin/busybox"), 0o755)
		for _, n := range strings.Fields("sh cat ls mv ln stat id chown mknod dd echo rm mkdir cp sync mount test head od touch chmod") {
			must(t, os.Symlink("busybox", filepath.Join(dir, "bin", n)))
		}
		if more != nil {
			more(dir)
		}
	})
}

func copyFile(t *testing.T, from, to string, mode os.FileMode) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Skipf("Debian's busybox-static is not installed: %v", err)
	}
	must(t, os.WriteFile(to, b, mode))
	must(t, os.Chmod(to, mode))
}

// compile makes a static program of C source.
func compile(t *testing.T, to, source string) {
	t.Helper()
	cmd := exec.Command("gcc", "-static", "-Os", "-o", to, "-x", "c", "-")
	cmd.Stdin = strings.NewReader(source)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v: %s", err, out)
	}
}

type env struct {
	m      *Mounts
	keeper *linux.Keeper
}

// everyPlan runs a test under each plan, and with loop devices.
func everyPlan(t *testing.T, f func(t *testing.T, e *env)) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root and this test runs without it")
	}
	for _, c := range []struct {
		name     string
		attached bool
		loop     bool
	}{{"detached", false, false}, {"attached", true, false}, {"attached loop", true, true}} {
		t.Run(c.name, func(t *testing.T) {
			if err := tryDetached(); err != nil && !c.attached {
				if linux.Kernel().AtLeast(6, 15) {
					t.Fatalf("Linux %v should combine detached mounts: %v", linux.Kernel(), err)
				}
				t.Skipf("Linux %v is older than 6.15: %v", linux.Kernel(), err)
			}
			k := newKeeper(t)
			e := &env{keeper: k, m: openMounts(t, k, c.attached, c.loop)}
			f(t, e)
		})
	}
}

func openMounts(t *testing.T, k Keeper, isAttached, loop bool) *Mounts {
	t.Helper()
	o := Options{Keeper: k, Plan: Detached(), Linger: time.Hour, forceLoop: loop}
	if isAttached {
		p, err := Attached(t.Context(), k)
		must(t, err)
		o.Plan = p
	}
	m, err := Open(t.Context(), o)
	must(t, err)
	t.Cleanup(func() { must(t, m.Close()) })
	return m
}

func newDir(t *testing.T) *os.File {
	t.Helper()
	d, err := os.Open(t.TempDir())
	must(t, err)
	t.Cleanup(func() { d.Close() })
	return d
}

// run stacks layers in dir and runs a script as uid 0 or 1000.
func (e *env) run(t *testing.T, dir *os.File, uid, script string, layers ...layer.Local) (string, error) {
	t.Helper()
	must(t, e.m.Use(t.Context(), t.Name(), layers))
	t.Cleanup(func() { e.m.Unuse(t.Name()) })
	must(t, PrepareDir(dir, testBase, testBase))
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	must(t, err)
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer ours.Close()
	var out strings.Builder
	cmd := exec.Command("/proc/self/exe", script)
	cmd.Env = []string{insideEnv + "=" + uid}
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.ExtraFiles = []*os.File{theirs}
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: testBase, Size: 65536}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET,
		UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true, Credential: &syscall.Credential{}, Pdeathsig: syscall.SIGKILL}
	must(t, cmd.Start())
	theirs.Close()
	userns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	must(t, err)
	defer userns.Close()
	digests := make([]layer.Digest, len(layers))
	for i, l := range layers {
		digests[i] = l.Digest
	}
	root, err := e.m.Stack(Root{User: t.Name(), Layers: digests, UserNS: userns, Dir: dir})
	if err != nil {
		ours.Close()
		_ = cmd.Wait()
		t.Fatal(err)
	}
	must(t, syscall.Sendmsg(fds[0], []byte{1}, syscall.UnixRights(int(root.Fd())), nil, 0))
	root.Close()
	err = cmd.Wait()
	return out.String(), err
}

// check is a script and what it prints.
type check struct{ uid, script, want string }

func (e *env) want(t *testing.T, dir *os.File, c check, layers ...layer.Local) {
	t.Helper()
	out, err := e.run(t, dir, c.uid, c.script, layers...)
	if err != nil || out != c.want {
		t.Errorf("%s\n got %q, %v\nwant %q", c.script, out, err, c.want)
	}
}

func TestLayersStackInOrderWithMappedIDs(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		base := busyboxLayer(t, func(d string) { must(t, os.WriteFile(d+"/a", []byte("base"), 0o644)) })
		top := makeLayer(t, func(d string) {
			must(t, os.WriteFile(d+"/a", []byte("top"), 0o644))
			must(t, os.WriteFile(d+"/b", []byte("b"), 0o600))
			must(t, os.Chown(d+"/b", 1000, 1000))
		})
		dir := newDir(t)
		e.want(t, dir, check{"0", "cat a; stat -c ' %u:%g' a b; echo new > /n; rm /b; test -e b || echo gone",
			"top 0:0\n 1000:1000\ngone\n"}, base, top)
		var st unix.Stat_t
		must(t, unix.Fstatat(int(dir.Fd()), "upper/n", &st, 0))
		if st.Uid != testBase || st.Gid != testBase {
			t.Errorf("new file belongs to %d:%d on the host, want %d", st.Uid, st.Gid, testBase)
		}
		// A volatile overlay can be stacked again on what it left.
		e.want(t, dir, check{"0", "cat n; test -e b || echo gone", "new\ngone\n"}, base, top)
		if info, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(info), "erofs") && strings.Contains(string(info), t.Name()) {
			t.Errorf("mounts show in our namespace: %v", err)
		}
	})
}

func TestOverlayOptionsServeOrdinaryTools(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		base := busyboxLayer(t, func(d string) {
			must(t, os.MkdirAll(d+"/lower/dir", 0o755))
			must(t, os.WriteFile(d+"/lower/dir/f", []byte("f"), 0o644))
			must(t, os.WriteFile(d+"/h1", []byte("one"), 0o644))
			must(t, os.Link(d+"/h1", d+"/h2"))
			compile(t, d+"/bin/euid", `#include <stdio.h>
				#include <unistd.h>
				int main(void) { return printf("%d\n", (int)geteuid()) < 0; }`)
			must(t, os.Chmod(d+"/bin/euid", 0o755|os.ModeSetuid))
			must(t, os.Mkdir(d+"/cap", 0o755))
			must(t, os.Symlink("busybox", d+"/cap/chown")) // busybox acts by its own name
			copyFile(t, "/bin/busybox", d+"/cap/busybox", 0o755)
			out, err := exec.Command("setcap", "cap_chown+ep", d+"/cap/busybox").CombinedOutput()
			if err != nil {
				t.Fatalf("setcap: %v: %s", err, out)
			}
		})
		for _, c := range []struct {
			name string
			check
		}{
			{"rename of a lower directory", check{"0", "mv /lower/dir /lower/moved && cat /lower/moved/f", "f"}},
			{"inode numbers are stable over copy-up", check{"0", "a=$(stat -c %i /lower/dir/f); echo >> /lower/dir/f; b=$(stat -c %i /lower/dir/f); test $a = $b && echo same", "same\n"}},
			{"one device for the whole tree", check{"0", "test $(stat -c %d /h1) = $(stat -c %d /lower) && echo same", "same\n"}},
			{"hard links of a layer are one inode", check{"0", "test $(stat -c %i /h1) = $(stat -c %i /h2) && stat -c %h /h1", "2\n"}},
			{"hard link in the upper", check{"0", "ln /h1 /h3 && echo two > /h3 && cat /h1", "two\n"}},
			{"without privilege", check{"1000", "touch /tmp/f; chown 0 /tmp/f 2>/tmp/err || echo refused", "refused\n"}},
			{"setuid", check{"1000", "/bin/euid; chmod 700 /bin/euid 2>/tmp/err || echo refused", "0\nrefused\n"}},
			{"file capabilities as non-root", check{"1000", "touch /tmp/f; /cap/chown 0 /tmp/f && stat -c %u /tmp/f", "0\n"}},
			{"file capabilities after copy-up", check{"0", "touch /cap/busybox; ln /cap/busybox /cap/b2; touch -h /tmp/g; /cap/chown 5 /tmp/g; stat -c %u /tmp/g", "5\n"}},
		} {
			t.Run(c.name, func(t *testing.T) {
				e.want(t, newDir(t), c.check, base)
			})
		}
	})
}

// Trap 1: a device node in a layer is an escape unless the root is nodev.
func TestDeviceNodesOfALayerOpenNothing(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		var disk unix.Stat_t
		must(t, unix.Stat("/", &disk)) // the disk of the machine itself
		base := busyboxLayer(t, func(d string) {
			must(t, unix.Mknod(d+"/block", unix.S_IFBLK|0o666, int(disk.Dev)))
			must(t, unix.Mknod(d+"/mem", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 1))))
			must(t, unix.Mknod(d+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		})
		e.want(t, newDir(t), check{"0", `for f in block mem null; do head -c 1 /$f 2>/tmp/err && echo opened $f; done
			mknod /own b 254 0 2>/tmp/err && echo made; cp -a /null /copy 2>/tmp/err; head -c 1 /copy 2>/tmp/err && echo opened copy
			ln /null /hard && head -c1 /hard 2>/tmp/err && echo opened link
			echo done`, "done\n"}, base)
	})
}

func TestLayersAreMountedOnceAndKept(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		l := makeLayer(t, func(d string) { must(t, os.WriteFile(d+"/a", nil, 0o644)) })
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				if err := e.m.Use(ctx, fmt.Sprintf("user%d", i), []layer.Local{l}); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		must(t, e.m.Use(ctx, "user0", []layer.Local{l})) // idempotent
		if n, ok := e.m.Users(l.Digest); n != 8 || !ok {
			t.Fatalf("%d users, mounted %v", n, ok)
		}
		dev := deviceOf(t, e.keeper, l)
		must(t, e.m.Evict(ctx, 0))
		for i := range 8 {
			e.m.Unuse(fmt.Sprintf("user%d", i))
			e.m.Unuse(fmt.Sprintf("user%d", i))
		}
		if n, ok := e.m.Users(l.Digest); n != 0 || !ok {
			t.Fatalf("%d users, mounted %v after all left", n, ok)
		}
		// Another process finds the same mount.
		_, isAttached := e.m.plan.(*attached)
		again := openMounts(t, e.keeper, isAttached, e.m.opts.forceLoop)
		must(t, again.Use(ctx, "later", []layer.Local{l}))
		if d := deviceOf(t, e.keeper, l); d != dev {
			t.Errorf("device %d, was %d: the layer was mounted twice", d, dev)
		}
		if err := again.EvictLayer(ctx, l.Digest); dsec.ClassOf(err) != dsec.IllegalState {
			t.Errorf("evicted while it is used: %v", err)
		}
		f, err := again.Mounted(l.Digest)
		must(t, err)
		if st, err := f.Stat(); err != nil || st.Sys().(*syscall.Stat_t).Dev != dev {
			t.Errorf("another mount: %v, %v", st, err)
		}
		must(t, f.Close())
		again.Unuse("later")
		must(t, again.EvictLayer(ctx, l.Digest))
		must(t, again.EvictLayer(ctx, l.Digest))
		if f, err := again.Mounted(l.Digest); f != nil || err != nil {
			t.Errorf("mounted after eviction: %v", err)
		}
		if names, _ := e.keeper.Names(ctx, keptPrefix); len(names) != 0 {
			t.Errorf("kept after eviction: %v", names)
		}
	})
}

func deviceOf(t *testing.T, k Keeper, l layer.Local) uint64 {
	t.Helper()
	f, err := k.Get(t.Context(), keptPrefix+string(l.Digest))
	must(t, err)
	defer f.Close()
	return deviceOfFile(t, f)
}

func deviceOfFile(t *testing.T, f *os.File) uint64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Fstat(int(f.Fd()), &st))
	return st.Dev
}

func TestBrokenLayerNamesItselfAndLeavesNothing(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		good := makeLayer(t, func(d string) {})
		bad := layer.Local{Info: layer.Info{Digest: "sha256:bad"}, Meta: filepath.Join(t.TempDir(), "x")}
		must(t, os.WriteFile(bad.Meta, make([]byte, 8192), 0o600))
		err := e.m.Use(t.Context(), "u", []layer.Local{good, bad})
		if !errors.Is(err, dsec.Corrupt.Err()) || !strings.Contains(err.Error(), "sha256:bad") {
			t.Fatalf("err = %v", err)
		}
		if n, _ := e.m.Users(good.Digest); n != 0 {
			t.Errorf("%d users of the good layer", n)
		}
		if _, ok := e.m.Users(bad.Digest); ok {
			t.Error("the bad layer counts as mounted")
		}
		missing := layer.Local{Info: layer.Info{Digest: "sha256:gone"}, Meta: "/nonexistent/meta"}
		if err := e.m.Use(t.Context(), "u", []layer.Local{missing}); !errors.Is(err, dsec.NotFound.Err()) {
			t.Errorf("err = %v", err)
		}
	})
}

func TestIdleLayersGoAway(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root and this test runs without it")
	}
	k := newKeeper(t)
	m, err := Open(t.Context(), Options{Keeper: k, Linger: 20 * time.Millisecond})
	must(t, err)
	defer m.Close()
	l := makeLayer(t, func(d string) {})
	must(t, m.Use(t.Context(), "u", []layer.Local{l}))
	m.Unuse("u")
	deadline := time.Now().Add(5 * time.Second)
	for {
		names, err := k.Names(t.Context(), "layer/")
		must(t, err)
		if len(names) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still kept: %v", names)
		}
		<-time.After(5 * time.Millisecond)
	}
}

func TestSharedMountIsMadeOnce(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		made := 0
		mk := func() (*os.File, error) {
			made++
			return linux.NewFS("tmpfs").Mount(0)
		}
		for range 3 {
			f, err := e.m.Shared(t.Context(), "dev", mk)
			must(t, err)
			c, err := e.m.Plan().Clone(f, nil)
			must(t, err)
			c.Close()
			f.Close()
		}
		if made != 1 {
			t.Errorf("made %d times", made)
		}
	})
}

func TestManyLayers(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		layers := []layer.Local{busyboxLayer(t, nil)}
		for i := range dsec.MaxLayers {
			layers = append(layers, makeLayer(t, func(d string) {
				must(t, os.WriteFile(fmt.Sprintf("%s/f%d", d, i), []byte("x"), 0o644))
			}))
		}
		e.want(t, newDir(t), check{"0", "cat /f*", strings.Repeat("x", dsec.MaxLayers)}, layers...)
	})
}

func TestUpperOnAdmittedMount(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		pool, err := linux.NewFS("tmpfs").Mount(unix.MOUNT_ATTR_NODEV)
		must(t, err)
		defer pool.Close()
		k := e.m.Keeper()
		must(t, k.Put(t.Context(), "pool", pool))
		must(t, unix.Mkdirat(int(pool.Fd()), "s1", 0o700))
		dir, err := linux.OpenBeneath(pool, "s1", unix.O_RDONLY|unix.O_DIRECTORY)
		must(t, err)
		e.want(t, dir, check{"0", "echo hi > /f; cat /f", "hi\n"}, busyboxLayer(t, nil))
		dir.Close()
		must(t, k.Drop(t.Context(), "pool"))
	})
}

// unseen are data whose holes nobody fills where they are read through loop devices.
type unseen struct{}

func (unseen) Device(_ context.Context, l layer.Local) (Device, error) {
	return Device{Path: l.Data, Kind: "events", NoLoop: true}, nil
}

// TestHolesAreNotReadThroughLoopDevices: the kernel tells nobody of what a loop
// device reads, so a mechanism that has to be told is refused there.
func TestHolesAreNotReadThroughLoopDevices(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root and this test runs without it")
	}
	l := makeLayer(t, func(d string) { must(t, os.WriteFile(d+"/f", []byte("f"), 0o644)) })
	k := newKeeper(t)
	plan, err := Attached(t.Context(), k)
	must(t, err)
	m, err := Open(t.Context(), Options{Keeper: k, Plan: plan, Devices: unseen{}, forceLoop: true})
	must(t, err)
	defer func() { must(t, m.Close()) }()
	if err := m.Use(t.Context(), "sb", []layer.Local{l}); dsec.ClassOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), "events sees no reads of it") {
		t.Errorf("mount: %v", err)
	}
}
