package layer

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/opendsec/dsec"
)

const (
	traceMagic  = "DSECTRC\x01" // the last byte is the version
	traceHeader = 8 + sha256.Size + 16
	tracePiece  = 24

	// MaxTrace is the size of the largest encoding of a trace, in bytes.
	MaxTrace = traceHeader + MaxTracePieces*tracePiece
)

// Encode returns the one encoding of the trace.
func (t Trace) Encode() ([]byte, error) {
	sum, err := t.Layer.sum()
	if err == nil {
		err = t.check()
	}
	if err != nil {
		return nil, dsec.E(dsec.Invalid, "write trace", string(t.Layer), err)
	}
	b := append(make([]byte, 0, traceHeader+len(t.Pieces)*tracePiece), traceMagic...)
	b = append(b, sum...)
	b = binary.LittleEndian.AppendUint64(b, uint64(t.Window))
	b = binary.LittleEndian.AppendUint32(b, t.Recordings)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(t.Pieces)))
	for _, p := range t.Pieces {
		for _, n := range []uint32{p.Block, p.Blocks, p.Count, p.Placed} {
			b = binary.LittleEndian.AppendUint32(b, n)
		}
		b = binary.LittleEndian.AppendUint64(b, p.Sum)
	}
	return b, nil
}

// DecodeTrace reads an encoding, which must be the one that Encode gives, of a
// trace of the layer.
func DecodeTrace(b []byte, want Digest) (Trace, error) {
	t, err := decodeTrace(b)
	if err == nil && t.Layer != want {
		err = fmt.Errorf("it is of layer %s", t.Layer)
	}
	if err != nil {
		return Trace{}, dsec.E(dsec.Corrupt, "read trace", string(want), err)
	}
	return t, nil
}

func decodeTrace(b []byte) (t Trace, err error) {
	if len(b) < traceHeader || string(b[:8]) != traceMagic {
		return t, errors.New("not a trace of version 1")
	}
	t.Layer = FromSum(b[8 : 8+sha256.Size])
	b = b[8+sha256.Size:]
	window, pieces := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[12:])
	t.Recordings = binary.LittleEndian.Uint32(b[8:])
	b = b[16:]
	if pieces > MaxTracePieces || len(b) != int(pieces)*tracePiece || window > math.MaxInt64 {
		return t, fmt.Errorf("%d bytes for %d pieces", len(b), pieces)
	}
	t.Window = time.Duration(window)
	for range pieces {
		t.Pieces = append(t.Pieces, Piece{
			Block: binary.LittleEndian.Uint32(b), Blocks: binary.LittleEndian.Uint32(b[4:]), Count: binary.LittleEndian.Uint32(b[8:]),
			Placed: binary.LittleEndian.Uint32(b[12:]), Sum: binary.LittleEndian.Uint64(b[16:])})
		b = b[tracePiece:]
	}
	return t, t.check()
}

// check says whether the trace is one that merging recordings makes.
func (t Trace) check() error {
	if t.Recordings < 1 || t.Recordings > MaxRecordings || t.Window < 0 || len(t.Pieces) > MaxTracePieces {
		return fmt.Errorf("%d recordings of %s, %d pieces", t.Recordings, t.Window, len(t.Pieces))
	}
	blocks := uint64(0)
	for i, p := range t.Pieces {
		blocks += uint64(p.Blocks)
		switch {
		case p.Blocks < 1 || uint64(p.Block)+uint64(p.Blocks) > MaxData/TraceBlock || blocks > maxTraceBlocks:
			return fmt.Errorf("piece %d: %d blocks from %d", i, p.Blocks, p.Block)
		case p.Count < 1 || p.Count > t.Recordings || p.Placed > p.Count || p.Sum > 1<<60 || p.lastSum() > uint64(p.Placed)*maxPosition:
			return fmt.Errorf("piece %d: touched %d times, %d placed, %d", i, p.Count, p.Placed, p.Sum)
		case i > 0 && t.Pieces[i-1].compare(p) >= 0:
			return fmt.Errorf("piece %d: out of order", i)
		}
	}
	byPlace := slices.SortedFunc(slices.Values(t.Pieces), func(p, q Piece) int { return int(int64(p.Block) - int64(q.Block)) })
	for i := 1; i < len(byPlace); i++ {
		if p, q := byPlace[i-1], byPlace[i]; uint64(p.Block)+uint64(p.Blocks) > uint64(q.Block) || p.goesOn(q) {
			return fmt.Errorf("pieces at %d and %d: overlap, or are one", p.Block, q.Block)
		}
	}
	return nil
}

// lastSum is the sum of the last block of the piece.
func (p Piece) lastSum() uint64 { return p.Sum + uint64(p.Blocks-1)*uint64(p.Placed) }
