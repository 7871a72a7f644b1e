package hold

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// A follower of a stream is a SEQPACKET pair: hold sends the stream's progress,
// the follower answers how far it has read. Hold says more only after an
// answer, so neither side ever waits to send. Closing either end ends it.
const (
	progressSize = 32
	progressMost = progressSize + 16<<10
	ackSize      = 8
	progressEOF  = 1
)

// follow starts serving a follower and returns its socket.
func (e *execution) follow(s process.Stream, offset int64) (*os.File, error) {
	w, err := e.stream(s)
	if err != nil {
		return nil, err
	}
	cursor, err := w.Follow(offset)
	if err != nil {
		return nil, err
	}
	e.out[s-1].back(offset)
	ours, theirs, err := seqpacketPair()
	var c *net.UnixConn
	if err == nil {
		c, err = unixConn(ours)
	}
	if err != nil {
		_ = cursor.Close()
		closeAll([]*os.File{theirs})
		return nil, err
	}
	go serveFollower(c, cursor)
	return theirs, nil
}

func serveFollower(c *net.UnixConn, cursor *process.Cursor) {
	ctx, cancel := context.WithCancel(context.Background())
	acks := make(chan struct{}, 1)
	acks <- struct{}{}
	go func() {
		defer cancel()
		var b [ackSize]byte
		for {
			n, err := c.Read(b[:])
			if err != nil || n != ackSize {
				return
			}
			_ = cursor.Ack(int64(binary.LittleEndian.Uint64(b[:])))
			select {
			case acks <- struct{}{}:
			default:
			}
		}
	}()
	for ctx.Err() == nil {
		select {
		case <-acks:
		case <-ctx.Done():
			continue
		}
		p, err := cursor.Wait(ctx)
		if err != nil {
			break
		}
		if _, err := c.Write(encodeProgress(p)); err != nil {
			break
		}
		if p.EOF {
			<-ctx.Done()
		}
	}
	_ = c.Close() // ends the reader above
	<-ctx.Done()
	_ = cursor.Close()
}

func encodeProgress(p process.Progress) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(p.Total))
	b = binary.LittleEndian.AppendUint64(b, uint64(p.Start))
	var flags uint64
	if p.EOF {
		flags = progressEOF
	}
	b = binary.LittleEndian.AppendUint64(b, flags)
	b = binary.LittleEndian.AppendUint64(b, uint64(p.InlineAt))
	return append(b, p.Inline...)
}

func decodeProgress(b []byte) (process.Progress, error) {
	if len(b) < progressSize {
		return process.Progress{}, errTruncated
	}
	v := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	return process.Progress{Total: int64(v(0)), Start: int64(v(1)), EOF: v(2)&progressEOF != 0, InlineAt: int64(v(3)),
		Inline: append([]byte(nil), b[progressSize:]...)}, nil
}

// remote is a process.Source at the other end of a follower's socket.
type remote struct {
	c    *net.UnixConn
	owed bool // hold waits for an answer
	pos  int64
	buf  []byte
}

func (r *remote) Wait(ctx context.Context) (process.Progress, error) {
	if r.owed {
		if err := r.Ack(r.pos); err != nil {
			return process.Progress{}, err
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = r.c.SetReadDeadline(aLongTimeAgo) })
	defer stop()
	if r.buf == nil {
		r.buf = make([]byte, progressMost)
	}
	n, err := r.c.Read(r.buf)
	for errors.Is(err, os.ErrDeadlineExceeded) { // of this call, or left by one that was cancelled
		if ctx.Err() != nil {
			return process.Progress{}, ctx.Err()
		}
		_ = r.c.SetReadDeadline(never)
		n, err = r.c.Read(r.buf)
	}
	p, derr := decodeProgress(r.buf[:n])
	if err == nil {
		err = derr
	}
	if err != nil {
		return process.Progress{}, dsec.E(dsec.Unavailable, "follow output", "", errors.Join(errHoldGone, err))
	}
	r.owed = true
	return p, nil
}

func (r *remote) Ack(pos int64) error {
	r.pos, r.owed = max(r.pos, pos), false
	_, err := r.c.Write(binary.LittleEndian.AppendUint64(nil, uint64(pos)))
	if err != nil {
		return dsec.E(dsec.Unavailable, "follow output", "", errors.Join(errHoldGone, err))
	}
	return nil
}

func (r *remote) Close() error { return r.c.Close() }
