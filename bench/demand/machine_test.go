package demand

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench"
	"github.com/opendsec/dsec/blob/s3test"
	"github.com/opendsec/dsec/e2e/up"
	"github.com/opendsec/dsec/layer"
)

// disk is a file system on a loop device of its own.
type disk struct {
	t      *testing.T
	dir    string // where it is mounted
	file   string
	device string // name of the loop device
}

func newDisk(t *testing.T) *disk {
	t.Helper()
	base, err := os.MkdirTemp("/var/tmp", "bench-demand-")
	if err != nil {
		t.Fatal(err)
	}
	d := &disk{t: t, dir: filepath.Join(base, "m"), file: filepath.Join(base, "disk")}
	t.Cleanup(d.remove)
	must(t, os.Chmod(base, 0o711))
	must(t, os.Mkdir(d.dir, 0o711))
	sh(t, "truncate", "-s", "48G", d.file)
	sh(t, "mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", d.file)
	d.device = strings.TrimPrefix(strings.TrimSpace(sh(t, "losetup", "--find", "--show", "--direct-io=on", d.file)), "/dev/")
	must(t, unix.Mount("/dev/"+d.device, d.dir, "ext4", 0, ""))
	must(t, os.Chmod(d.dir, 0o711))
	return d
}

func (d *disk) remove() {
	if d.device != "" {
		if err := unix.Unmount(d.dir, 0); err != nil {
			d.t.Errorf("unmount %s: %v", d.dir, err)
		}
		sh(d.t, "losetup", "--detach", "/dev/"+d.device)
	}
	if err := os.RemoveAll(filepath.Dir(d.dir)); err != nil {
		d.t.Error(err)
	}
}

// written is how many bytes have reached the device, all of them synced.
func (d *disk) written() int64 {
	d.t.Helper()
	unix.Sync() // the pool is a file system in a file of this one
	n, err := bench.SectorsWritten(d.device)
	must(d.t, err)
	return n
}

// machine is a `dsec up` on a disk of its own.
type machine struct {
	*up.Machine
	*disk
}

// dsecBinary is built of this tree by TestMain.
var dsecBinary string

// boot starts a machine that knows no layer.
func boot(t *testing.T, blobs, how string) *machine {
	t.Helper()
	d := newDisk(t)
	conf := fmt.Sprintf("gateway: {listen: ''}\nnode: {on_demand: %s, disk_pool: 24GiB}\nblobs: %s\n", how, blobs)
	return &machine{up.Start(t, dsecBinary, "demand", filepath.Join(d.dir, "up"), conf), d}
}

// TestMain builds dsec, if there is anything to measure.
func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Getenv(imagesEnv) != "" {
		var remove func()
		var err error
		if dsecBinary, remove, err = up.Build("../.."); err != nil {
			fmt.Println(err)
			return 1
		}
		defer remove()
	}
	return m.Run()
}

// forgetTraces removes what machines have recorded of layers.
func forgetTraces(t *testing.T, s *s3test.Server, refs []dsec.LayerRef) {
	t.Helper()
	for _, r := range refs {
		must(t, os.RemoveAll(filepath.Join(s.Data(), s3test.BucketName, prefix, layer.TraceKey(layer.Digest(r)))))
	}
}

func dropCaches(t *testing.T) {
	t.Helper()
	unix.Sync()
	must(t, os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0))
}

func load() string {
	text, _ := os.ReadFile("/proc/loadavg")
	return strings.Fields(string(text) + " ?")[0]
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func sh(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := exec.CommandContext(context.Background(), argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return string(out)
}
