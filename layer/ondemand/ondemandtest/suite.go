package ondemandtest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/fault"
)

// Run is the suite, for one mechanism and one backend, or only some of it.
func Run(t *testing.T, m Mechanism, b Backend, only ...string) {
	if err := m.Supported(t.TempDir()); err != nil {
		t.Skip(err)
	}
	o := NewOrigin(t, b)
	for _, c := range []struct {
		name string
		test func(*testing.T, Mechanism, *Origin)
	}{
		{"every byte is right", everyByte}, {"programs run", programs}, {"a chunk is fetched once", once}, {"errors", failures},
		{"damaged objects", damaged}, {"the disk is full", full}, {"killed readers", killable}, {"killed servers", killed}, {"whole", whole},
	} {
		if len(only) == 0 || slices.Contains(only, c.name) {
			t.Run(c.name, func(t *testing.T) { c.test(t, m, o) })
		}
	}
}

func everyByte(t *testing.T, m Mechanism, o *Origin) {
	for _, mapped := range []bool{false, true} {
		x := NewMachine(t, m, o, t.TempDir())
		if err := x.Read(reading{Mapped: mapped}); err != nil {
			t.Errorf("mapped %v: %v", mapped, err)
		}
		if s := x.ask(command{}); s.Stats.Failures > 0 || s.Stats.Requests == 0 {
			t.Errorf("mapped %v: %+v", mapped, s)
		}
	}
}

// programs: what is executed, by another user in another root, and mapped by
// the loader of programs.
func programs(t *testing.T, m Mechanism, o *Origin) {
	x := NewMachine(t, m, o, t.TempDir())
	want, err := os.ReadFile(filepath.Join(o.tree, coldFile))
	if err != nil {
		t.Fatal(err)
	}
	// A detached mount cannot be a root: it is attached in a namespace of its own.
	at := t.TempDir()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), rootEnv+"="+at)
	c.ExtraFiles = []*os.File{x.mount}
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	var out bytes.Buffer
	if err := bounded(c, &out); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(out.Bytes(), want) {
		t.Errorf("%d bytes of %d, or others", out.Len(), len(want))
	}
}

