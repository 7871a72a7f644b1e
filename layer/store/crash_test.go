package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

const crashDir = "DSEC_TEST_CRASH_DIR"

// Child is what this process is to do if a test started it; else it returns.
func Child() {
	if dir := os.Getenv(crashDir); dir != "" {
		crashLoop(dir)
	}
	if dir := os.Getenv(evictDir); dir != "" {
		evictLoop(dir)
	}
	if dir := os.Getenv(ensureDir); dir != "" {
		ensureChild(dir)
	}
}

// crashLoop works on a store until it is killed.
func crashLoop(dir string) {
	ctx := context.Background()
	s, err := Open(filepath.Join(dir, "store"), Options{Grace: time.Nanosecond})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for i := 0; ; i++ {
		src := filepath.Join(dir, fmt.Sprint("src", i%3))
		_, err := s.Import(ctx, src, fmt.Sprint("tag", i%4), image.Options{})
		if err == nil {
			_, err = s.Acquire(ctx, fmt.Sprint("lease", i%5), []dsec.LayerRef{dsec.LayerRef(fmt.Sprint("tag", i%4))})
		}
		if err != nil && !errors.Is(err, dsec.Conflict.Err()) {
			fmt.Println(err)
			os.Exit(1)
		}
		if i%3 == 2 {
			err = errors.Join(s.Release(ctx, fmt.Sprint("lease", i%5)), s.Untag(ctx, fmt.Sprint("tag", i%4)))
			_, collectErr := s.Collect(ctx, false)
			if err = errors.Join(err, collectErr); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
		}
	}
}

// TestKillAtAnyMoment: after kill -9 the store opens, everything in it is whole,
// and what tags and leases name is there.
func TestKillAtAnyMoment(t *testing.T) {
	dir := t.TempDir()
	for i := range 3 {
		src := filepath.Join(dir, fmt.Sprint("src", i))
		if err := os.Mkdir(src, 0o755); err != nil {
			t.Fatal(err)
		}
		for j := range 20 {
			if err := os.WriteFile(filepath.Join(src, fmt.Sprint(j)), make([]byte, 10000*i+j), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(src, fmt.Sprint("x", j)), fmt.Appendf(nil, "%d %d", i, j), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for round := range 12 {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), crashDir+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		said := make(chan string, 1)
		go func() {
			b := make([]byte, 1000)
			n, _ := out.Read(b)
			said <- string(b[:n])
		}()
		select {
		case msg := <-said:
			t.Fatalf("round %d: %s", round, msg)
		case <-time.After(time.Duration(20+rand.IntN(180)) * time.Millisecond):
		}
		if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		<-said
		_ = cmd.Wait() // killed
		checkStore(t, filepath.Join(dir, "store"))
	}
}

// checkStore is the invariant of a store that nobody has open.
func checkStore(t *testing.T, dir string) {
	t.Helper()
	ctx := context.Background()
	s, err := Open(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if left, err := os.ReadDir(filepath.Join(dir, "tmp")); err != nil || len(left) > 0 {
		t.Errorf("tmp: %v, %v", left, err)
	}
	all, err := s.List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	here := map[string]bool{}
	for _, e := range all {
		here[string(e.Digest)] = true
		if err := s.Verify(ctx, dsec.LayerRef(e.Digest)); err != nil {
			t.Error(err)
		}
	}
	tags, err := s.Tags(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for tag, d := range tags {
		if !here[string(d)] {
			t.Errorf("tag %s: %s is not here", tag, d)
		}
	}
	for name, l := range s.leases {
		for _, d := range l.Digests {
			if !here[string(d)] {
				t.Errorf("lease %s: %s is not here", name, d)
			}
		}
	}
}

func TestFullDiskIsNoSpaceAndLeavesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root: uid is", os.Geteuid())
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=2m"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	s := openStore(t, filepath.Join(dir, "store"), Options{})
	big := make([]byte, 3<<20)
	for i := range big {
		big[i] = byte(i>>8) | 1
	}
	_, err := s.Import(context.Background(), tree(t, map[string]string{"big": string(big)}), "big", image.Options{})
	if !errors.Is(err, dsec.NoSpace.Err()) {
		t.Errorf("got %v", err)
	}
	if left, err := os.ReadDir(s.path("tmp")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := s.Import(context.Background(), tree(t, map[string]string{"small": "x"}), "small", image.Options{}); err != nil {
		t.Errorf("a small one afterwards: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
