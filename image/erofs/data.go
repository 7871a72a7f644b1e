package erofs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"
)

// Data appends file contents to a data file, block by block, and leaves out
// what is zero over a whole hole unit.
type Data struct {
	w   File
	pos int64 // bytes, a multiple of BlockSize between files
	buf []byte
}

// NewData returns a Data that writes to w from block 0.
func NewData(w File) *Data {
	return &Data{w: w, buf: make([]byte, 1<<holeBits)}
}

// Blocks is the number of blocks written.
func (d *Data) Blocks() uint64 { return uint64(d.pos) / BlockSize }

// Rewind forgets everything from block n on.
func (d *Data) Rewind(n uint64) error {
	d.pos = int64(n) * BlockSize
	return d.w.Truncate(d.pos)
}

var zeros [1 << holeBits]byte

// holeUnit is the granularity in which holes of a file are kept: it bounds the
// number of chunk indexes whatever size the file claims.
func holeUnit(size int64) int64 {
	unit := int64(1) << holeBits
	for size/unit >= maxIndexes {
		unit <<= 1
	}
	return unit
}

// Append copies exactly size bytes from r and returns where they are.
func (d *Data) Append(r io.Reader, size int64) (runs []Run, err error) {
	unit := holeUnit(size)
	for off := int64(0); off < size; off += unit {
		if runs, err = d.appendUnit(runs, off, func() (bool, error) { return d.unit(r, min(unit, size-off)) }); err != nil {
			return nil, err
		}
	}
	return runs, nil
}

// Copy appends the contents of a file of another image, its holes kept as they
// are, and returns where they are now. r reads the file, runs say where it has
// contents.
func (d *Data) Copy(r io.ReaderAt, size int64, runs []Run) ([]Run, error) {
	var out []Run
	for _, run := range runs {
		block := d.Blocks()
		if block+uint64(run.Count) > maxBlocks {
			return nil, errors.New("data: more than 16 TiB")
		}
		end := run.Off + int64(run.Count)*BlockSize
		if err := d.copyRange(r, run.Off, min(end, size)); err != nil {
			return nil, err
		}
		if last := len(out) - 1; last >= 0 && out[last].Off+int64(out[last].Count)*BlockSize == run.Off {
			out[last].Count += run.Count
			continue
		}
		out = append(out, Run{Off: run.Off, Block: uint32(block), Count: run.Count})
	}
	return out, nil
}

// copyRange copies the bytes from off to end and pads them to a block.
func (d *Data) copyRange(r io.ReaderAt, off, end int64) error {
	for off < end {
		b := d.buf[:min(end-off, int64(len(d.buf)))]
		if n, err := r.ReadAt(b, off); n < len(b) {
			if err == io.EOF || err == nil {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		off += int64(len(b))
		if err := d.put(b); err != nil {
			return err
		}
	}
	return nil
}

// appendUnit appends what copies the unit at off of a file, if it wrote anything.
func (d *Data) appendUnit(runs []Run, off int64, unit func() (wrote bool, err error)) ([]Run, error) {
	block := d.Blocks()
	wrote, err := unit()
	if err != nil || !wrote {
		return runs, err
	}
	if d.Blocks() > maxBlocks {
		return nil, errors.New("data: more than 16 TiB")
	}
	count := uint32(d.Blocks() - block)
	if last := len(runs) - 1; last >= 0 && runs[last].Off+int64(runs[last].Count)*BlockSize == off {
		runs[last].Count += count
		return runs, nil
	}
	return append(runs, Run{Off: off, Block: uint32(block), Count: count}), nil
}

// unit copies n bytes and pads them to a block, or writes nothing if all are
// zero.
func (d *Data) unit(r io.Reader, n int64) (wrote bool, err error) {
	u := written{d: d}
	for left := n; left > 0; {
		b := d.buf[:min(left, int64(len(d.buf)))]
		if _, err := io.ReadFull(r, b); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return false, err
		}
		left -= int64(len(b))
		if err := u.put(b); err != nil {
			return false, err
		}
	}
	return u.end()
}

// written is a unit on its way.
type written struct {
	d    *Data
	held int64 // zero bytes not yet written
	some bool
}

// put writes the front of the buffer, in whole blocks.
func (d *Data) put(b []byte) error {
	if pad := roundUp(len(b), BlockSize); pad > len(b) {
		clear(d.buf[len(b):pad])
		b = d.buf[:pad]
	}
	if _, err := d.w.WriteAt(b, d.pos); err != nil {
		return err
	}
	d.pos += int64(len(b))
	return nil
}

// put appends a part of the unit that is in the buffer of the Data.
func (u *written) put(b []byte) error {
	d := u.d
	if bytes.Equal(b, zeros[:len(b)]) {
		u.held += int64(len(b))
		return nil
	}
	d.pos += u.held // a hole of the data file itself
	u.held, u.some = 0, true
	return d.put(b)
}

func (u *written) end() (wrote bool, err error) {
	if u.some && u.held > 0 {
		u.d.pos += roundUp(u.held, BlockSize)
		err = u.d.w.Truncate(u.d.pos)
	}
	return u.some, err
}

// Compact moves what the tree refers to in the data file together, in its
// order, and gives back the blocks it then takes. Contents that no inode has
// any more (a file replaced by a later layer) are gone from the file.
func Compact(f File, root *Inode) (blocks uint64, err error) {
	var runs []*Run
	seen := map[*Inode]bool{}
	walkErr := root.Walk(func(_ string, n *Inode) error {
		if len(n.Runs) > 0 && !seen[n] {
			seen[n] = true
			for i := range n.Runs {
				runs = append(runs, &n.Runs[i])
			}
		}
		return nil
	})
	if walkErr != nil {
		return 0, walkErr
	}
	slices.SortFunc(runs, func(a, b *Run) int { return cmp.Compare(a.Block, b.Block) })
	buf := make([]byte, 1<<20)
	for _, r := range runs {
		if uint64(r.Block) != blocks {
			// Downwards only, so a block is read before it is overwritten.
			if err := move(f, int64(blocks)*BlockSize, *r, buf); err != nil {
				return 0, err
			}
			r.Block = uint32(blocks)
		}
		blocks += uint64(r.Count)
	}
	return blocks, f.Truncate(int64(blocks) * BlockSize)
}

// File is what is needed of the data file.
type File interface {
	io.ReaderAt
	io.WriterAt
	Truncate(size int64) error
}

func move(f File, to int64, r Run, buf []byte) error {
	from, left := int64(r.Block)*BlockSize, int64(r.Count)*BlockSize
	for left > 0 {
		b := buf[:min(left, int64(len(buf)))]
		if _, err := f.ReadAt(b, from); err != nil {
			return fmt.Errorf("move block %d: %w", r.Block, err)
		}
		if _, err := f.WriteAt(b, to); err != nil {
			return err
		}
		n := int64(len(b))
		from, to, left = from+n, to+n, left-n
	}
	return nil
}

// chunks returns the exponent of the chunk size and the number of chunks of a
// file: one chunk if it has no hole, else chunks as large as the holes allow.
func chunks(size int64, runs []Run) (shift uint, count int64) {
	shift = uint(max(BlockBits, bits.Len64(uint64(size-1))))
	edge := func(off int64) {
		if off != 0 && off < size {
			shift = min(shift, uint(bits.TrailingZeros64(uint64(off))))
		}
	}
	for _, r := range runs {
		edge(r.Off)
		edge(r.Off + int64(r.Count)*BlockSize)
	}
	shift = min(shift, chunkBits)
	return shift, (size + 1<<shift - 1) >> shift
}
