package wasm

import (
	"bytes"
	"context"
	"errors"

	"github.com/tetratelabs/wazero/experimental"
	"golang.org/x/sys/unix"
)

// memory is that of one instance: pages of the kernel's own, so that none was ever
// anybody else's and all are given back at the end.
type memory struct {
	limit   uint64 // bytes
	mapped  []byte
	most    uint64 // bytes that there were
	refused bool   // more was asked for
}

var _ experimental.LinearMemory = (*memory)(nil)

func (m *memory) allocate(_, most uint64) experimental.LinearMemory {
	size := min(most, m.limit)
	if size == 0 {
		size = 1
	}
	b, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		m.refused = true
		return m
	}
	m.mapped = b
	return m
}

// Reallocate is nil if it would be more than there may be.
func (m *memory) Reallocate(size uint64) []byte {
	if size > uint64(len(m.mapped)) || size > m.limit {
		m.refused = true
		return nil
	}
	m.most = max(m.most, size)
	return m.mapped[:size]
}

// Free gives it back.
func (m *memory) Free() {
	if m.mapped != nil {
		_ = unix.Munmap(m.mapped) // of our own making
		m.mapped = nil
	}
}

var errOutput = errors.New("more output than the call may have")

// output keeps what a module writes to a stream, up to the limit, and ends the module
// when there is more.
type output struct {
	bytes.Buffer
	most uint64
	over bool
	end  context.CancelCauseFunc
}

func (o *output) Write(p []byte) (int, error) {
	room := o.most - uint64(o.Len())
	if uint64(len(p)) <= room {
		return o.Buffer.Write(p)
	}
	o.Buffer.Write(p[:room])
	o.over = true
	o.end(errOutput)
	return int(room), errOutput
}
