package qemu

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// temporary begins the names of what is being made or removed.
const temporary = "tmp-"

// templateTime bounds the boot of a template, until its guest is ready.
const templateTime = 3 * time.Minute

// BuildTemplate returns the template of a shape. It waits for other processes that
// build in the same directory. What a builder leaves that is killed is removed
// by the next.
func (d *Driver) BuildTemplate(ctx context.Context, s vmm.Shape, ready vmm.Ready) (vmm.Template, error) {
	if err := s.Check(); err != nil {
		return vmm.Template{}, err
	}
	if s.Balloon {
		return vmm.Template{}, dsec.Errorf(dsec.Unsupported, "build template", "virtual machine", "it has a balloon: what a clone gave back would be taken from its template")
	}
	l := line{accel: d.accelOf(s.Kernel.SHA256), shape: s}
	ident := d.identity(l)
	t := vmm.Template{Key: ident.key()}
	unlock, err := lockFile(ctx, filepath.Join(d.cfg.Dir, "lock"))
	if err != nil {
		return vmm.Template{}, err
	}
	defer unlock()
	if err := d.sweep(); err != nil {
		return vmm.Template{}, err
	}
	switch err := d.load(ctx, t.Key); {
	case err == nil:
		return t, nil
	case dsec.ClassOf(err) == dsec.Corrupt:
		slog.Warn("a template of virtual machines is damaged: it is built again", "key", t.Key, "error", err)
		if err := d.remove(t.Key); err != nil {
			return vmm.Template{}, err
		}
	case dsec.ClassOf(err) != dsec.NotFound:
		return vmm.Template{}, err
	}
	if err := d.build(ctx, l, ident, ready); err != nil {
		return vmm.Template{}, err
	}
	d.dropOldest(t.Key)
	// What was written is what will be cloned.
	return t, d.load(ctx, t.Key)
}

// build boots a template and writes it.
func (d *Driver) build(ctx context.Context, l line, ident identity, ready vmm.Ready) (err error) {
	work, err := os.MkdirTemp(d.cfg.Dir, temporary)
	if err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), "make template", d.cfg.Dir, cause(err))
	}
	defer func() { _ = os.RemoveAll(work) }()
	ram, err := zeros(l.shape.Memory, false)
	if err != nil {
		return err
	}
	defer func() { _ = ram.Close() }()
	m, err := d.bootTemplate(ctx, l, ram)
	if err != nil {
		return err
	}
	defer m.Kill()
	man := manifest{Format: format, Kind: kindTemplate, Identity: ident}
	err = m.settle(ctx, ready, templateTime)
	if err == nil {
		err = m.call(ctx, "stop", nil, nil)
	}
	if err == nil {
		err = m.shareMemory(ctx, true)
	}
	if err == nil {
		err = failpoint.Hit(ctx, "qemu.template.stopped")
	}
	if err == nil {
		man.State, err = writeTo(work, "state", func(f *os.File) (content, error) {
			return m.save(ctx, f, maxState(kindTemplate, l.shape.Memory))
		})
	}
	if err != nil {
		return m.abandon("build template", err)
	}
	m.Kill() // nobody writes the memory any more
	got, err := writeTo(work, "ram", func(f *os.File) (content, error) {
		if err := f.Truncate(l.shape.Memory); err != nil {
			return content{}, err
		}
		sum, err := copyRAM(ctx, f, ram, l.shape.Memory)
		return content{l.shape.Memory, sum}, err
	})
	if err != nil {
		return err
	}
	man.RAM = &got
	return publish(ctx, work, filepath.Join(d.cfg.Dir, ident.key()), man)
}

// bootTemplate boots a machine with nothing in its slots, whose memory is a file.
func (d *Driver) bootTemplate(ctx context.Context, l line, ram *os.File) (*machine, error) {
	files := &inherit{}
	l.kernel = files.add(openChecked(ctx, l.shape.Kernel))
	l.initramfs = files.add(openChecked(ctx, l.shape.Initramfs))
	l.emptySlots(files)
	if ram != nil {
		l.ram, l.shared = files.lend(ram), true
	}
	return d.launch(ctx, l, files)
}

func (l *line) emptySlots(files *inherit) {
	for _, n := range l.shape.Pmem {
		l.slots = append(l.slots, files.add(zeros(n, true)))
	}
	if l.shape.Disk > 0 {
		l.disk = files.add(zeros(l.shape.Disk, false))
	}
	for _, n := range l.shape.Blocks {
		l.blocks = append(l.blocks, files.add(emptyDisk(n)))
	}
}

// settle waits until the guest is ready.
func (m *machine) settle(ctx context.Context, ready vmm.Ready, limit time.Duration) error {
	const op = "boot template"
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	// Reads of it end with the context, whether ready looks at that or not.
	stop := context.AfterFunc(ctx, func() { _ = m.agent.SetDeadline(time.Unix(1, 0)) })
	err := ready(ctx, m.agent)
	stop()
	if err == nil {
		return nil
	}
	if e := ctx.Err(); e != nil {
		return dsec.Errorf(dsec.ClassOf(e), op, "virtual machine", "the guest is not ready: %w; %s", e, m.said)
	}
	select {
	case <-m.done:
	case <-time.After(time.Second): // its connection ends before it does
	}
	if own := m.Err(); own != nil {
		return dsec.E(dsec.Unavailable, op, "virtual machine", own)
	}
	return dsec.Errorf(dsec.ClassOf(err), op, "virtual machine", "%w; %s", err, m.said)
}

