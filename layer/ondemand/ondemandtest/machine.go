package ondemandtest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/fault"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/store"
)

// Backend is a place that blobs come from.
type Backend struct {
	Name string
	URL  string // for bucket.Open
	Dir  string // where the objects are as files, to damage them
	// Break makes a real server go wrong; nil: the server of the layer does as if.
	Break func(fault.Faults)
}

// Origin is a tree and the layer made of it, in a backend.
type Origin struct {
	Backend
	tree   string
	digest layer.Digest
}

// NewOrigin makes a tree of files of many kinds and pushes it as a layer.
func NewOrigin(t *testing.T, b Backend) *Origin {
	t.Helper()
	o := &Origin{Backend: b, tree: t.TempDir()}
	o.plant(t)
	o.push(t, func(s *store.Store) (layer.Info, error) {
		return s.Import(context.Background(), o.tree, "", image.Options{})
	})
	return o
}

// push has a store of its own make the layer, and so put it into the backend.
func (o *Origin) push(t testing.TB, make func(*store.Store) (layer.Info, error)) {
	t.Helper()
	blobs, err := bucket.Open(context.Background(), o.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer blobs.Close()
	s, err := store.Open(t.TempDir(), store.Options{Blobs: blobs})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	info, err := make(s)
	if err != nil {
		t.Fatal(err)
	}
	o.digest = info.Digest
}

// The files that tests name.
const (
	bigFile  = "lib/big"
	coldFile = "lib/cold"
)

func (o *Origin) plant(t *testing.T) {
	t.Helper()
	noise := rand.NewChaCha8([32]byte{1, 2, 3})
	write := func(name string, b []byte, mode os.FileMode) {
		p := filepath.Join(o.tree, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, b, mode); err != nil {
			t.Fatal(err)
		}
	}
	random := func(n int) []byte {
		b := make([]byte, n)
		_, _ = noise.Read(b) // never fails
		return b
	}
	for i := range 150 {
		write(fmt.Sprintf("etc/%d", i), random(1+i*i*2), 0o644)
	}
	write(bigFile, random(12<<20), 0o644)
	write(coldFile, random(6<<20), 0o644)
	write("lib/twin", random(1<<20), 0o644)
	write("lib/text", bytes.Repeat([]byte("the same words again and again\n"), 100_000), 0o644)
	write("lib/holes", append(append(random(70_000), make([]byte, 3<<20)...), random(9000)...), 0o644)
	write("lib/empty", nil, 0o644)
	twin, err := os.ReadFile(filepath.Join(o.tree, "lib/twin"))
	if err != nil {
		t.Fatal(err)
	}
	write("lib/twin2", twin, 0o644)
	o.plantProgram(t, write)
}

// plantProgram puts a program and what it is linked with where they are here.
func (o *Origin) plantProgram(t *testing.T, write func(string, []byte, os.FileMode)) {
	t.Helper()
	out, err := exec.Command("ldd", "/bin/cat").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range append(strings.Fields(string(out)), "/bin/cat") {
		if !strings.HasPrefix(word, "/") {
			continue
		}
		b, err := os.ReadFile(word)
		if err != nil {
			t.Fatal(err)
		}
		write(word[1:], b, 0o755)
	}
}

// packs are the files with the contents in the backend.
func (o *Origin) packs(t *testing.T) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(o.Dir, "packs", "*"))
	if err != nil || len(names) == 0 {
		t.Fatalf("no packs in %s: %v", o.Dir, err)
	}
	return names
}

// Machine is one that has nothing of a layer but its metadata, with a mechanism
// before its data and a mount of the layer.
type Machine struct {
	t       testing.TB
	o       *Origin
	mech    Mechanism
	dir     string // of the layer
	data    *os.File
	at      Attached
	mount   *os.File
	order   order
	server  *exec.Cmd
	control *os.File // ours; nil: of nobody
	log     bytes.Buffer
}

// deadline of a fetch in these tests, and the most that a reader may wait for an
// error: the kernel asks again for what could not be had, and machines are slow.
const (
	deadline  = 500 * time.Millisecond
	errorsBy  = 30 * time.Second
	readersBy = 3 * time.Minute
)

// NewMachine makes one and mounts the layer; in is where its files are.
func NewMachine(t testing.TB, m Mechanism, o *Origin, in string) *Machine {
	t.Helper()
	x := newMachine(t, m, o, in)
	x.mount = x.newMount(x.at.Device)
	return x
}

func newMachine(t testing.TB, m Mechanism, o *Origin, in string) *Machine {
	t.Helper()
	x := &Machine{t: t, o: o, mech: m, order: order{Mechanism: m.Name, Store: o.URL, Deadline: deadline}}
	t.Cleanup(x.close)
	x.fetch(in)
	var err error
	if x.data, err = os.OpenFile(filepath.Join(x.dir, layer.DataFile), os.O_RDWR, 0); err != nil {
		t.Fatal(err)
	}
	if x.at, err = m.Attach(x.data); err != nil {
		t.Fatal(err)
	}
	x.order.Dir, x.order.Files = x.dir, len(x.at.Files)
	x.Start()
	return x
}

