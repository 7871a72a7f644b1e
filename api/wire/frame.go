package wire

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
)

// Flags of a frame.
const (
	frameData  = 0
	frameAlive = 1 // empty: the sender is alive
	frameEnd   = 2 // JSON: {} or {"error": …}
)

const (
	frameHeader  = 5
	maxFrame     = 32 << 20 // of a message frame
	dataPiece    = 64 << 10 // payload of a frame written by Write
	maxEndFrame  = 1 << 20
	minReadAhead = 64 << 10
)

// FrameWriter writes a stream of frames: a flag byte, a big-endian uint32
// length, the payload. It is not safe for concurrent use.
type FrameWriter struct {
	w   io.Writer
	buf []byte
}

// NewFrameWriter writes to w without buffering across calls.
func NewFrameWriter(w io.Writer) *FrameWriter { return &FrameWriter{w: w} }

func (f *FrameWriter) frame(flag byte, p []byte) error {
	f.buf = append(f.buf[:0], flag, 0, 0, 0, 0)
	binary.BigEndian.PutUint32(f.buf[1:], uint32(len(p)))
	f.buf = append(f.buf, p...)
	_, err := f.w.Write(f.buf)
	return err
}

// Write sends p as data frames.
func (f *FrameWriter) Write(p []byte) (int, error) {
	n := 0
	for len(p) > 0 {
		piece := p[:min(len(p), dataPiece)]
		if err := f.frame(frameData, piece); err != nil {
			return n, err
		}
		n += len(piece)
		p = p[len(piece):]
	}
	return n, nil
}

// Message sends m as one data frame.
func (f *FrameWriter) Message(m proto.Message) error {
	f.buf = append(f.buf[:0], frameData, 0, 0, 0, 0)
	var err error
	if f.buf, err = (proto.MarshalOptions{}).MarshalAppend(f.buf, m); err != nil {
		return err
	}
	binary.BigEndian.PutUint32(f.buf[1:], uint32(len(f.buf)-frameHeader))
	_, err = f.w.Write(f.buf)
	if cap(f.buf) > 1<<20 {
		f.buf = nil
	}
	return err
}

// Alive tells the reader that there is nothing new.
func (f *FrameWriter) Alive() error { return f.frame(frameAlive, nil) }

// End finishes the stream; err is how the transfer went.
func (f *FrameWriter) End(err error) error {
	p, merr := json.Marshal(jsonEnd{Error: toJSON(err)})
	if merr != nil {
		return merr
	}
	return f.frame(frameEnd, p)
}

// FrameReader reads what a FrameWriter wrote. A stream that breaks off without
// an end frame is an Unavailable error, never a silent end.
type FrameReader struct {
	r    *bufio.Reader
	op   string
	left int // of the current data frame
	done error
}

// NewFrameReader reads frames from r; op names the transfer in errors.
func NewFrameReader(op string, r io.Reader) *FrameReader {
	return &FrameReader{r: bufio.NewReaderSize(r, minReadAhead), op: op}
}

// next reads a header. It returns io.EOF after a good end frame.
func (f *FrameReader) next() (flag byte, n int, err error) {
	if f.done != nil {
		return 0, 0, f.done
	}
	var h [frameHeader]byte
	if _, err := io.ReadFull(f.r, h[:]); err != nil {
		return 0, 0, f.broken(err)
	}
	size := binary.BigEndian.Uint32(h[1:])
	switch {
	case h[0] == frameEnd && size <= maxEndFrame:
		return 0, 0, f.end(int(size))
	case h[0] > frameEnd || size > maxFrame:
		f.done = dsec.Errorf(dsec.Corrupt, f.op, "", "bad frame: flag %d, %d bytes", h[0], size)
		return 0, 0, f.done
	}
	return h[0], int(size), nil
}

func (f *FrameReader) end(n int) error {
	p := make([]byte, n)
	if _, err := io.ReadFull(f.r, p); err != nil {
		return f.broken(err)
	}
	var e jsonEnd
	if err := json.Unmarshal(p, &e); err != nil {
		f.done = dsec.E(dsec.Corrupt, f.op, "", err)
	} else if e.Error != nil {
		f.done = e.Error.err(f.op)
	} else {
		f.done = io.EOF
	}
	return f.done
}

func (f *FrameReader) broken(err error) error {
	if errors.Is(err, io.EOF) {
		err = errors.New("stream broke off")
	}
	f.done = dsec.E(transportClass(err), f.op, "", err)
	return f.done
}

// Read returns the data of the stream.
func (f *FrameReader) Read(p []byte) (int, error) {
	for f.left == 0 {
		_, n, err := f.next()
		if err != nil {
			return 0, err
		}
		f.left = n
	}
	n, err := f.r.Read(p[:min(len(p), f.left)])
	f.left -= n
	if err != nil {
		return n, f.broken(err)
	}
	return n, nil
}

// Message reads the next data frame into m; alive is true, and m untouched,
// if there was only a sign of life.
func (f *FrameReader) Message(m proto.Message) (alive bool, err error) {
	flag, n, err := f.next()
	if err != nil {
		return false, err
	}
	p := make([]byte, n)
	if _, err := io.ReadFull(f.r, p); err != nil {
		return false, f.broken(err)
	}
	if flag == frameAlive {
		return true, nil
	}
	if err := proto.Unmarshal(p, m); err != nil {
		f.done = dsec.E(dsec.Corrupt, f.op, "", err)
		return false, f.done
	}
	return false, nil
}
