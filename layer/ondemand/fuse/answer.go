package fuse

import (
	"context"
	"sync"

	"golang.org/x/sys/unix"
)

// answer to anything but a read; nil: there is none.
func (s *Session) answer(r *request) []byte {
	switch r.op {
	case opInit:
		return r.init()
	case opGetattr:
		b := r.reply(16 + attrSize)
		attr(b[outHeader:], s.src.Size())
		return b
	case opOpen:
		b := r.reply(16)
		// A process that dies must not wait for us when it closes the file.
		le.PutUint32(b[outHeader+8:], openKeepCache|openNoFlush)
		return b
	case opStatfs:
		return r.reply(80)
	case opRelease, opDestroy:
		return r.reply(0)
	case opInterrupt:
		s.interrupt(r)
		return nil
	case opForget, opBatchForget:
		return nil
	}
	return r.fail(unix.ENOSYS)
}

// init agrees on the protocol.
func (r *request) init() []byte {
	const size = 64
	if len(r.body) < 16 || le.Uint32(r.body) != kernelMajor {
		return r.fail(unix.EPROTO)
	}
	b := r.reply(size)
	o := b[outHeader:]
	le.PutUint32(o[0:], kernelMajor)
	le.PutUint32(o[4:], kernelMinor)
	le.PutUint32(o[8:], min(le.Uint32(r.body[8:]), most)) // readahead
	le.PutUint32(o[12:], le.Uint32(r.body[12:])&(initAsyncRead|initAsyncDIO|initMaxPages))
	le.PutUint16(o[16:], slots)     // requests in the background
	le.PutUint16(o[18:], slots*3/4) // … before it counts as congested
	le.PutUint32(o[20:], 4096)      // largest write
	le.PutUint32(o[24:], 1)         // nanoseconds that times are exact to
	le.PutUint16(o[28:], most/4096) // pages of a request
	return b
}

func (s *Session) interrupt(r *request) {
	if len(r.body) < 8 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if cancel := s.reads[le.Uint64(r.body)]; cancel != nil {
		cancel()
	}
}

// read answers a read. It is not done if the session ends first: who comes
// after it shall.
func (s *Session) read(session, ctx context.Context, r *request) (done bool) {
	off, size, err := r.readRange()
	if err != nil || size > most || off < 0 {
		s.send(r.fail(unix.EINVAL))
		return true
	}
	buf := replies.Get().(*[]byte)
	defer replies.Put(buf)
	b := (*buf)[:outHeader+int(size)]
	n, err := s.src.ReadAt(ctx, b[outHeader:], off)
	switch {
	case session.Err() != nil && err != nil:
		return false
	case ctx.Err() != nil && err != nil:
		s.send(r.fail(unix.EINTR))
	case err != nil: // why is with the source
		s.send(r.fail(unix.EIO))
	default:
		r.head(b, n)
		s.send(b[:outHeader+n])
	}
	return true
}

var replies = sync.Pool{New: func() any {
	b := make([]byte, outHeader+most)
	return &b
}}
