package ondemand

import (
	"context"
	"iter"
	"sort"
)

// Lanes bound how many requests are made at once. Readers that wait use all of
// them, what is fetched ahead of readers only some, so that it never stands
// before them.
type Lanes struct {
	all   chan struct{}
	ahead chan struct{}
}

// NewLanes makes n lanes; 0: 32.
func NewLanes(n int) *Lanes {
	if n <= 0 {
		n = 32
	}
	return &Lanes{all: make(chan struct{}, n), ahead: make(chan struct{}, max(1, n/2))}
}

// enter waits for a lane: for any from when it is urgent, else for one of those
// for what is fetched ahead.
func (l *Lanes) enter(ctx context.Context, urgent <-chan struct{}) (leave func(), err error) {
	ahead := false
	select {
	case <-urgent:
	default:
		select {
		case l.ahead <- struct{}{}:
			ahead = true
		case <-urgent:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	behind := func() {
		if ahead {
			<-l.ahead
		}
	}
	select {
	case l.all <- struct{}{}:
	case <-ctx.Done():
		behind()
		return nil, ctx.Err()
	}
	return func() {
		<-l.all
		behind()
	}, nil
}

// readahead sees whether reads go forward. Each that begins where the last one
// of a stream ended, or in the chunk of it, doubles how far it is run ahead of.
type readahead struct {
	streams [8]stream
	turn    int
	known   []uint64 // a bit for each chunk: it is brought anyway
}

// expect notes that chunks are brought because they are known to be read. That
// they are says nothing of what lies behind them.
func (r *readahead) expect(from, to, of int) {
	if r.known == nil {
		r.known = make([]uint64, (of+63)/64)
	}
	for i := from; i < to; i++ {
		r.known[i/64] |= 1 << (i % 64)
	}
}

func (r *readahead) expects(from, to int) bool {
	for i := from; i < to; i++ {
		if r.known == nil || r.known[i/64]&(1<<(i%64)) == 0 {
			return false
		}
	}
	return true
}

type stream struct {
	end    int // chunk behind the last read
	window int64
	done   int // chunk up to which it was run ahead of
}

// next are the chunks to fetch behind a read of [from, to).
func (r *readahead) next(from, to int, offs []int64) iter.Seq[int] {
	return func(yield func(int) bool) {
		if from >= to || r.expects(from, to) {
			return
		}
		s := r.find(from, to)
		if s == nil {
			r.streams[r.turn] = stream{end: to, done: to}
			r.turn = (r.turn + 1) % len(r.streams)
			return
		}
		if s.window == 0 && to > s.end {
			s.window = 512 << 10
		} else if to > s.end {
			s.window = min(2*s.window, maxView)
		}
		s.end = max(s.end, to)
		begin := max(to, s.done)
		limit := sort.Search(len(offs)-1, func(i int) bool { return offs[i] >= offs[to]+s.window })
		for i := begin; i < limit; i++ {
			if !yield(i) {
				return
			}
		}
		s.done = max(s.done, limit)
	}
}

// find is the stream that a read goes on with.
func (r *readahead) find(from, to int) *stream {
	for i := range r.streams {
		s := &r.streams[i]
		if s.end > 0 && (from == s.end || from == s.end-1 && to >= s.end) {
			return s
		}
	}
	return nil
}
