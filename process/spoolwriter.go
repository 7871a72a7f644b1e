package process

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

// MaxFollowers of one stream.
const MaxFollowers = 16

// spoolMemory is how much of a stream is kept before there is a file: most
// commands say little, and making a file costs as much as starting one.
const spoolMemory = 16 << 10

// SpoolWriter writes a spool and tells its followers. One goroutine writes;
// everything else may be called concurrently. The file is made when there is
// more to keep than fits in memory.
//
// A write that the disk refuses is counted as dropped and never stops the
// command: the positions go on, and reading gives zeros there.
type SpoolWriter struct {
	create func() (*os.File, error)

	mu        sync.Mutex
	f         *os.File // nil while everything is in mem
	mem       []byte
	lost      bool // the file could not be made: mem is all that is kept
	why       error
	h         SpoolHeader
	seenFrom  int64 // [seenFrom, seenTo) was read by a follower
	seenTo    int64
	lostTo    int64 // bytes before this position were refused by the disk
	followers map[*Cursor]struct{}
	expected  time.Time     // until then the first follower is waited for; zero once it came
	space     chan struct{} // capacity 1: a follower moved or left
}

// firstFollower is how long a command that writes more than is kept is slowed
// down so that a follower who starts it and then follows misses nothing.
const firstFollower = 250 * time.Millisecond

// NewSpoolWriter begins a spool in an empty file, which it owns. Sizes of 0 are
// DefaultKeep.
func NewSpoolWriter(f *os.File, head, tail int64) (*SpoolWriter, error) {
	w, err := NewLazySpoolWriter(func() (*os.File, error) { return f, nil }, head, tail)
	if err != nil {
		return nil, err
	}
	if w.fileLocked(); w.lost { // nobody else knows w yet
		return nil, dsec.E(dsec.NoSpace, "make spool", f.Name(), w.why)
	}
	return w, nil
}

// NewLazySpoolWriter begins a spool whose file, once it is needed, create makes.
func NewLazySpoolWriter(create func() (*os.File, error), head, tail int64) (*SpoolWriter, error) {
	if head == 0 {
		head = DefaultKeep
	}
	if tail == 0 {
		tail = DefaultKeep
	}
	if head < 0 || tail < 0 || head > MaxKeep || tail > MaxKeep {
		return nil, dsec.Errorf(dsec.Invalid, "make spool", "", "head %d and tail %d, at most %d each", head, tail, MaxKeep)
	}
	return &SpoolWriter{create: create, h: SpoolHeader{Head: head, Tail: tail}, followers: map[*Cursor]struct{}{},
		expected: time.Now().Add(firstFollower), space: make(chan struct{}, 1)}, nil
}

// Image returns the bytes of the spool file as it would be, if there is none.
func (w *SpoolWriter) Image() ([]byte, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.f != nil {
		return nil, false
	}
	h := w.h
	if w.lost { // nothing follows what is in memory
		h.Head, h.Total, h.Dropped = int64(len(w.mem)), int64(len(w.mem)), 0
	}
	b := make([]byte, spoolData, spoolData+len(w.mem))
	copy(b, h.Encode())
	return append(b, w.mem...), true
}

// Bytes returns the whole stream so far, if no file was needed for it.
func (w *SpoolWriter) Bytes() ([]byte, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mem, w.f == nil && !w.lost
}

// fileLocked makes the file with what is in memory.
func (w *SpoolWriter) fileLocked() {
	f, err := w.create()
	if err == nil {
		if _, err = f.WriteAt(w.h.Encode(), 0); err == nil {
			_, err = f.WriteAt(w.mem, spoolData)
		}
		if err != nil {
			_ = f.Close()
		}
	}
	if err != nil {
		w.lost, w.why = true, err
		return
	}
	w.f, w.mem = f, nil
}

// Header returns the present header.
func (w *SpoolWriter) Header() SpoolHeader {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.h
}

// Write appends p. While a follower is behind by a whole ring it waits for it,
// and for a short time for the first one, until stop is closed; then it no
// longer waits.
func (w *SpoolWriter) Write(p []byte, stop <-chan struct{}) { w.WriteUntil(p, stop, nil) }

// WriteUntil is Write that waits for nobody any more when halt is closed and
// returns what it has not written then.
func (w *SpoolWriter) WriteUntil(p []byte, stop, halt <-chan struct{}) (rest []byte) {
	for len(p) > 0 {
		n := w.writeSome(p, false)
		if n == 0 {
			late := w.late()
			select {
			case <-w.space:
			case <-late.C:
			case <-stop:
				n = w.writeSome(p, true)
			case <-halt:
				late.Stop()
				return p
			}
			late.Stop()
		}
		p = p[n:]
	}
	return nil
}

// late fires when the first follower is not waited for any more; long after
// there is one.
func (w *SpoolWriter) late() *time.Timer {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.expected.IsZero() {
		return time.NewTimer(time.Hour)
	}
	return time.NewTimer(time.Until(w.expected))
}

