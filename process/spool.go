package process

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"github.com/opendsec/dsec"
)

// A spool file keeps the beginning and the end of one output stream; see
// docs/formats/spool.md. Position p of the stream is in the head region while
// p < Head and else in the ring region at (p-Head) mod Tail.
const (
	spoolVersion = 1
	spoolData    = 4096 // offset of the head region
	spoolHeader  = 64   // bytes of the header

	// DefaultKeep is the kept head and the kept tail where a Spec says 0.
	DefaultKeep = 1 << 20
	// MaxKeep bounds either.
	MaxKeep = 1 << 30
)

var spoolMagic = []byte("DSPOOL\x00")

// SpoolHeader is what a spool file says about itself.
type SpoolHeader struct {
	Head    int64 // size of the head region
	Tail    int64 // size of the ring region
	Total   int64 // bytes written by the command so far
	Dropped int64 // bytes neither kept nor read
	EOF     bool  // nothing follows
}

// Start is the oldest position in the ring region.
func (h SpoolHeader) Start() int64 { return max(h.Head, h.Total-h.Tail) }

// Summary is what a Result tells of a stream.
func (h SpoolHeader) Summary() OutputSummary {
	return OutputSummary{Total: h.Total, Dropped: h.Dropped, Truncated: h.Start() > h.Head}
}

// Encode returns the header's bytes.
func (h SpoolHeader) Encode() []byte {
	b := make([]byte, 0, spoolHeader)
	b = append(b, spoolMagic...)
	b = append(b, spoolVersion)
	for _, v := range []int64{h.Head, h.Tail, h.Total, h.Dropped} {
		b = binary.LittleEndian.AppendUint64(b, uint64(v))
	}
	var flags uint64
	if h.EOF {
		flags = 1
	}
	b = binary.LittleEndian.AppendUint64(b, flags)
	b = binary.LittleEndian.AppendUint64(b, 0)
	b = binary.LittleEndian.AppendUint32(b, 0)
	return binary.LittleEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
}

// DecodeSpoolHeader checks and reads a header.
func DecodeSpoolHeader(b []byte) (SpoolHeader, error) {
	bad := func(format string, a ...any) (SpoolHeader, error) {
		return SpoolHeader{}, dsec.Errorf(dsec.Corrupt, "read spool", "", format, a...)
	}
	switch {
	case len(b) < spoolHeader:
		return bad("%d bytes of header, want %d", len(b), spoolHeader)
	case !bytes.Equal(b[:len(spoolMagic)], spoolMagic):
		return bad("not a spool")
	case b[7] != spoolVersion:
		return bad("version %d, this program reads %d", b[7], spoolVersion)
	case binary.LittleEndian.Uint32(b[60:]) != crc32.ChecksumIEEE(b[:60]):
		return bad("checksum of the header differs")
	}
	v := func(i int) int64 { return int64(binary.LittleEndian.Uint64(b[8+8*i:])) }
	h := SpoolHeader{Head: v(0), Tail: v(1), Total: v(2), Dropped: v(3), EOF: v(4)&1 != 0}
	if h.Head < 0 || h.Head > MaxKeep || h.Tail < 1 || h.Tail > MaxKeep || h.Total < 0 || h.Dropped < 0 || h.Dropped > h.Total {
		return bad("sizes out of range: %+v", h)
	}
	return h, nil
}

// piece returns where in the file the bytes from pos on are, and how many of
// them, up to end, lie in one run.
func (h SpoolHeader) piece(pos, end int64) (off, n int64) {
	if pos < h.Head {
		return spoolData + pos, min(end, h.Head) - pos
	}
	in := (pos - h.Head) % h.Tail
	return spoolData + h.Head + in, min(end-pos, h.Tail-in)
}

// SpoolFile reads a spool file.
type SpoolFile struct {
	f *os.File
}

// OpenSpool reads the spool in f, which stays the caller's.
func OpenSpool(f *os.File) *SpoolFile { return &SpoolFile{f: f} }

// Header reads the header as it is now.
func (s *SpoolFile) Header() (SpoolHeader, error) {
	var h SpoolHeader
	var err error
	for range 100 { // a writer may be in the middle of it
		b := make([]byte, spoolHeader)
		if _, err = s.f.ReadAt(b, 0); err != nil && err != io.EOF {
			return h, dsec.E(dsec.Internal, "read spool", s.f.Name(), err)
		}
		if h, err = DecodeSpoolHeader(b); err == nil {
			return h, nil
		}
	}
	return h, fmt.Errorf("%s: %w", s.f.Name(), err)
}

// readAt fills b from position pos, which together with the bytes that follow
// must be kept.
func (s *SpoolFile) readAt(h SpoolHeader, b []byte, pos int64) error {
	for len(b) > 0 {
		off, n := h.piece(pos, pos+int64(len(b)))
		got, err := s.f.ReadAt(b[:n], off)
		if err == io.EOF { // the disk refused what comes here
			clear(b[got:n])
		} else if err != nil {
			return dsec.E(dsec.Internal, "read spool", s.f.Name(), err)
		}
		b, pos = b[n:], pos+n
	}
	return nil
}

// Kept returns the kept head and tail; the tail begins at tailOffset. If they
// join, the tail begins where the head ends. It may be called while the
// command writes.
func (s *SpoolFile) Kept() (head, tail []byte, tailOffset int64, err error) {
	h, err := s.Header()
	if err != nil {
		return nil, nil, 0, err
	}
	head = make([]byte, min(h.Total, h.Head))
	if err := s.readAt(h, head, 0); err != nil {
		return nil, nil, 0, err
	}
	tailOffset = min(h.Start(), h.Total)
	if h.Total < h.Head {
		return head, nil, h.Total, nil
	}
	tail = make([]byte, h.Total-tailOffset)
	if err := s.readAt(h, tail, tailOffset); err != nil {
		return nil, nil, 0, err
	}
	now, err := s.Header() // what was overwritten meanwhile is not the tail
	if err != nil {
		return nil, nil, 0, err
	}
	if gone := min(now.Start()-tailOffset, int64(len(tail))); gone > 0 {
		tail, tailOffset = tail[gone:], tailOffset+gone
	}
	return head, tail, tailOffset, nil
}
