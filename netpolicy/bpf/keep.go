package bpf

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Keeper stores descriptors by name beyond the life of this process.
type Keeper interface {
	// Get returns a new descriptor, or NotFound.
	Get(ctx context.Context, name string) (*os.File, error)
	// Put stores a duplicate of f.
	Put(ctx context.Context, name string, f *os.File) error
	// Drop forgets it; unknown names are no error.
	Drop(ctx context.Context, name string) error
}

// layout names what the programs and their maps agree on. Programs of another
// layout stay on their links with their own maps until Add replaces them.
const layout = "gate1-"

func keptName(gate, of string) string { return layout + gate + "-" + of }

// Open takes over the gate of that name, or makes one. It is kept as a whole: its
// maps are before any link has a program over them.
func Open(ctx context.Context, k Keeper, gate string) (*Gate, error) {
	const op = "open gate"
	m := &Maps{}
	var missing bool
	for name, at := range m.each() {
		x, err := keptMap(ctx, k, keptName(gate, name))
		if errors.Is(err, dsec.NotFound.Err()) {
			missing = missing || name != younger
			continue
		}
		if err != nil {
			m.Close()
			return nil, dsec.E(dsec.Internal, op, gate, err)
		}
		*at = x
	}
	if missing {
		m.Close()
		var err error
		if m, err = newKept(ctx, k, gate); err != nil {
			return nil, dsec.E(dsec.Internal, op, gate, err)
		}
	}
	if m.Groups == nil {
		if err := m.makeYounger(ctx, k, gate); err != nil {
			m.Close()
			return nil, dsec.E(dsec.Internal, op, gate, err)
		}
	}
	g, err := New(m)
	if err != nil {
		m.Close()
		return nil, dsec.E(dsec.Internal, op, gate, err)
	}
	g.owns = true
	return g, nil
}

// younger is a map that the first version of this layout did not have, and whose
// programs know nothing of.
const younger = "dsec_groups"

func (m *Maps) makeYounger(ctx context.Context, k Keeper, gate string) (err error) {
	if m.Groups, err = ebpf.NewMap(specs()[younger]); err != nil {
		return fmt.Errorf("make map %s: %w", younger, err)
	}
	return keep(ctx, k, keptName(gate, younger), m.Groups)
}

func newKept(ctx context.Context, k Keeper, gate string) (*Maps, error) {
	m, err := NewMaps()
	if err != nil {
		return nil, err
	}
	for name, at := range m.each() {
		if err := keep(ctx, k, keptName(gate, name), *at); err != nil {
			m.Close()
			return nil, err
		}
	}
	return m, nil
}

func keep(ctx context.Context, k Keeper, name string, m *ebpf.Map) error {
	fd, err := unix.FcntlInt(uintptr(m.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("keep %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer func() { _ = f.Close() }()
	if err := k.Drop(ctx, name); err != nil { // of one that was never used
		return err
	}
	return k.Put(ctx, name, f)
}

func keptMap(ctx context.Context, k Keeper, name string) (*ebpf.Map, error) {
	f, err := k.Get(ctx, name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("take %s: %w", name, err)
	}
	return ebpf.NewMapFromFD(fd)
}
