package layer

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// The file that says which chunks of a data file are here, see
// docs/formats/layer.md.
const (
	presenceMagic = "DSECPRS\x01" // the last byte is the version
	presenceHead  = 4096
	bootOffset    = 16
	bootSize      = 36
)

// Presence says which chunks of an incomplete data file are here. It is two bit
// maps in a mapped file. The live one survives the end of the programs that
// write it, but after a power failure it may name chunks whose bytes are not on
// the disk; the synced one never does, and is what counts in the next boot.
//
// Methods may be called concurrently, except Close. One process at a time writes it.
type Presence struct {
	file   *os.File
	m      []byte
	live   []uint32
	synced []uint32
	chunks int
	count  atomic.Int64 // of this process's view; exact if it is the only writer
	mu     sync.Mutex   // of changes to the synced map

	landing sync.RWMutex // for reading: chunks are being written
	syncing sync.Mutex   // of Sync: an error of the disk is told once
	pending []uint32     // what a Sync is writing, under mu
	flush   func(data *os.File) error
}

func presenceMap(chunks int) int {
	return (chunks + presenceHead*8 - 1) / (presenceHead * 8) * presenceHead
}

// CreatePresence makes the file for that many chunks, none of which is here.
func CreatePresence(path string, chunks int) error {
	boot, err := bootID()
	if err != nil {
		return err
	}
	head := make([]byte, presenceHead+2*presenceMap(chunks))
	copy(head, presenceMagic)
	binary.LittleEndian.PutUint64(head[8:], uint64(chunks))
	copy(head[bootOffset:], boot)
	return os.WriteFile(path, head, 0o600)
}

// OpenPresence maps the file, which it owns from then on, also with an error.
func OpenPresence(f *os.File, chunks int) (*Presence, error) {
	p, err := openPresence(f, chunks)
	if err != nil {
		_ = f.Close()
		return nil, dsec.E(dsec.Corrupt, "read presence", f.Name(), err)
	}
	return p, nil
}

func openPresence(f *os.File, chunks int) (*Presence, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	size := presenceMap(chunks)
	if chunks < 1 || chunks > MaxChunks || st.Size() != int64(presenceHead+2*size) {
		return nil, fmt.Errorf("%d bytes for %d chunks", st.Size(), chunks)
	}
	m, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	if string(m[:8]) != presenceMagic || binary.LittleEndian.Uint64(m[8:]) != uint64(chunks) {
		return nil, unmapAnd(m, fmt.Errorf("not a presence file of version 1 for %d chunks", chunks))
	}
	p := &Presence{file: f, m: m, chunks: chunks, flush: fdatasync, live: words(m[presenceHead:][:size]), synced: words(m[presenceHead+size:][:size])}
	if err := p.adopt(); err != nil {
		return nil, unmapAnd(m, err)
	}
	return p, nil
}

func unmapAnd(m []byte, err error) error {
	_ = unix.Munmap(m)
	return err
}

// words shows mapped memory, which begins at a page, as what the processor
// changes in one step.
func words(b []byte) []uint32 { return unsafe.Slice((*uint32)(unsafe.Pointer(&b[0])), len(b)/4) }

// adopt makes the live map that of this boot.
func (p *Presence) adopt() error {
	boot, err := bootID()
	if err != nil {
		return err
	}
	if string(p.m[bootOffset:][:bootSize]) != boot {
		copy(p.live, p.synced)
		copy(p.m[bootOffset:], boot)
	}
	n := 0
	for _, w := range p.live {
		n += bits.OnesCount32(w)
	}
	if n > p.chunks {
		return fmt.Errorf("%d of %d chunks", n, p.chunks)
	}
	p.count.Store(int64(n))
	return nil
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	id := strings.TrimSpace(string(b))
	if len(id) != bootSize {
		return "", fmt.Errorf("boot id of %d bytes", len(id))
	}
	return id, nil
}

// Has says whether a chunk is here.
func (p *Presence) Has(i int) bool { return atomic.LoadUint32(&p.live[i/32])&(1<<(i%32)) != 0 }

// Set notes that the bytes of a chunk are in the data file.
func (p *Presence) Set(i int) {
	if atomic.OrUint32(&p.live[i/32], 1<<(i%32))&(1<<(i%32)) == 0 {
		p.count.Add(1)
	}
}

