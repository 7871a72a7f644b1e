package process

import (
	"context"
	"errors"
	"os"
	"sync"

	"github.com/opendsec/dsec"
)

// MaxFollowers of one stream.
const MaxFollowers = 16

// SpoolWriter writes a spool file and tells its followers. One goroutine
// writes; everything else may be called concurrently.
//
// A write that the disk refuses is counted as dropped and never stops the
// command: the positions go on.
type SpoolWriter struct {
	f *os.File

	mu        sync.Mutex
	h         SpoolHeader
	seenFrom  int64 // [seenFrom, seenTo) was read by a follower
	seenTo    int64
	lostTo    int64 // bytes before this position were refused by the disk
	followers map[*Cursor]struct{}
	space     chan struct{} // capacity 1: a follower moved or left
}

// NewSpoolWriter begins a spool in an empty file, which it owns. Sizes of 0
// are DefaultKeep.
func NewSpoolWriter(f *os.File, head, tail int64) (*SpoolWriter, error) {
	if head == 0 {
		head = DefaultKeep
	}
	if tail == 0 {
		tail = DefaultKeep
	}
	if head < 0 || tail < 0 || head > MaxKeep || tail > MaxKeep {
		return nil, dsec.Errorf(dsec.Invalid, "make spool", f.Name(), "head %d and tail %d, at most %d each", head, tail, MaxKeep)
	}
	w := &SpoolWriter{f: f, h: SpoolHeader{Head: head, Tail: tail}, followers: map[*Cursor]struct{}{}, space: make(chan struct{}, 1)}
	if _, err := f.WriteAt(w.h.Encode(), 0); err != nil {
		return nil, dsec.E(dsec.NoSpace, "make spool", f.Name(), err)
	}
	return w, nil
}

// ResumeSpoolWriter goes on with a spool that another writer left.
func ResumeSpoolWriter(f *os.File) (*SpoolWriter, error) {
	h, err := OpenSpool(f).Header()
	if err != nil {
		return nil, err
	}
	return &SpoolWriter{f: f, h: h, seenFrom: h.Start(), seenTo: h.Start(), followers: map[*Cursor]struct{}{},
		space: make(chan struct{}, 1)}, nil
}

// Header returns the present header.
func (w *SpoolWriter) Header() SpoolHeader {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.h
}

// Write appends p. While a follower is behind by a whole ring it waits for it,
// until stop is closed; then it no longer waits.
func (w *SpoolWriter) Write(p []byte, stop <-chan struct{}) {
	for len(p) > 0 {
		n := w.writeSome(p, false)
		if n == 0 {
			select {
			case <-w.space:
			case <-stop:
				n = w.writeSome(p, true)
			}
		}
		p = p[n:]
	}
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
	_, err := w.f.WriteAt(p[:n], off)
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

// Close closes the file.
func (w *SpoolWriter) Close() error { return w.f.Close() }

// Progress says what of a stream can be read: positions below Head of the
// spool, and from Start to Total.
type Progress struct {
	Total int64
	Start int64
	EOF   bool
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
		h := c.w.Header()
		if h.Total > c.told || h.EOF {
			c.told = h.Total
			return Progress{Total: h.Total, Start: h.Start(), EOF: h.EOF}, nil
		}
		select {
		case <-c.wake:
		case <-ctx.Done():
			return Progress{}, ctx.Err()
		}
	}
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
