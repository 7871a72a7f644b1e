package container

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	goruntime "runtime"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/runtime"
)

var _ runtime.Celler = (*Runtime)(nil)

// cells are those of one sandbox, which another program makes (internal/hold/native/cell.c).
type cells struct {
	id    dsec.SandboxID
	group *cgroup.Group
	conn  net.Conn
	in    cellReader
	rest  int64 // tasks in the sandbox when no call is
	ready bool  // the last call has come to all it came to
}

// cellCaps are the rights of the server, in the sandbox's own user namespace: to make
// namespaces and mounts, to become a task, to end it, and to give it its files.
var cellCaps = capBits("chown", "dac_override", "fowner", "kill", "setgid", "setuid", "setpcap", "net_admin", "sys_chroot", "sys_admin", "sys_resource")

// Cells makes a sandbox one of cells.
func (r *Runtime) Cells(ctx context.Context, id dsec.SandboxID, s runtime.CellSpec) (runtime.Cells, error) {
	const op = "make cells of sandbox"
	sb, err := r.boxes.Live(op, id)
	if err != nil {
		return nil, err
	}
	arch := confine.Arch(goruntime.GOARCH)
	task, err := confine.Filter{Profile: confine.Build, Arch: arch, Local: !s.Loopback}.Program()
	if err != nil {
		return nil, err
	}
	interpreter, err := confine.Filter{Profile: confine.Build, Arch: arch, Local: !s.Loopback, Enter: true}.Program()
	if err != nil {
		return nil, err
	}
	setup, err := encodeCellSetup(s, task, interpreter)
	if err != nil {
		return nil, err
	}
	sock, err := r.hold.StartCells(ctx, hold.CellsSpec{Sandbox: string(id), OOMScoreAdj: confine.OOMScoreAdj,
		Caps: hold.Caps{Bounding: uint64(cellCaps), Permitted: uint64(cellCaps)}})
	if err != nil {
		return nil, r.explain(op, sb, err)
	}
	conn, err := net.FileConn(sock)
	_ = sock.Close()
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, string(id), err)
	}
	sb.Mu.Lock()
	group := sb.group
	sb.Mu.Unlock()
	c := &cells{id: id, group: group, conn: conn, in: cellReader{r: bufio.NewReaderSize(conn, 16<<10)}}
	if err := c.begin(ctx, setup); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return c, nil
}

// begin tells the server what its cells have in common, and counts who is there.
func (c *cells) begin(ctx context.Context, setup []byte) error {
	const op = "make cells of sandbox"
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err := c.conn.Write(setup)
	if err != nil {
		return c.fail(ctx, op, err)
	}
	kind, body, err := c.in.next()
	switch {
	case err != nil:
		return c.fail(ctx, op, err)
	case kind == 'z' && len(body) >= 4:
		return dsec.Errorf(dsec.Invalid, "start interpreter", string(c.id), "%s", body[4:])
	case kind == 'x':
		err := decodeCellStep(body)
		if errors.Is(err, syscall.ENOENT) {
			return dsec.E(dsec.Invalid, op, string(c.id), err)
		}
		return dsec.E(dsec.Internal, op, string(c.id), err)
	case kind != 'R':
		return dsec.Errorf(dsec.Corrupt, op, string(c.id), "unknown frame %q", kind)
	}
	if c.rest, err = c.group.Tasks(); err != nil {
		return err
	}
	return nil
}

func (c *cells) fail(ctx context.Context, op string, err error) error {
	if ctx.Err() != nil {
		return dsec.E(dsec.ClassOf(ctx.Err()), op, string(c.id), context.Cause(ctx))
	}
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		return dsec.E(dsec.SandboxGone, op, string(c.id), err)
	}
	return dsec.E(dsec.ClassOf(err), op, string(c.id), err)
}

// Run is one call in the cell that is there.
func (c *cells) Run(ctx context.Context, run runtime.CellRun) (runtime.CellEnd, error) {
	const op = "run in cell"
	request, err := encodeCellRun(run)
	if err != nil {
		return runtime.CellEnd{}, err
	}
	before, err := c.group.OOMKills()
	if err != nil {
		return runtime.CellEnd{}, err
	}
	counts := c.group.NewPeak()
	c.ready = false
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })
	got := cellCollector{most: run.Output, back: run.Back}
	err = c.talk(request, &got)
	inTime := stop() // else the connection has ended, too
	after, oomErr := c.group.OOMKills()
	got.end.OOM = oomErr == nil && after > before
	got.end.Stdout, got.end.Stderr = got.out.Bytes(), got.err.Bytes()
	if counts {
		got.end.Peak, _ = c.group.Peak()
	}
	switch {
	case err != nil && got.end.OOM: // it took who makes the cells, too
		return got.end, nil
	case err != nil:
		return got.end, c.fail(ctx, op, err)
	case got.failed != nil && errors.Is(got.failed, syscall.ENOSPC):
		return got.end, dsec.E(dsec.NoSpace, op, string(c.id), got.failed)
	case got.failed != nil && !got.end.OOM:
		return got.end, dsec.E(dsec.Internal, op, string(c.id), got.failed)
	}
	c.ready = inTime && got.all
	return got.end, nil
}

// Settle is runtime.Cells's.
func (c *cells) Settle(ctx context.Context) bool {
	if !c.ready {
		return false
	}
	c.ready = false
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })
	kind, body, err := c.in.next()
	ended := err == nil && kind == 'C' && bytes.Equal(body, make([]byte, 4)) // it exited with 0
	clean := ended && c.alone(ctx)
	return stop() && clean // else the connection has ended, too
}

func (c *cells) talk(request []byte, got *cellCollector) error {
	if _, err := c.conn.Write(request); err != nil {
		return err
	}
	for {
		kind, body, err := c.in.next()
		if err != nil {
			return err
		}
		if last, err := got.add(kind, body); last || err != nil {
			return err
		}
	}
}

// alone asks the kernel whether there is nobody in the sandbox but who was before: a
// second proof, from outside, that does not depend on who makes the cells. A thread
// that has been waited for may be counted for a moment.
func (c *cells) alone(ctx context.Context) bool {
	for wait := time.Duration(0); wait < 100*time.Millisecond; wait = 2*wait + time.Millisecond {
		n, err := c.group.Tasks()
		if err != nil {
			return false
		}
		if n == c.rest && c.in.r.(*bufio.Reader).Buffered() == 0 {
			return true
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return false
		}
	}
	return false
}

// Close ends the server, and with it whatever it has made.
func (c *cells) Close() error {
	if err := c.conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return dsec.E(dsec.Internal, "close cells of sandbox", string(c.id), err)
	}
	return nil
}
