package fullvm

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/diskimage"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/fullvm/smalldisk"
)

// long is for the full lengths.
var long = os.Getenv("DSEC_LONG") != ""

// modest is what the small disk needs.
func modest(r *runtime.Request) {
	r.Spec.Limits.CPU, r.Spec.Limits.Memory, r.Spec.Limits.Disk = 1, 128<<20, 64<<20
}

// smallDisk has less free than a sandbox of the conformance suite may write, so that it is its own file system that says
// that it is full.
var smallDisk struct {
	sync.Once
	dir  string
	size int64
	err  error
}

// smallImage is the disk, made once.
func smallImage(t testing.TB) (name string, size int64) {
	t.Helper()
	smallDisk.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		if smallDisk.dir, smallDisk.err = os.MkdirTemp("", "dsec-fullvm-small-"); smallDisk.err == nil {
			smallDisk.size, smallDisk.err = smalldisk.Make(ctx, "../../.cache/vm", smallDisk.dir, smalldisk.Least)
		}
	})
	if smallDisk.err != nil {
		t.Fatal(smallDisk.err)
	}
	return filepath.Join(smallDisk.dir, "disk"), smallDisk.size
}

// smallLayer is a layer of it.
func smallLayer(t testing.TB, change ...func(*diskimage.Manifest)) layer.Local {
	t.Helper()
	name, size := smallImage(t)
	f, err := os.Open(name)
	must(t, err)
	defer f.Close()
	m := diskimage.New(size)
	m.Agent = true
	for _, c := range change {
		c(&m)
	}
	return buildLayer(t, t.TempDir(), m, diskimage.Source{Size: size, Reader: f})
}
