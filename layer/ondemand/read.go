package ondemand

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// How long a reader whose chunks did not stay in memory until it came to copy them
// waits before it asks for them again.
const (
	leastAgain = time.Millisecond
	mostAgain  = 250 * time.Millisecond
)

// reading is a read whose bytes come from the file and from memory. What it has
// copied it has, whatever becomes of it afterwards: so it comes to an end.
type reading struct {
	l        *Layer
	p        []byte
	off      int64
	from, to int    // chunks
	had      []bool // copied
	uncached bool   // some of it came from memory
}

func (r *reading) has(chunk int) bool { return r.had[chunk-r.from] }

// gather copies what there is that was not copied before; false: not all is.
func (r *reading) gather() (all bool, err error) {
	l := r.l
	all = true
	for i := r.from; i < r.to; i++ {
		if r.has(i) {
			continue
		}
		begin := max(r.off, l.offs[i])
		part := r.p[begin-r.off : min(r.off+int64(len(r.p)), l.offs[i+1])-r.off]
		switch {
		case l.parts.Present.Has(i):
			if _, err := l.parts.Data.ReadAt(part, begin); err != nil {
				return false, err
			}
		case l.opts.Room.copy(place{l, i}, part, begin-l.offs[i]):
			r.uncached = true
		default:
			all = false
			continue
		}
		r.had[i-r.from] = true
	}
	if all && r.uncached {
		l.opts.Room.count(len(r.p))
	}
	return all, nil
}

// ReadAt reads verified bytes. Those for which there is no room on the disk it
// reads too.
func (l *Layer) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	n := min(int64(len(p)), l.Size()-off)
	if n <= 0 {
		return 0, nil
	}
	if !l.enter() {
		return 0, l.gone("read layer")
	}
	defer l.leave()
	from, to := layer.Span(l.offs, off, n)
	r := &reading{l: l, p: p[:n], off: off, from: from, to: to, had: make([]bool, to-from)}
	if l.full() { // it may be in memory
		if all, err := r.gather(); all && err == nil {
			l.asked.Add(l.trace.note(off, n))
			return int(n), nil
		}
	}
	if err := l.read(ctx, r); err != nil {
		l.note(ctx, err)
		return 0, err
	}
	return int(n), nil
}

// read asks for what there is not until it has got all.
func (l *Layer) read(ctx context.Context, r *reading) error {
	again := leastAgain
	for end := time.Now().Add(l.opts.Deadline); ; again = min(2*again, mostAgain) {
		err := l.ensure(ctx, r.off, int64(len(r.p)), r.has)
		if err != nil && (!isNoRoom(err) || l.keepAll.Load()) {
			return err
		}
		if l.here(r.from, r.to) { // in one read
			_, err := l.parts.Data.ReadAt(r.p, r.off)
			return err
		}
		if all, rerr := r.gather(); all || rerr != nil {
			return rerr
		}
		if err == nil { // it was here, and is not any more
			err = dsec.E(dsec.NoSpace, "read layer", string(l.parts.Digest), noRoom{errBound})
		}
		if !time.Now().Before(end) {
			return err
		}
		select { // others' chunks have taken the place of ours
		case <-time.After(again/2 + rand.N(again)):
		case <-ctx.Done():
			return err
		case <-l.life.Done():
			return l.gone("read layer")
		}
	}
}