func (w *SpoolWriter) writeSome(p []byte, force bool) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	room := w.roomLocked()
	if force {
		room = w.h.Tail
	}
	if room <= 0 {
		return 0
	}
	off, n := w.h.piece(w.h.Total, w.h.Total+min(int64(len(p)), room))
	if w.f == nil && !w.lost {
		if w.h.Total+n <= min(spoolMemory, w.h.Head) {
			w.mem = append(w.mem, p[:n]...)
			w.h.Total += n
			w.wakeLocked()
			return int(n)
		}
		w.fileLocked()
	}
	err := w.why
	if w.f != nil {
		_, err = w.f.WriteAt(p[:n], off)
	}
	before := w.h.Start()
	w.h.Total += n
	w.dropLocked(before, w.h.Start())
	if err != nil {
		w.h.Dropped += n
		w.lostTo = w.h.Total
	}
	w.saveLocked()
	w.wakeLocked()
	return int(n)
}

// roomLocked is how many bytes may be written without taking any from a
// follower.
func (w *SpoolWriter) roomLocked() int64 {
	if w.h.Total < w.h.Head {
		return w.h.Head - w.h.Total
	}
	room := w.h.Tail
	if !w.expected.IsZero() && time.Now().Before(w.expected) {
		room = w.h.Tail - (w.h.Total - w.h.Head)
	}
	for c := range w.followers {
		room = min(room, w.h.Tail-(w.h.Total-max(c.acked, w.h.Start())))
	}
	return room
}

// dropLocked counts what nobody read of [from, to), which is overwritten.
func (w *SpoolWriter) dropLocked(from, to int64) {
	from = max(from, w.lostTo) // counted when it was refused
	if from >= to {
		return
	}
	read := min(to, w.seenTo) - max(from, w.seenFrom)
	w.h.Dropped += to - from - max(read, 0)
}

func (w *SpoolWriter) saveLocked() {
	if w.f == nil {
		return
	}
	_, _ = w.f.WriteAt(w.h.Encode(), 0) // overwrites a block that exists; what fails here is told by the next
}

func (w *SpoolWriter) wakeLocked() {
	for c := range w.followers {
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
}

// End says that nothing follows.
func (w *SpoolWriter) End() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.h.EOF = true
	w.saveLocked()
	w.wakeLocked()
}

// Close closes the file, if there is one. Followers go on.
func (w *SpoolWriter) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.f == nil {
		return nil
	}
	return w.f.Close()
}

// Progress says what of a stream can be read: positions below Head of the
// spool, and from Start to Total.
type Progress struct {
	Total int64
	Start int64
	EOF   bool

	Inline   []byte // bytes from InlineAt up to Total, if there is no file yet
	InlineAt int64
}

// ErrFollowers says that a stream has MaxFollowers already.
var ErrFollowers = errors.New("too many followers")

// Follow adds a follower that has read everything before offset.
func (w *SpoolWriter) Follow(offset int64) (*Cursor, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.followers) >= MaxFollowers {
		return nil, dsec.E(dsec.ResourceExhausted, "follow output", "", ErrFollowers)
	}
	if offset < 0 {
		return nil, dsec.Errorf(dsec.Invalid, "follow output", "", "offset %d is negative", offset)
	}
	c := &Cursor{w: w, acked: min(offset, w.h.Total), told: -1, wake: make(chan struct{}, 1)}
	w.followers[c] = struct{}{}
	w.expected = time.Time{}
	w.freeLocked()
	return c, nil
}

// Cursor is a follower's place in a stream; a Source.
type Cursor struct {
	w     *SpoolWriter
	acked int64 // guarded by w.mu
	told  int64 // Total that Wait returned last; of the one goroutine that waits
	wake  chan struct{}
}

// Wait returns the progress once it is news: at the first call, after a write
// and at the end.
func (c *Cursor) Wait(ctx context.Context) (Progress, error) {
	for {
		if p := c.progress(); p.Total > c.told || p.EOF {
			c.told = p.Total
			return p, nil
		}
		select {
		case <-c.wake:
		case <-ctx.Done():
			return Progress{}, ctx.Err()
		}
	}
}

func (c *Cursor) progress() Progress {
	w := c.w
	w.mu.Lock()
	defer w.mu.Unlock()
	p := Progress{Total: w.h.Total, Start: w.h.Start(), EOF: w.h.EOF}
	if w.lost { // what did not fit in memory is nowhere
		p.Start = w.h.Total
	}
	if w.f == nil && c.acked < int64(len(w.mem)) {
		p.InlineAt, p.Inline = c.acked, append([]byte(nil), w.mem[c.acked:]...)
	}
	return p
}

// Ack says that everything before pos was read.
func (c *Cursor) Ack(pos int64) error {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if pos <= c.acked {
		return nil
	}
	pos = min(pos, c.w.h.Total)
	w := c.w
	if c.acked <= w.seenTo && pos >= w.seenFrom { // touches what was read: join
		w.seenFrom, w.seenTo = min(w.seenFrom, c.acked), max(w.seenTo, pos)
	} else {
		w.seenFrom, w.seenTo = c.acked, pos
	}
	c.acked = pos
	w.freeLocked()
	return nil
}

// Close leaves the stream.
func (c *Cursor) Close() error {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	delete(c.w.followers, c)
	c.w.freeLocked()
	return nil
}

func (w *SpoolWriter) freeLocked() {
	select {
	case w.space <- struct{}{}:
	default:
	}
}
