package process

import (
	"context"
	"sync"

	"github.com/opendsec/dsec"
)

// Source tells a follower about the progress of a stream: a Cursor in the
// process that writes it, or a connection to one.
type Source interface {
	// Wait returns when there is news.
	Wait(ctx context.Context) (Progress, error)
	Ack(pos int64) error
	Close() error
}

const followChunk = 256 << 10

// follower is a Reader over a spool file and a Source.
type follower struct {
	open func() (*SpoolFile, error)
	s    *SpoolFile  // nil until it is needed
	h    SpoolHeader // for the sizes; set with s
	src  Source
	end  func()

	mu    sync.Mutex // one Next at a time
	pos   int64
	acked int64
	known Progress
	buf   []byte
	done  bool
}

// NewReader follows the stream in s from offset. Close calls the Source's Close
// and then closed, which may be nil.
func NewReader(s *SpoolFile, src Source, offset int64, closed func()) Reader {
	return NewLazyReader(func() (*SpoolFile, error) { return s, nil }, src, offset, closed)
}

// NewLazyReader is NewReader for a spool that is opened when something has to
// be read from it.
func NewLazyReader(open func() (*SpoolFile, error), src Source, offset int64, closed func()) Reader {
	return &follower{open: open, src: src, pos: offset, acked: offset, end: closed}
}

func (r *follower) Next(ctx context.Context) (Chunk, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done {
		return Chunk{Offset: r.pos, EOF: true}, nil
	}
	if r.s != nil && r.pos-r.acked >= r.h.Tail/4 {
		if err := r.ackLocked(); err != nil {
			return Chunk{}, err
		}
	}
	for {
		if r.pos < r.known.Total {
			c, err := r.chunkLocked()
			if err != nil || len(c.Data) > 0 {
				return c, err
			}
		}
		if r.pos >= r.known.Total && r.known.EOF {
			r.done = true
			return Chunk{Offset: r.pos, EOF: true}, nil
		}
		if err := r.ackLocked(); err != nil {
			return Chunk{}, err
		}
		p, err := r.src.Wait(ctx)
		if err != nil {
			return Chunk{}, followError(err)
		}
		r.known = p
	}
}

// ackLocked tells how far we are. The bytes of the last chunk are given up with
// it, which is why it is done at the next call.
func (r *follower) ackLocked() error {
	if r.pos == r.acked {
		return nil
	}
	if err := r.src.Ack(r.pos); err != nil {
		return followError(err)
	}
	r.acked = r.pos
	return nil
}

// chunkLocked reads the next bytes, none if all that is known of is gone.
func (r *follower) chunkLocked() (Chunk, error) {
	if in := r.pos - r.known.InlineAt; in >= 0 && in < int64(len(r.known.Inline)) {
		return r.tookLocked(r.known.Inline[in:]), nil
	}
	if r.s == nil {
		s, err := r.open()
		if err != nil {
			return Chunk{}, err
		}
		if r.h, err = s.Header(); err != nil {
			return Chunk{}, err
		}
		r.s = s
	}
	if r.pos >= r.h.Head && r.pos < r.known.Start {
		if r.pos = r.known.Start; r.pos >= r.known.Total {
			return Chunk{}, nil
		}
	}
	end := min(r.known.Total, r.pos+followChunk)
	if r.pos < r.h.Head {
		end = min(end, r.h.Head)
	}
	if r.buf == nil {
		r.buf = make([]byte, min(followChunk, max(r.h.Tail, r.h.Head)))
	}
	b := r.buf[:min(end-r.pos, int64(len(r.buf)))]
	if err := r.s.readAt(r.h, b, r.pos); err != nil {
		return Chunk{}, err
	}
	return r.tookLocked(b), nil
}

func (r *follower) tookLocked(b []byte) Chunk {
	c := Chunk{Offset: r.pos, Data: b}
	r.pos += int64(len(b))
	if r.known.EOF && r.pos >= r.known.Total {
		c.EOF, r.done = true, true
	}
	return c
}

func (r *follower) Close() error {
	err := r.src.Close()
	if r.end != nil {
		r.end()
	}
	return err
}

func followError(err error) error {
	if dsec.ClassOf(err) == dsec.Internal {
		return dsec.E(dsec.Unavailable, "follow output", "", err)
	}
	return dsec.E(dsec.ClassOf(err), "follow output", "", err)
}
