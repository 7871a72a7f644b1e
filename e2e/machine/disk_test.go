package machine

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
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

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	sb, err := h.Create(ctx, dsec.Spec{Tier: dsec.TierContainer, Image: "box"})
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
		_, err := h.Create(ctx, dsec.Spec{Tier: dsec.TierContainer, Image: "box"})
		return err == nil
	})
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
