package guest

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io"
)

// The packets of docs/formats/guest.md.
const (
	headerSize = 40
	maxPayload = 32 << 10
	maxPacket  = headerSize + maxPayload
)

var (
	magic = []byte("\xd5Gp1")
	table = crc32.MakeTable(crc32.Castagnoli)
)

type kind uint8

const (
	kindHello kind = 1 + iota
	kindOpen
	kindData
	kindCredit
	kindReset
)

const flagEnd = 1

// packet is one packet. As the scanner returns it, its payload is valid until
// the next one is asked for.
type packet struct {
	kind    kind
	flags   uint8
	session uint64
	number  uint32
	stream  uint32
	payload []byte
}

// seal makes a packet of b, which holds the payload behind room for the header.
func (p *packet) seal(b []byte, mask uint64) {
	body := b[headerSize:]
	xor(body, mask)
	copy(b, magic)
	b[4], b[5] = byte(p.kind), p.flags
	binary.LittleEndian.PutUint16(b[6:], uint16(len(body)))
	binary.LittleEndian.PutUint64(b[8:], p.session)
	binary.LittleEndian.PutUint64(b[16:], mask)
	binary.LittleEndian.PutUint32(b[24:], p.number)
	binary.LittleEndian.PutUint32(b[28:], p.stream)
	binary.LittleEndian.PutUint32(b[32:], crc32.Checksum(body, table))
	binary.LittleEndian.PutUint32(b[36:], crc32.Checksum(b[:36], table))
}

// xor masks, or unmasks, b in place.
func xor(b []byte, mask uint64) {
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)^mask)
		b = b[8:]
	}
	for i := range b {
		b[i] ^= byte(mask >> (8 * i))
	}
}

// scanner finds packets in a stream of bytes and skips what is none.
type scanner struct {
	r       io.Reader
	buf     []byte
	at, end int    // what was read and not used is buf[at:end]
	skipped uint64 // bytes that were of no packet
}

func newScanner(r io.Reader) *scanner { return &scanner{r: r, buf: make([]byte, 4*maxPacket)} }

// next returns the next packet. Its errors are those of the reader.
func (s *scanner) next() (packet, error) {
	for {
		if err := s.find(); err != nil {
			return packet{}, err
		}
		b := s.buf[s.at:s.end]
		if binary.LittleEndian.Uint32(b[36:]) != crc32.Checksum(b[:36], table) {
			s.skip(1)
			continue
		}
		n := int(binary.LittleEndian.Uint16(b[6:]))
		if n > maxPayload {
			s.skip(1)
			continue
		}
		if err := s.have(headerSize + n); err != nil {
			return packet{}, err
		}
		b = s.buf[s.at : s.at+headerSize+n]
		body := b[headerSize:]
		if binary.LittleEndian.Uint32(b[32:]) != crc32.Checksum(body, table) {
			s.skip(1)
			continue
		}
		xor(body, binary.LittleEndian.Uint64(b[16:]))
		s.at += len(b)
		return packet{kind: kind(b[4]), flags: b[5], session: binary.LittleEndian.Uint64(b[8:]), number: binary.LittleEndian.Uint32(b[24:]),
			stream: binary.LittleEndian.Uint32(b[28:]), payload: body}, nil
	}
}

func (s *scanner) skip(n int) {
	s.at += n
	s.skipped += uint64(n)
}

// find goes on to the next magic that has a header's length of bytes behind it.
func (s *scanner) find() error {
	for {
		i := bytes.Index(s.buf[s.at:s.end], magic)
		if i < 0 { // its beginning may be at the end
			s.skip(max(s.end-s.at-len(magic)+1, 0))
			if err := s.have(s.end - s.at + 1); err != nil {
				return err
			}
			continue
		}
		s.skip(i)
		return s.have(headerSize)
	}
}

// have reads until so many bytes are there, which is at most a packet and
// little more.
func (s *scanner) have(n int) error {
	if s.at == s.end {
		s.at, s.end = 0, 0
	}
	if s.at+n > len(s.buf) {
		s.end = copy(s.buf, s.buf[s.at:s.end])
		s.at = 0
	}
	for empty := 0; s.end-s.at < n; {
		got, err := s.r.Read(s.buf[s.end:])
		s.end += got
		if s.end-s.at >= n {
			return nil
		}
		if err != nil {
			return err
		}
		if got > 0 {
			empty = 0
		} else if empty++; empty > 100 {
			return io.ErrNoProgress
		}
	}
	return nil
}