func once(t *testing.T, m Mechanism, o *Origin) {
	x := NewMachine(t, m, o, t.TempDir())
	var all sync.WaitGroup
	errs := make([]error, 6)
	for i := range errs {
		c := x.reader(reading{File: bigFile, Mapped: i%2 == 1})
		all.Go(func() { errs[i] = bounded(c, io.Discard) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	before := x.ask(command{})
	after := x.ask(command{Fill: true})
	if after.Err != "" || !after.Complete {
		t.Fatalf("%+v", after)
	}
	if after.Stats.Plain != after.Size {
		t.Errorf("%d bytes came of a layer of %d", after.Stats.Plain, after.Size)
	}
	// 12 MiB in requests of up to 4 MiB; a request for each chunk were some 100.
	if before.Stats.Requests > 60 {
		t.Errorf("%d requests", before.Stats.Requests)
	}
	if err := x.Read(reading{}); err != nil {
		t.Error(err)
	}
}

func failures(t *testing.T, m Mechanism, o *Origin) {
	for mode, class := range map[fault.Mode]dsec.Class{fault.Refuse: dsec.Unavailable, fault.Unavailable: dsec.Unavailable, fault.Hang: dsec.Timeout,
		fault.Stall: dsec.Timeout, fault.Cut: dsec.Unavailable, fault.Forbidden: dsec.PermissionDenied, fault.Missing: dsec.NotFound, fault.Corrupt: dsec.Corrupt} {
		t.Run(string(mode), func(t *testing.T) {
			x := NewMachine(t, m, o, t.TempDir())
			x.Trouble(trouble{Mode: mode})
			x.fails(class, mode == fault.Stall || mode == fault.Cut)
			x.Trouble(trouble{})
			x.heals()
		})
	}
}

// fails: a read is EIO in time, and the layer knows why. Where half of each body
// comes, which may be the half that is wanted, it may also be right: what comes with
// it beside it is nobody's error, and is asked for again.
func (x *Machine) fails(class dsec.Class, half bool) {
	x.t.Helper()
	began := time.Now()
	err := x.Read(reading{File: coldFile, Limit: 1 << 20})
	if err == nil && half {
		x.t.Logf("read in halves after %v", time.Since(began).Round(time.Millisecond))
		return
	}
	if err == nil || !strings.Contains(err.Error(), syscall.EIO.Error()) {
		x.t.Errorf("read: %v, want %v", err, syscall.EIO)
	}
	x.t.Logf("%v after %v", class, time.Since(began).Round(time.Millisecond))
	if took := time.Since(began); took > errorsBy {
		x.t.Errorf("an error after %v", took)
	}
	s := x.ask(command{})
	if s.Last != class {
		x.t.Errorf("the layer says %s (%s), want %s", s.Last, s.LastText, class)
	}
}

// heals: on the same mount, all can be read when the trouble is over; a failure
// that took long may be told once more.
func (x *Machine) heals() {
	x.t.Helper()
	for end := time.Now().Add(errorsBy); ; {
		err := x.Read(reading{})
		if err == nil {
			return
		}
		if !strings.Contains(err.Error(), syscall.EIO.Error()) || time.Now().After(end) {
			x.t.Fatalf("the trouble is over: %v", err)
		}
	}
}

// damaged: the objects themselves.
func damaged(t *testing.T, m Mechanism, o *Origin) {
	for what, c := range map[string]struct {
		damage func(path string, b []byte) error
		class  dsec.Class
	}{
		"other bytes": {func(p string, b []byte) error {
			bad := bytes.Clone(b)
			for i := 0; i < len(bad); i += 512 {
				bad[i] ^= 0x40
			}
			return overwrite(p, bad)
		}, dsec.Corrupt},
		"short":   {func(p string, b []byte) error { return overwrite(p, b[:100]) }, dsec.Corrupt},
		"missing": {func(p string, _ []byte) error { return os.Rename(p, p+".away") }, dsec.NotFound},
	} {
		t.Run(what, func(t *testing.T) {
			x := NewMachine(t, m, o, t.TempDir())
			good := map[string][]byte{}
			for _, p := range o.packs(t) {
				b, err := os.ReadFile(p)
				if err != nil {
					t.Fatal(err)
				}
				good[p] = b
				if err := c.damage(p, b); err != nil {
					t.Fatal(err)
				}
			}
			x.fails(c.class, false)
			for p, b := range good {
				if _, err := os.Stat(p + ".away"); err == nil {
					if err := os.Rename(p+".away", p); err != nil {
						t.Fatal(err)
					}
				}
				if err := overwrite(p, b); err != nil {
					t.Fatal(err)
				}
			}
			x.heals()
		})
	}
}

// overwrite keeps the file, and what a server noted beside it.
func overwrite(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(b, 0)
	return errors.Join(err, f.Truncate(int64(len(b))), f.Close())
}

// killable: who waits can be killed, long before it would be told an error, and
// leaves nothing that others stand behind.
func killable(t *testing.T, m Mechanism, o *Origin) {
	x := NewMachine(t, m, o, t.TempDir())
	x.Kill()
	x.order.Deadline = readersBy
	x.Start()
	x.Trouble(trouble{Mode: fault.Hang})
	for _, mapped := range []bool{false, true} {
		before := x.ask(command{}).Stats.Requests
		c := x.reader(reading{File: map[bool]string{false: coldFile, true: bigFile}[mapped], Mapped: mapped})
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- c.Wait() }()
		for x.ask(command{}).Stats.Requests == before {
			select {
			case err := <-ended:
				t.Fatalf("a reader of a store that hangs ended: %v", err)
			case <-time.After(time.Millisecond):
			}
		}
		_ = c.Process.Kill()
		select {
		case <-ended:
		case <-time.After(errorsBy):
			t.Errorf("mapped %v: a reader that was killed is still there", mapped)
			x.Kill()
			return
		}
	}
	x.Kill() // with what hangs
	x.order.Trouble = trouble{}
	x.Start()
	x.Trouble(trouble{})
	x.heals()
}

// killed: readers wait while nobody serves, and every byte is right.
func killed(t *testing.T, m Mechanism, o *Origin) {
	length := 5 * time.Second
	if os.Getenv("DSEC_LONG") != "" {
		length = 2 * time.Minute
	}
	kills, reads := 0, 0
	for end := time.Now().Add(length); time.Now().Before(end); {
		k, r := killing(t, m, o)
		if kills, reads = kills+k, reads+r; t.Failed() {
			break
		}
	}
	t.Logf("%d kills, %d reads", kills, reads)
	if kills == 0 || reads == 0 {
		t.Error("nothing was tried")
	}
}

// killing is one machine from cold to warm.
func killing(t *testing.T, m Mechanism, o *Origin) (kills, reads int) {
	x := NewMachine(t, m, o, t.TempDir())
	x.Trouble(trouble{Latency: 3 * time.Millisecond, Bandwidth: 16 << 20})
	c := x.reader(reading{For: 2 * time.Second})
	var out bytes.Buffer
	done := make(chan error, 1)
	go func() { done <- bounded(c, &out) }()
	// A life may be too short to begin, let alone to bring anything: on a slow machine
	// all are until some are longer.
	for wait, most := time.Duration(0), 60*time.Millisecond; ; wait += most / 9 {
		if wait >= most {
			wait, most = 0, min(most*3/2, 2*time.Second)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
			_, _ = fmt.Sscan(out.String(), &reads)
			return kills, reads
		case <-time.After(wait):
			// Every other one ends as it does when it is upgraded.
			x.end([]syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}[kills%2])
			x.Start()
			kills++
		}
	}
}

// whole: a layer whose data are all here needs nobody.
func whole(t *testing.T, m Mechanism, o *Origin) {
	x := NewMachine(t, m, o, t.TempDir())
	if err := x.Read(reading{File: coldFile, Limit: 5000}); err != nil {
		t.Fatal(err)
	}
	if s := x.ask(command{Fill: true}); s.Err != "" || !s.Complete {
		t.Fatalf("%+v", s)
	}
	if m.Stays {
		if err := x.at.Whole(); err != nil {
			t.Fatal(err)
		}
	} else {
		x.mount.Close()
		x.mount = x.newMount(x.data.Name())
	}
	x.Kill()
	for _, mapped := range []bool{false, true} {
		if err := x.Read(reading{Mapped: mapped}); err != nil {
			t.Error(err)
		}
	}
}

const rootEnv = "DSEC_ONDEMAND_ROOT"

// inRoot becomes the program of the mount, as nobody in particular.
func inRoot(at string) error {
	if err := unix.MoveMount(mountFD, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return os.NewSyscallError("attach mount", err)
	}
	if err := unix.Chroot(at); err != nil {
		return os.NewSyscallError("change root", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(12345), syscall.Setuid(12345)); err != nil {
		return err
	}
	return syscall.Exec("/bin/cat", []string{"cat", "/" + coldFile}, nil)
}
