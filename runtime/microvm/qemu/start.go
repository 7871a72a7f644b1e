package qemu

import (
	"context"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// startTime bounds the start of a QEMU, until it answers.
const startTime = 30 * time.Second

// inherit are the files that a QEMU inherits; all are closed once it was started.
type inherit struct {
	files []*os.File
	keep  map[*os.File]bool // the caller's
	err   error

	name string              // of the machine; "": it ends with this process
	ends map[string]*os.File // ours of the connections, by name
}

// add returns the number that f will have there, and takes it.
func (i *inherit) add(f *os.File, err error) int {
	if err != nil {
		if i.err == nil {
			i.err = err
		}
		return 0
	}
	i.files = append(i.files, f)
	return 2 + len(i.files)
}

// lend is add for a file that the caller goes on to use.
func (i *inherit) lend(f *os.File) int {
	if i.keep == nil {
		i.keep = map[*os.File]bool{}
	}
	i.keep[f] = true
	return i.add(f, nil)
}

// pair makes a connection, of which QEMU has one end. A machine with a name has the other
// kept as well.
func (i *inherit) pair(name string) (int, net.Conn) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return i.add(nil, dsec.E(dsec.Internal, "socketpair", name, err)), nil
	}
	here := os.NewFile(uintptr(fds[0]), name)
	n := i.add(os.NewFile(uintptr(fds[1]), name), nil)
	conn, err := net.FileConn(here)
	if err != nil {
		_ = here.Close()
		return i.add(nil, dsec.E(dsec.Internal, "open socket", name, err)), nil
	}
	i.ends[name] = here // FileConn has a duplicate
	return n, conn
}

func (i *inherit) close() {
	for _, f := range i.files {
		if !i.keep[f] {
			_ = f.Close()
		}
	}
	for _, f := range i.ends {
		_ = f.Close()
	}
	i.files, i.ends = nil, nil
}

// launch starts the QEMU of a line, whose devices are in files already, and returns
// when it answers on QMP; its guest may run by then. It takes the files.
func (d *Driver) launch(ctx context.Context, l line, files *inherit) (_ *machine, err error) {
	const op, object = "start", "virtual machine"
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	defer files.close()
	var qmp, agent net.Conn
	files.ends = map[string]*os.File{}
	l.firmware = d.cfg.Firmware
	if l.shape.NIC && l.tap == 0 {
		var other net.Conn
		l.cable, other = files.pair("cable")
		closeConns(other)
	}
	l.qmp, qmp = files.pair("qmp")
	l.agent, agent = files.pair("agent")
	out, in, perr := os.Pipe()
	if perr != nil {
		files.add(nil, dsec.E(dsec.Internal, "make pipe", "", perr))
	}
	defer func() {
		closeAll(in)
		if err != nil {
			closeAll(out)
			closeConns(qmp, agent)
		}
	}()
	if files.err == nil && ctx.Err() != nil {
		files.err = dsec.E(dsec.ClassOf(ctx.Err()), op, object, ctx.Err())
	}
	if files.err != nil {
		return nil, files.err
	}
	uid, giveBack, err := d.user()
	if err != nil {
		return nil, err
	}
	ident := d.identity(l)
	kept := map[string]*os.File{"qmp": files.ends["qmp"], "agent": files.ends["agent"], "said": out}
	proc, rec, err := d.spawn(ctx, files.name, ident, kept, Command{Path: d.cfg.Path, Args: l.args(), Files: files.files, Output: in, UID: uid, GID: uid, Groups: d.groups(l.accel)})
	if err != nil {
		giveBack()
		class := dsec.ClassOf(err)
		if files.name == "" || class == dsec.Internal {
			class = dsec.Unavailable
		}
		return nil, dsec.E(class, op, d.cfg.Path, err)
	}
	free := func() {
		if rec == nil || d.forget(rec) == nil {
			giveBack()
		}
	}
	m := &machine{shape: l.shape, ident: ident, proc: proc, agent: agent, said: newTail(l.shape), free: free, rec: rec, resets: make(chan struct{}, 1), stuck: make(chan string, 1), done: make(chan struct{})}
	// Ours are closed before anybody waits for the end of the pipe or a connection.
	closeAll(in)
	in = nil
	files.close()
	m.run(out, newMonitor(qmp, m.event))
	if err := m.call(ctx, "qmp_capabilities", nil, nil); err != nil {
		return nil, m.abandon(op, err)
	}
	return m, nil
}

// abandon ends a machine that nobody has yet, for an error.
func (m *machine) abandon(op string, err error) error {
	m.Kill()
	class := dsec.ClassOf(err)
	if class == dsec.SandboxGone { // there is no sandbox yet
		class = dsec.Unavailable
		if own := m.Err(); own != nil {
			class, err = dsec.ClassOf(own), own
		}
	}
	if class == dsec.SandboxGone {
		class = dsec.Unavailable
	}
	return dsec.E(class, op, "virtual machine", err)
}

func closeAll(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

func closeConns(conns ...net.Conn) {
	for _, c := range conns {
		if c != nil {
			_ = c.Close()
		}
	}
}

// Start boots a machine.
func (d *Driver) Start(ctx context.Context, s vmm.Shape, dev vmm.Devices) (vmm.VM, error) {
	if err := check(s, dev); err != nil {
		return nil, err
	}
	files := &inherit{}
	l := line{accel: d.accelOf(s.Kernel.SHA256), shape: s}
	l.kernel = files.add(openChecked(ctx, s.Kernel))
	if !s.Firmware {
		l.initramfs = files.add(openChecked(ctx, s.Initramfs))
	}
	l.devices(files, dev)
	m, err := d.launch(ctx, l, files)
	if err != nil {
		return nil, err
	}
	return m, nil
}

func check(s vmm.Shape, dev vmm.Devices) error {
	if err := s.Check(); err != nil {
		return err
	}
	return dev.Check(s)
}

// devices opens what is behind the slots.
func (l *line) devices(files *inherit, dev vmm.Devices) {
	s := l.shape
	files.name = dev.Name
	for i, n := range s.Pmem {
		if i < len(dev.Pmem) && dev.Pmem[i] != "" {
			l.slots = append(l.slots, files.add(openSized(dev.Pmem[i], os.O_RDONLY, n)))
		} else {
			l.slots = append(l.slots, files.add(zeros(n, true)))
		}
	}
	if s.Firmware {
		l.disk = files.add(openOverlay(dev.Disk))
		l.base = files.lend(dev.Base)
	} else if s.Disk > 0 {
		l.disk = files.add(openDisk(dev.Disk, s.Disk))
	}
	for i, n := range s.Blocks {
		if i < len(dev.Blocks) && dev.Blocks[i] != "" {
			l.blocks = append(l.blocks, files.add(openAtMost(dev.Blocks[i], os.O_RDONLY, n)))
		} else {
			l.blocks = append(l.blocks, files.add(emptyDisk(n)))
		}
	}
	if dev.Tap != nil {
		l.tap = files.lend(dev.Tap)
	}
}
