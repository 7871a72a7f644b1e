package loader

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/fault"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand/ondemandtest"
	"github.com/opendsec/dsec/rootfs"
)

// loaderEnv makes this binary a loader, with the listening socket on descriptor 3,
// of what is in the blob store that it names: who reads in the process that serves
// can stand still for ever. From SIGUSR1 on, nothing comes of the store.
const loaderEnv = "DSEC_LOADER_TEST_BLOBS"

func TestMain(m *testing.M) {
	if blobs := os.Getenv(loaderEnv); blobs != "" {
		fmt.Fprintln(os.Stderr, loaderOf(blobs))
		os.Exit(1)
	}
	os.Exit(ondemandtest.Main(m))
}

func loaderOf(blobs string) error {
	s, err := bucket.Open(context.Background(), blobs)
	if err != nil {
		return err
	}
	slow := fault.New(s) // so that there is time to be killed in
	slow.Set(fault.Faults{Latency: 3 * time.Millisecond, Bandwidth: 8 << 20})
	hang := make(chan os.Signal, 1)
	signal.Notify(hang, syscall.SIGUSR1)
	go func() {
		<-hang
		slow.Set(fault.Faults{Mode: fault.Hang})
	}()
	l, err := net.FileListener(os.NewFile(3, "socket"))
	if err != nil {
		return err
	}
	return NewServer(Options{Blobs: slow}).Run(l.(*net.UnixListener))
}

// process starts a loader in a process of its own; end kills it.
func (w *world) process() (end func()) {
	w.t.Helper()
	_, end = w.started()
	return end
}

func (w *world) started() (p *os.Process, end func()) {
	w.t.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), loaderEnv+"=file://"+filepath.Join(w.dir, "blobs"))
	c.ExtraFiles, c.Stderr = []*os.File{w.lis}, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(w.t, c.Start())
	return c.Process, func() {
		_ = c.Process.Kill()
		_ = c.Wait() // it was killed
	}
}

// mounted mounts the layer as a node does.
func (w *world) mounted() (*rootfs.Mounts, *os.File) {
	w.t.Helper()
	m, err := rootfs.Open(w.t.Context(), rootfs.Options{Keeper: w.shelf, Devices: w.client, Linger: time.Hour})
	must(w.t, err)
	must(w.t, m.Use(w.t.Context(), "sb", []layer.Local{w.layer}))
	root, err := m.Mounted(w.layer.Digest)
	must(w.t, err)
	return m, root
}

// loops are the loop devices that have a file.
func loops(t *testing.T) map[string]bool {
	t.Helper()
	found, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	must(t, err)
	all := map[string]bool{}
	for _, f := range found {
		all[f] = true
	}
	return all
}

// wantLoops: the newer ones are those of the layer where the kernel mounts no
// files, that of the data past the page cache.
func wantLoops(t *testing.T, before map[string]bool) {
	t.Helper()
	n, direct := 0, 0
	for f := range loops(t) {
		if before[f] {
			continue
		}
		n++
		if dio, err := os.ReadFile(filepath.Join(filepath.Dir(f), "dio")); err == nil && string(dio) == "1\n" {
			direct++
		}
	}
	if k := linux.Kernel(); !k.AtLeast(6, 12) && (n != 2 || direct != 1) {
		t.Errorf("Linux %v: %d loop devices, %d direct: want those of metadata and data", k, n, direct)
	}
	t.Logf("through %d loop devices", n)
}

func plantMany(t *testing.T) func(string) {
	return func(tree string) {
		noise := rand.NewChaCha8([32]byte{7})
		for i := range 200 {
			b := make([]byte, 1+i*613)
			_, _ = noise.Read(b) // never fails
			must(t, os.WriteFile(filepath.Join(tree, fmt.Sprint(i)), b, 0o644))
		}
	}
}

