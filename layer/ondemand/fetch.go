package ondemand

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"iter"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// How chunks are asked for.
const (
	mostRun = 4 << 20  // compressed bytes of one request
	mostGap = 64 << 10 // bytes between two wanted chunks that are cheaper read than asked around
	// Behind what a reader waits for come so many plain bytes beside it: nearMax as
	// long as what came is at most maxWaste times what was asked for, of different
	// bytes, and nearMin when more of it is waste.
	nearMin  = 512 << 10
	nearMax  = 2 << 20
	maxWaste = 2
	maxView  = 16 << 20 // plain bytes that a forward reader is run ahead of

	leastBatch = 32   // chunks that are asked for first when it is known what is wanted
	mostBatch  = 1024 // at most so many at one time; twice that are on their way
)

// run is one request: chunks of one pack in the order of their places.
type run struct {
	pack   uint32
	chunks []int
	from   uint64 // in the pack
	to     uint64
	urgent *urgency
	begun  time.Time // when it was made; it may have waited for a lane before
}

// urgency of a request that is made ahead of readers: one may come to wait for it.
type urgency struct {
	once sync.Once
	now  chan struct{} // closed when one does
}

func (u *urgency) hurry() { u.once.Do(func() { close(u.now) }) }

// hurried says whether one waits.
func (u *urgency) hurried() bool {
	select {
	case <-u.now:
		return true
	default:
		return false
	}
}

// take returns the flights of the chunks that a reader needs and that are not
// here, having begun those that nobody began, and what the reader will want next.
func (l *Layer) take(from, to int, had func(int) bool) []*flight {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.takeLocked(from, to, had)
}

func (l *Layer) takeLocked(from, to int, had func(int) bool) (wait []*flight) {
	var mine []int
	for i := from; i < to; i++ {
		if l.parts.Present.Has(i) || had != nil && had(i) {
			continue
		}
		f, begun := l.claim(i)
		if begun {
			mine = append(mine, i)
		} else if f.urgent != nil {
			f.urgent.hurry()
		}
		wait = append(wait, f)
	}
	if l.closed {
		return wait
	}
	if l.full() {
		l.launch(mine, true)
		return wait
	}
	// What is near is wanted next more often than not, and comes with the same request.
	near := sort.Search(len(l.offs), func(i int) bool { return l.offs[i] >= l.offs[to]+l.near() })
	for i := to; len(mine) > 0 && !l.ahead.expects(from, to) && i < min(near, len(l.parts.Index.Chunks)); i++ {
		if l.lacks(i) {
			l.begin(i)
			mine = append(mine, i)
		}
	}
	more := l.runAhead(from, to)
	l.launch(mine, true)
	l.launch(more, false)
	return wait
}

// near is how far behind a read that waits it is fetched, too. More makes fewer
// reads wait and brings more that nobody wants; under mu.
func (l *Layer) near() int64 {
	if l.stats.Plain > maxWaste*l.asked.Load() {
		return nearMin
	}
	return nearMax
}

// claim is the flight of a chunk that is not here, and whether it was begun now,
// and waits to be launched; under mu.
func (l *Layer) claim(i int) (f *flight, begun bool) {
	switch f := l.flights[i]; {
	case f != nil:
		return f, false
	case l.closed:
		return over(context.Canceled), false
	case time.Now().Before(l.failed[i].until):
		return over(l.failed[i].err), false
	}
	delete(l.failed, i)
	return l.begin(i), true
}

// takeAfresh is take for a reader to whom it does not matter that an earlier
// request took too long.
func (l *Layer) takeAfresh(from, to int, had func(int) bool) []*flight {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := from; i < to; i++ {
		if dsec.ClassOf(l.failed[i].err) == dsec.Timeout {
			delete(l.failed, i)
		}
	}
	return l.takeLocked(from, to, had)
}

// order is take of chunks that no reader waits for.
func (l *Layer) order(chunks []int) []*flight {
	l.mu.Lock()
	defer l.mu.Unlock()
	var wait []*flight
	var mine []int
	for _, i := range chunks {
		if l.parts.Present.Has(i) {
			continue
		}
		f, begun := l.claim(i)
		if begun {
			mine = append(mine, i)
		}
		wait = append(wait, f)
	}
	l.launch(mine, false)
	return wait
}

// batches are the chunks of ranges that are not here, in the order of the ranges.
func (l *Layer) batches(ranges []Range) iter.Seq[[]int] {
	return func(yield func([]int) bool) {
		size, batch := leastBatch, []int(nil)
		for _, r := range ranges {
			from, to := layer.Span(l.offs, r.Off, r.Len)
			for i := from; i < to; i++ {
				if l.parts.Present.Has(i) {
					continue
				}
				if batch = append(batch, i); len(batch) < size {
					continue
				}
				if !yield(batch) {
					return
				}
				size, batch = min(2*size, mostBatch), nil
			}
		}
		if len(batch) > 0 {
			yield(batch)
		}
	}
}

// over is a flight that failed before.
func over(err error) *flight {
	f := &flight{landed: make(chan struct{}), err: err}
	close(f.landed)
	return f
}

// follow runs ahead of a reader that found all it asked for.
func (l *Layer) follow(from, to int) {
	if l.Complete() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.full() {
		return
	}
	l.launch(l.runAhead(from, to), false)
}

// runAhead begins what a reader that goes forward will want; under mu, as lacks
// and begin, until it is launched.
func (l *Layer) runAhead(from, to int) (chunks []int) {
	for i := range l.ahead.next(from, to, l.offs) {
		if l.lacks(i) {
			l.begin(i)
			chunks = append(chunks, i)
		}
	}
	return chunks
}

