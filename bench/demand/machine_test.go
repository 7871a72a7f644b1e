package demand

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench"
	"github.com/opendsec/dsec/blob/s3test"
	"github.com/opendsec/dsec/client"
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
	*client.Client
	*disk
	args []string
	up   *exec.Cmd
	log  string
	end  func() // once
}

// dsecBinary is built of this tree by TestMain.
var dsecBinary string

// boot starts a machine that knows no layer.
func boot(t *testing.T, blobs, how string) *machine {
	t.Helper()
	m := &machine{disk: newDisk(t)}
	conf := filepath.Join(m.dir, "dsec.yaml")
	must(t, os.WriteFile(conf, []byte(fmt.Sprintf("gateway: {listen: ''}\nnode: {on_demand: %s, disk_pool: 24GiB}\nblobs: %s\n", how, blobs)), 0o600))
	m.args = []string{"--instance", "demand", "--data", filepath.Join(m.dir, "data"), "--run", filepath.Join(m.dir, "run"), "--config", conf}
	m.log = filepath.Join(m.dir, "log")
	log, err := os.Create(m.log)
	must(t, err)
	m.up = exec.Command(dsecBinary, append([]string{"up"}, m.args...)...)
	m.up.Env = append(os.Environ(), "DSEC_CONFIG="+filepath.Join(m.dir, "context.json"))
	m.up.Stdout, m.up.Stderr = log, log
	must(t, m.up.Start())
	must(t, log.Close())
	ended := make(chan struct{})
	go func() {
		_ = m.up.Wait()
		close(ended)
	}()
	m.end = sync.OnceFunc(func() { m.down(ended) })
	t.Cleanup(m.end)
	m.await(ended)
	m.Client, err = client.New(client.Config{URL: "unix://" + filepath.Join(m.dir, "run", "gateway.sock")})
	must(t, err)
	return m
}

func (m *machine) await(ended chan struct{}) {
	m.t.Helper()
	for {
		text, err := os.ReadFile(m.log)
		must(m.t, err)
		if bytes.Contains(text, []byte("dsec is up")) {
			return
		}
		select {
		case <-ended:
			m.t.Fatalf("dsec up has ended:\n%s", text)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (m *machine) down(ended chan struct{}) {
	if m.Client != nil {
		_ = m.Client.Close()
	}
	out, err := exec.Command(dsecBinary, append([]string{"down", "--purge"}, m.args...)...).CombinedOutput()
	<-ended
	if err != nil || !bytes.Contains(out, []byte("nothing is left")) {
		m.t.Errorf("dsec down: %v\n%s", err, out)
	}
	if m.t.Failed() {
		text, _ := os.ReadFile(m.log)
		m.t.Logf("log of dsec:\n%s", text[max(0, len(text)-4000):])
	}
}

// TestMain builds dsec, if there is anything to measure.
func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Getenv(imagesEnv) != "" {
		dir, err := os.MkdirTemp("", "dsec-demand-")
		if err != nil {
			fmt.Println(err)
			return 1
		}
		defer os.RemoveAll(dir)
		dsecBinary = filepath.Join(dir, "dsec")
		cmd := exec.Command("go", "build", "-o", dsecBinary, "../../cmd/dsec")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			fmt.Printf("build dsec: %v\n%s", err, out)
			return 1
		}
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