// writeTo makes a file that nobody is to write again.
func writeTo(dir, name string, write func(*os.File) (content, error)) (content, error) {
	name = filepath.Join(dir, name)
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return content{}, dsec.E(fault.Class(err, dsec.Internal), "make", name, cause(err))
	}
	c, err := write(f)
	if err == nil {
		err = f.Chmod(0o444)
	}
	if err == nil {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err != nil {
		return content{}, dsec.E(fault.Class(err, dsec.Internal), "write", name, cause(err))
	}
	return c, nil
}

// publish writes the manifest, without which a directory is nothing, and gives the
// directory its name.
func publish(ctx context.Context, work, dir string, man manifest) error {
	text := man.encode()
	_, err := writeTo(work, "manifest.json", func(f *os.File) (content, error) {
		_, err := f.Write(text)
		return content{}, err
	})
	if err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, "qemu.template.written"); err != nil {
		return err
	}
	if err := os.Rename(work, dir); err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), "write", dir, err)
	}
	above, err := os.Open(filepath.Dir(dir))
	if err != nil {
		return dsec.E(dsec.Internal, "write", dir, cause(err))
	}
	defer func() { _ = above.Close() }()
	if err := above.Sync(); err != nil {
		return dsec.E(dsec.Internal, "write", dir, cause(err))
	}
	return nil
}

// sweep removes what builders left that were killed; only under the lock.
func (d *Driver) sweep() error {
	entries, err := os.ReadDir(d.cfg.Dir)
	if err != nil {
		return dsec.E(dsec.Internal, "read", d.cfg.Dir, cause(err))
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), temporary) {
			if err := os.RemoveAll(filepath.Join(d.cfg.Dir, e.Name())); err != nil {
				return dsec.E(dsec.Internal, "remove half a template", e.Name(), err)
			}
		}
	}
	return nil
}

// Clone starts a machine where the template stopped. Its memory is the template's
// until it writes.
func (d *Driver) Clone(ctx context.Context, t vmm.Template, dev vmm.Devices) (vmm.VM, error) {
	w, err := d.Prepare(ctx, t, dev)
	if err != nil {
		return nil, err
	}
	return w.Begin(ctx)
}

// waiting is a QEMU that waits for the state of its template.
type waiting struct {
	m     *machine
	state []byte
	once  atomic.Bool
}

// Prepare starts the QEMU of a clone, which takes half of the time of one.
func (d *Driver) Prepare(ctx context.Context, t vmm.Template, dev vmm.Devices) (vmm.Waiting, error) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	man, state, ram, err := d.open(ctx, t.Key)
	if err != nil {
		return nil, err
	}
	files := &inherit{}
	n := files.add(ram, nil)
	m, err := d.incoming(ctx, man, dev, files, n)
	if err != nil {
		return nil, err
	}
	if err := m.shareMemory(ctx, true); err != nil {
		return nil, m.abandon("clone", err)
	}
	return &waiting{m: m, state: state}, nil
}

func (w *waiting) Begin(ctx context.Context) (vmm.VM, error) {
	if w.once.Swap(true) {
		return nil, dsec.Errorf(dsec.IllegalState, "clone", "virtual machine", "it has begun, or was dropped")
	}
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	state, err := linux.SealedFile("dsec-vm-state", w.state)
	if err == nil {
		err = w.m.load(ctx, state)
		_ = state.Close()
	}
	if err == nil {
		err = w.m.call(ctx, "cont", nil, nil)
	}
	if err != nil {
		return nil, w.m.abandon("clone", err)
	}
	return w.m, nil
}

func (w *waiting) Drop() {
	if !w.once.Swap(true) {
		w.m.Kill()
	}
}

// incoming starts a QEMU that waits for the state of a manifest. ram is 0, or the number
// of a template's memory in files, which it takes.
func (d *Driver) incoming(ctx context.Context, man manifest, dev vmm.Devices, files *inherit, ram int) (*machine, error) {
	l := line{accel: man.Identity.Accel, shape: man.Identity.shape(), ram: ram}
	want := d.identity(l)
	switch {
	case !want.equal(man.Identity):
		files.close()
		return nil, dsec.Errorf(dsec.Unsupported, "load state", "virtual machine", "it is of %s with another command line; this is %s", dsec.Quote(man.Identity.QEMU), dsec.Quote(d.version))
	case l.accel != d.accelOf(man.Identity.Kernel):
		files.close()
		return nil, dsec.Errorf(dsec.Unsupported, "load state", "virtual machine", "it is of accelerator %s, and %s is used here", dsec.Quote(l.accel), d.accelOf(man.Identity.Kernel))
	}
	if err := dev.Check(l.shape); err != nil {
		files.close()
		return nil, err
	}
	if l.shape.Firmware {
		l.incoming = true
		l.kernel = files.add(openChecked(ctx, vmm.File{Path: dev.Firmware, SHA256: man.Identity.Kernel}))
	} else {
		l.kernel = files.add(openStub())
	}
	l.devices(files, dev)
	return d.launch(ctx, l, files)
}

// lockFile waits for a lock until the context ends.
func lockFile(ctx context.Context, name string) (unlock func(), err error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, dsec.E(fault.Class(err, dsec.Internal), "lock", name, cause(err))
	}
	if err := linux.FlockContext(ctx, f); err != nil {
		return nil, dsec.E(dsec.ClassOf(err), "lock", name, err)
	}
	return func() { _ = f.Close() }, nil
}