// TestE26_KilledLoadersLoseNothing mounts a layer of which nothing is here, as this
// kernel can, and kills the loaders while all of it is read.
func TestE26_KilledLoadersLoseNothing(t *testing.T) {
	for _, mechanism := range []string{FUSE, PreContent} {
		t.Run(mechanism, func(t *testing.T) {
			w := newWorld(t, mechanism, plantMany(t))
			kill := w.process()
			defer func() { kill() }()
			w.eventually("the loader answers", w.answers)
			before := loops(t)
			m, root := w.mounted()
			defer func() { must(t, m.Close()) }()
			defer root.Close()
			wantLoops(t, before)
			read := make(chan error, 1)
			go func() { read <- ondemandtest.Read(t, root, w.tree, "") }()
			kills := 0
			for done := false; !done; {
				select {
				case err := <-read:
					must(t, err)
					done = true
				case <-time.After(time.Duration(rand.IntN(300)) * time.Millisecond):
					kill()
					kill = w.process()
					kills++
				}
			}
			if t.Logf("%d kills", kills); kills == 0 {
				t.Error("nobody was killed")
			}
			w.leaves(m, root)
		})
	}
}

// answers says whether there is a loader.
func (w *world) answers() bool {
	_, err := w.client.Status(w.t.Context())
	return err == nil
}

// leaves unmounts the layer and wants that nobody keeps anything of it: with a loop
// device between, its file is let go too.
func (w *world) leaves(m *rootfs.Mounts, root *os.File) {
	w.t.Helper()
	must(w.t, root.Close())
	m.Unuse("sb")
	must(w.t, m.Evict(w.t.Context(), 0))
	if w.client.c.Mechanism == PreContent {
		return // which does not end by itself
	}
	w.eventually("nothing is kept of what nobody reads", func() bool {
		names, err := w.shelf.Names(w.t.Context(), prefix+w.layer.Digest.Hex())
		return err == nil && len(names) == 0
	})
}

// TestE26_AReadThatWaitsHoldsUpNoOther of the same layer, loop device or not.
func TestE26_AReadThatWaitsHoldsUpNoOther(t *testing.T) {
	w := newWorld(t, FUSE, plantMany(t))
	loader, kill := w.started()
	defer func() { kill() }()
	w.eventually("the loader answers", w.answers)
	m, root := w.mounted()
	defer func() { must(t, m.Close()) }()
	defer root.Close()
	must(t, ondemandtest.Read(t, root, w.tree, "0")) // and with it come the small files beside it
	requests := func() int64 { return w.status()[0].Requests }
	before := requests()
	must(t, loader.Signal(syscall.SIGUSR1))
	waits := make(chan error, 1)
	go func() { waits <- ondemandtest.Read(t, root, w.tree, "big") }()
	w.eventually("what is not here is asked for", func() bool { return requests() > before })
	must(t, ondemandtest.Read(t, root, w.tree, "1"))
	select {
	case err := <-waits:
		t.Errorf("what nobody brings was read, or held up another read: %v", err)
		waits <- err
	default:
	}
	kill()
	kill = w.process() // which brings it
	must(t, <-waits)
	w.leaves(m, root)
}

// TestReadersEndWithWhoCouldServe: when loader and keeper are gone, a read is an
// error, and so is one that waits already; nothing stands still behind it.
func TestReadersEndWithWhoCouldServe(t *testing.T) {
	w := newWorld(t, FUSE)
	kill := w.process()
	w.eventually("the loader answers", w.answers)
	m, root := w.mounted()
	defer func() { must(t, m.Close()) }()
	kill()
	read := make(chan error, 1)
	go func() { read <- ondemandtest.Read(t, root, w.tree, "") }()
	select {
	case err := <-read:
		t.Errorf("a read that nobody answers: %v", err)
		read <- err
	case <-time.After(300 * time.Millisecond):
	}
	names, err := w.shelf.Names(t.Context(), prefix)
	must(t, err)
	for _, n := range names {
		if strings.HasSuffix(n, devName) {
			must(t, w.shelf.Drop(t.Context(), n))
		}
	}
	if err := <-read; err == nil || !strings.Contains(err.Error(), syscall.EIO.Error()) {
		t.Errorf("read: %v, want %v", err, syscall.EIO)
	}
	if err := ondemandtest.Read(t, root, w.tree, ""); err == nil {
		t.Error("a read of what nobody serves is right")
	}
	must(t, root.Close())
	m.Unuse("sb")
	must(t, m.Evict(t.Context(), 0))
}
