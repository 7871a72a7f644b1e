package machine

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/e2e/up"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
)

// small mounts an ext4 of 700 MB until the test ends.
func small(t *testing.T) (dir string) {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-small-")
	if err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(t.TempDir(), "disk")
	for _, argv := range [][]string{
		{"truncate", "-s", "700M", image}, {"mkfs.ext4", "-q", image}, {"mount", "-o", "loop", image, dir},
	} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", argv, err, out)
		}
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("umount: %v\n%s", err, out)
		}
		_ = os.Remove(dir)
	})
	return dir
}

// A host disk that is full refuses new sandboxes and new bytes with errors that
// say so, loses no running sandbox, and is usable again when there is space.
func TestFullHostDisk(t *testing.T) {
	dir := small(t)
	h := startIn(t, filepath.Join(dir, "state"))
	kept := h.create(nil)
	filler := filepath.Join(dir, "filler")
	fill(t, filler)

	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	sb, err := h.Create(ctx, kind)
	if c := dsec.ClassOf(err); c != dsec.NoSpace && c != dsec.ResourceExhausted {
		t.Errorf("a creation on a full disk: %v, %v", sb.State, err)
	}
	if _, err := h.UploadTree(ctx, bytes.NewReader(busybox(t)), client.BuildOptions{Tag: "again"}); err == nil {
		t.Log("the layer is here already: nothing had to be written")
	} else if c := dsec.ClassOf(err); c != dsec.NoSpace {
		t.Errorf("an import on a full disk: %v", err)
	}
	if states := h.states(ctx); states[kept] != dsec.Running {
		t.Errorf("the running sandbox is %q", states[kept])
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if out, r := h.sh(kept, "echo alive"); out != "alive\n" || r.Status != process.Exited {
		t.Errorf("afterwards: %q, %+v", out, r)
	}
	if _, err := h.Files(kept, "").Write(ctx, "/root/x", bytes.NewReader([]byte("x")), files.WriteOptions{}); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	eventually(t, "a creation works again", func() bool {
		_, err := h.Create(ctx, kind)
		return err == nil
	})
}

// TestADiskThatFailsIsBlamed: when the disk below the pool has no room for what the
// pool has promised, the kernel makes the pool's file system read-only. Nobody's
// rollout ends well then; doctor says what to do, and that helps.
func TestADiskThatFailsIsBlamed(t *testing.T) {
	dir := small(t)
	h := startIn(t, filepath.Join(dir, "state"))
	writer, other := h.create(func(s *dsec.Spec) { s.Limits.Disk = 256 << 20 }), h.create(nil)
	filler := filepath.Join(dir, "filler")
	fill(t, filler)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r, err := h.Run(ctx, writer, process.Spec{Argv: []string{"/bin/sh", "-c", "dd if=/dev/urandom of=/big bs=1M count=150 conv=fsync; /bin/busybox sync"}}, io.Discard, io.Discard)
	t.Logf("who fills it: %+v, %v", r, err) // either, it is broken
	// What the disk has no room for may show when btrfs commits, which it does every 30 s by itself.
	eventuallyWithin(t, 3*up.Within, "the sandboxes are blamed", func() bool {
		unix.Sync()
		for _, id := range []dsec.SandboxID{writer, other} {
			if sb, err := h.Get(ctx, id); err != nil || sb.Blame == nil || sb.Blame.Cause != dsec.CauseInfraDisk {
				return false
			}
		}
		return true
	})
	if c := h.check("disk limit"); c.OK || !strings.Contains(c.Detail, "dsec down and dsec up") {
		t.Errorf("doctor says %+v", c)
	}
	if _, err := h.Create(ctx, kind); dsec.ClassOf(err) != dsec.Unavailable || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("a creation: %v", err)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if sb, err := h.Stop(ctx, writer, dsec.CauseCompleted); err != nil || sb.Result.Cause != dsec.CauseInfraDisk || !sb.Result.Mask() {
		t.Errorf("whose disk it was: %+v, %v", sb.Result, err)
	}
	h.ends()
	h.Serve()
	if sb, err := h.Get(ctx, other); err != nil || sb.Result == nil || !sb.Result.Cause.Infra() {
		t.Errorf("ended with the machine: %+v, %v", sb.Result, err)
	}
	if out, r := h.sh(h.create(nil), "echo alive >/x; cat /x"); out != "alive\n" {
		t.Errorf("afterwards: %q, %+v", out, r)
	}
}

// fill takes every free block.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	block := make([]byte, 1<<20)
	for err == nil {
		_, err = f.Write(block)
	}
	for err = nil; err == nil; {
		_, err = f.Write(block[:4096])
	}
	_ = f.Sync()
}