// Clear notes, durably, that a chunk is not here, so that its bytes can go.
func (p *Presence) Clear(i int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if atomic.AndUint32(&p.live[i/32], ^uint32(1<<(i%32)))&(1<<(i%32)) != 0 {
		p.count.Add(-1)
	}
	atomic.AndUint32(&p.synced[i/32], ^uint32(1<<(i%32)))
	if p.pending != nil { // it may be here again, and not on the disk, when that is done
		p.pending[i/32] &^= 1 << (i % 32)
	}
	return unix.Msync(p.m, unix.MS_SYNC)
}

// Count is how many chunks are here.
func (p *Presence) Count() int { return int(p.count.Load()) }

// Complete says whether all are.
func (p *Presence) Complete() bool { return p.Count() == p.chunks }

// Land writes a chunk and notes that it is here, both before or both after a Sync
// finds that what was written has not come to the disk.
func (p *Presence) Land(i int, write func() error) error {
	p.landing.RLock()
	defer p.landing.RUnlock()
	err := write()
	if err == nil {
		p.Set(i)
	}
	return err
}

// Sync makes durable what is here: the data first, then that it is. If the data
// cannot be written to the disk, it notes that nothing is here of which it is not
// known to be there: what was written may be forgotten by the kernel at any moment,
// and has been already if it tells of an error, which it does once. So one at a
// time writes, and notes what has become of it.
func (p *Presence) Sync(data *os.File) error {
	p.syncing.Lock()
	defer p.syncing.Unlock()
	p.mu.Lock()
	p.pending = make([]uint32, len(p.live))
	for i := range p.live {
		p.pending[i] = atomic.LoadUint32(&p.live[i])
	}
	p.mu.Unlock()
	if err := p.flush(data); err != nil {
		p.dropUnsynced()
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, w := range p.pending {
		atomic.StoreUint32(&p.synced[i], w)
	}
	p.pending = nil
	return os.NewSyscallError("msync", unix.Msync(p.m, unix.MS_SYNC))
}

func fdatasync(data *os.File) error {
	return os.NewSyscallError("fdatasync", unix.Fdatasync(int(data.Fd())))
}

// dropUnsynced waits for what is being written: it may be what was lost.
func (p *Presence) dropUnsynced() {
	p.landing.Lock()
	defer p.landing.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pending = nil
	for i := range p.live {
		keep := atomic.LoadUint32(&p.synced[i])
		p.count.Add(-int64(bits.OnesCount32(atomic.AndUint32(&p.live[i], keep) &^ keep)))
	}
}

// File is what it is mapped from, to hand it to another process.
func (p *Presence) File() *os.File { return p.file }

// Close unmaps it. What is noted stays.
func (p *Presence) Close() error {
	err := unix.Munmap(p.m)
	if e := p.file.Close(); err == nil {
		err = e
	}
	return err
}

// ReadPresence says which chunks are here, at the moment it is asked, without
// becoming the one who writes the file. The file stays the caller's, and open as
// long as it asks.
func ReadPresence(f *os.File, chunks int) (has func(chunk int) bool, err error) {
	const op = "read presence"
	st, err := f.Stat()
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, f.Name(), err)
	}
	boot, err := bootID()
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, f.Name(), err)
	}
	head, size := make([]byte, presenceHead), presenceMap(chunks)
	if n, _ := f.ReadAt(head, 0); n < len(head) || st.Size() != int64(presenceHead+2*size) || string(head[:8]) != presenceMagic ||
		binary.LittleEndian.Uint64(head[8:]) != uint64(chunks) {
		return nil, dsec.Errorf(dsec.Corrupt, op, f.Name(), "not a presence file of version 1 for %d chunks", chunks)
	}
	live := int64(presenceHead)
	if string(head[bootOffset:][:bootSize]) != boot {
		live += int64(size)
	}
	return func(i int) bool {
		var word [4]byte
		_, err := f.ReadAt(word[:], live+int64(i/32*4))
		return err == nil && binary.LittleEndian.Uint32(word[:])&(1<<(i%32)) != 0
	}, nil
}