func (x *Machine) fetch(in string) {
	x.t.Helper()
	ctx := context.Background()
	blobs, err := bucket.Open(ctx, x.o.URL)
	if err != nil {
		x.t.Fatal(err)
	}
	defer blobs.Close()
	s, err := store.Open(in, store.Options{Blobs: blobs, OnDemand: true, Small: 1})
	if err != nil {
		x.t.Fatal(err)
	}
	defer s.Close()
	set, err := s.Acquire(ctx, "test", []dsec.LayerRef{dsec.LayerRef(x.o.digest)})
	if err != nil {
		x.t.Fatal(err)
	}
	if whole, err := set.Layers[0].Whole(); err != nil || whole {
		x.t.Fatalf("whole %v, %v", whole, err)
	}
	x.dir = filepath.Dir(set.Layers[0].Meta)
}

func (x *Machine) newMount(device string) *os.File {
	x.t.Helper()
	source := filepath.Join(x.dir, layer.MetaFile)
	if x.mech.Loops {
		for _, path := range []*string{&source, &device} {
			dev := x.loop(*path, path == &device)
			defer dev.Close() // the mount has it
			*path = dev.Name()
		}
	}
	m, err := linux.NewFS("erofs").String("source", source).Flag("ro").String("device", device).
		Mount(unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV)
	if err != nil {
		x.t.Fatal(err)
	}
	return m
}

func (x *Machine) loop(path string, direct bool) *os.File {
	x.t.Helper()
	// Not by os.Open: the runtime would wait for events of it.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		x.t.Fatal(&os.PathError{Op: "open", Path: path, Err: err})
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	dev, err := linux.Loop(f, direct)
	if err != nil {
		x.t.Fatal(err)
	}
	return dev
}

func (x *Machine) close() {
	x.mount.Close() // of nil does no harm
	if x.o.Break != nil {
		x.o.Break(fault.Faults{})
	}
	x.Kill()
	x.data.Close()
	if x.at.Detach != nil {
		x.at.Detach()
	}
	if x.t.Failed() {
		x.t.Logf("servers said: %s", x.log.String())
	}
}

// Start starts a server.
func (x *Machine) Start() {
	x.t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		x.t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "control")
	defer theirs.Close()
	x.control = os.NewFile(uintptr(pair[0]), "control")
	c := self(x.t, serverEnv, x.order)
	c.ExtraFiles = append([]*os.File{theirs, x.data}, x.at.Files...)
	c.Stdout, c.Stderr = &x.log, &x.log
	if err := c.Start(); err != nil {
		x.t.Fatal(err)
	}
	x.server = c
}

func self(t testing.TB, env string, arg any) *exec.Cmd {
	t.Helper()
	raw, err := json.Marshal(arg)
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), env+"="+string(raw))
	return c
}

// Kill kills the server, and returns when it is gone.
func (x *Machine) Kill() { x.end(syscall.SIGKILL) }

// end ends the server: by SIGTERM it ends by itself, and leaves what waits to
// the next one as well.
func (x *Machine) end(by syscall.Signal) {
	if x.server != nil {
		_ = x.server.Process.Signal(by)
		_ = x.server.Wait() // it did not end well
		x.server = nil
		x.control.Close()
	}
}

// ask speaks to the server.
func (x *Machine) ask(c command) said {
	x.t.Helper()
	var s said
	err := json.NewEncoder(x.control).Encode(c)
	if err == nil {
		err = json.NewDecoder(x.control).Decode(&s)
	}
	if err != nil {
		x.t.Fatalf("ask server: %v; %s", err, x.log.String())
	}
	return s
}

// Trouble makes the store of the server go wrong.
func (x *Machine) Trouble(t trouble) {
	x.t.Helper()
	if x.o.Break != nil {
		x.o.Break(t.faults())
		return
	}
	x.order.Trouble = t
	x.ask(command{Trouble: &t})
}

// reader prepares a process that reads.
func (x *Machine) reader(r reading) *exec.Cmd {
	x.t.Helper()
	r.Tree = x.o.tree
	return reader(x.t, r, x.mount)
}

func reader(t testing.TB, r reading, mount *os.File) *exec.Cmd {
	t.Helper()
	c := self(t, readerEnv, r)
	c.ExtraFiles = []*os.File{mount}
	return c
}

// Read has a process of its own read a file of a tree, or all ("") of them, from a
// mount that shows the tree, and compare. It fails after a bound.
func Read(t testing.TB, mount *os.File, tree, file string) error {
	t.Helper()
	return bounded(reader(t, reading{Tree: tree, File: file}, mount), io.Discard)
}

// Read has a process read; it fails after a bound and is killed then.
func (x *Machine) Read(r reading) error { return bounded(x.reader(r), io.Discard) }

// bounded runs a command. One that stands in the kernel is not waited for for
// ever: it can be killed there.
func bounded(c *exec.Cmd, out io.Writer) error {
	var said bytes.Buffer
	c.Stdout, c.Stderr = out, &said
	if err := c.Start(); err != nil {
		return err
	}
	kill := time.AfterFunc(readersBy, func() { _ = c.Process.Kill() })
	defer kill.Stop()
	if err := c.Wait(); err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(said.String()))
	}
	return nil
}