// lacks says that a chunk is neither here nor on its way.
func (l *Layer) lacks(i int) bool { return !l.parts.Present.Has(i) && l.flights[i] == nil }

func (l *Layer) begin(i int) *flight {
	f := &flight{landed: make(chan struct{}), since: time.Now()}
	l.flights[i] = f
	return f
}

// launch starts the requests for chunks whose flights were begun; under mu.
func (l *Layer) launch(chunks []int, demand bool) {
	for _, r := range plan(l.parts.Index, chunks) {
		r.urgent, r.begun = &urgency{now: make(chan struct{})}, time.Now()
		for _, i := range r.chunks {
			l.flights[i].urgent = r.urgent
		}
		if demand {
			r.urgent.hurry()
		}
		l.work.Go(func() {
			l.crash(&r, r.chunks, l.fly(&r)) // those that landed are not told
		})
	}
}

// plan groups chunks into requests.
func plan(ix layer.Index, chunks []int) []run {
	place := func(i int) layer.Chunk { return ix.Chunks[i] }
	slices.SortFunc(chunks, func(a, b int) int {
		x, y := place(a), place(b)
		return cmp.Or(cmp.Compare(x.Pack, y.Pack), cmp.Compare(x.Off, y.Off), cmp.Compare(a, b))
	})
	var runs []run
	var holes []int
	for _, i := range chunks {
		c := place(i)
		if c.Length == 0 {
			holes = append(holes, i)
			continue
		}
		end := c.Off + uint64(c.Length)
		if n := len(runs) - 1; n >= 0 {
			r := &runs[n]
			if r.pack == c.Pack && c.Off <= r.to+mostGap && max(end, r.to)-r.from <= mostRun {
				r.chunks, r.to = append(r.chunks, i), max(end, r.to)
				continue
			}
		}
		runs = append(runs, run{pack: c.Pack, chunks: []int{i}, from: c.Off, to: end})
	}
	if len(holes) > 0 {
		runs = append(runs, run{chunks: holes})
	}
	return runs
}

// fly makes one request and lands its chunks. Its deadline does not begin before
// it has a lane: what is ordered ahead may wait for one longer than any request
// may take.
func (l *Layer) fly(r *run) error {
	if r.to == r.from {
		l.zeros(r)
		return nil
	}
	leave, err := l.opts.Lanes.enter(l.life, r.urgent.now)
	if err != nil {
		return err
	}
	defer leave()
	r.begun = time.Now()
	ctx, cancel := context.WithTimeout(l.life, l.opts.Deadline)
	defer cancel()
	name := l.parts.Index.Packs[r.pack]
	l.mu.Lock()
	l.stats.Requests++
	l.mu.Unlock()
	body, err := l.opts.Blobs.Open(ctx, layer.PackKey(name), int64(r.from), int64(r.to-r.from))
	if err != nil {
		return err
	}
	defer body.Close()
	in := counted{r: body}
	err = l.landAll(r, &in)
	l.mu.Lock()
	l.stats.Fetched += in.n
	l.mu.Unlock()
	// Of a connection that broke the store says something else.
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		err = dsec.Errorf(dsec.Corrupt, "read pack", string(name), "shorter than its index says")
	}
	return err
}

// counted counts what is read.
type counted struct {
	r io.Reader
	n int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// landAll reads the chunks of a request in the order of their places. One that
// is damaged is no reason to withhold those behind it.
func (l *Layer) landAll(r *run, in io.Reader) error {
	b := buffers.Get().(*buffer)
	defer buffers.Put(b)
	pos, last := r.from, layer.Chunk{}
	for _, i := range r.chunks {
		c := &l.parts.Index.Chunks[i]
		switch {
		case b.frame != nil && last.Length > 0 && c.Off == last.Off && c.Length == last.Length: // equal content is there once
		case c.Off < pos:
			return dsec.Errorf(dsec.Corrupt, "read pack", string(l.parts.Index.Packs[r.pack]), "chunk %d overlaps another", i)
		default:
			if _, err := io.CopyN(io.Discard, in, int64(c.Off-pos)); err != nil {
				return err
			}
			b.frame = slices.Grow(b.frame[:0], int(c.Length))[:c.Length]
			if _, err := io.ReadFull(in, b.frame); err != nil {
				return err
			}
			pos = c.Off + uint64(c.Length)
		}
		last = *c
		plain, err := unpack(c, b.frame, b.plain)
		if err != nil {
			l.crash(r, []int{i}, dsec.E(dsec.Corrupt, "read chunk", fmt.Sprintf("%d of %s", i, l.parts.Digest), err))
			continue
		}
		b.plain = plain
		if err := l.land(i, plain, r.urgent.hurried()); isNoRoom(err) {
			l.crash(r, []int{i}, err) // there may be room for a smaller one
		} else if err != nil {
			return err
		}
	}
	return nil
}

// zeros lands chunks that are holes: in the file they are already.
func (l *Layer) zeros(r *run) {
	var last layer.Chunk // most are of one size
	for _, i := range r.chunks {
		c := &l.parts.Index.Chunks[i]
		if c.Size != last.Size {
			last = layer.Chunk{Size: c.Size, Sum: sha256.Sum256(nothing[:c.Size])}
		}
		if last.Sum != c.Sum {
			l.crash(r, []int{i}, dsec.Errorf(dsec.Corrupt, "read chunk", fmt.Sprintf("%d of %s", i, l.parts.Digest), "said to be zero and is not"))
			continue
		}
		l.parts.Present.Set(i)
		l.arrived(i)
	}
}

var nothing = bytes.Repeat([]byte{0}, layer.MaxChunk)

// buffer is what one request needs.
type buffer struct{ frame, plain []byte }

var buffers = sync.Pool{New: func() any { return &buffer{} }}
