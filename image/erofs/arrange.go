package erofs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"
)

// How Arrange splits files. The chunks of a file have one size, so one with a
// part elsewhere costs 8 bytes of metadata for each piece.
const (
	splitFrom  = 128 << 10 // bytes of the smallest file that is split
	leastPiece = 16 << 10
	mostPieces = 4096 // of a file
)

// Part is a row of blocks of a data file.
type Part struct {
	Block uint32
	Count uint32
}

// Arrangement is where the contents of a tree are in a new data file.
type Arrangement struct {
	First  uint64  // blocks that were asked to be first, with what had to come with them
	Blocks uint64  // of the new file
	moves  []moved // in the order of the new file, without a gap
	from   []moved // the same in the order of the old one
}

type moved struct {
	from, to uint32
	count    uint32
}

// Arrange gives the contents of a tree new places: the parts of the data file
// that are listed first, in that order, then the rest as it was. A small file is
// moved whole, a large one in pieces. It changes the runs of the tree; Copy makes
// the data file that they are then of. What no inode has is left out.
func Arrange(root *Inode, first []Part) (Arrangement, error) {
	a := &arranger{new: map[*Inode][]Run{}}
	if err := a.collect(root); err != nil {
		return Arrangement{}, err
	}
	for _, p := range first {
		a.part(p)
	}
	a.out.First = a.out.Blocks
	for _, r := range a.runs {
		a.rest(r)
	}
	for in, runs := range a.new {
		in.Runs = joined(runs)
	}
	a.out.from = slices.SortedFunc(slices.Values(a.out.moves), func(x, y moved) int { return cmp.Compare(x.from, y.from) })
	return a.out, nil
}

// Place is where a block of the old file is in the new one.
func (a Arrangement) Place(block uint32) (to uint32, ok bool) {
	i := sort.Search(len(a.from), func(i int) bool { return a.from[i].from > block }) - 1
	if i < 0 || block-a.from[i].from >= a.from[i].count {
		return 0, false
	}
	return a.from[i].to + block - a.from[i].from, true
}

// Copy writes the new data file from the old one. Zeros become holes.
func (a Arrangement) Copy(to File, from io.ReaderAt) error {
	buf := make([]byte, 1<<20)
	for _, m := range a.moves {
		at, src, left := int64(m.to)*BlockSize, int64(m.from)*BlockSize, int64(m.count)*BlockSize
		for left > 0 {
			b := buf[:min(left, int64(len(buf)))]
			if _, err := from.ReadAt(b, src); err != nil {
				return fmt.Errorf("read block %d: %w", src/BlockSize, err)
			}
			if err := writeSparse(to, b, at); err != nil {
				return err
			}
			n := int64(len(b))
			at, src, left = at+n, src+n, left-n
		}
	}
	return to.Truncate(int64(a.Blocks) * BlockSize)
}

func writeSparse(to io.WriterAt, b []byte, at int64) error {
	for len(b) > 0 {
		part := b[:min(len(b), len(zeros))]
		if !bytes.Equal(part, zeros[:len(part)]) {
			if _, err := to.WriteAt(part, at); err != nil {
				return err
			}
		}
		b, at = b[len(part):], at+int64(len(part))
	}
	return nil
}

type arranger struct {
	runs []*placing // in the order of the old file
	new  map[*Inode][]Run
	out  Arrangement
}

// placing is a run whose pieces are being placed.
type placing struct {
	in    *Inode
	run   Run
	piece int64  // bytes; 0: it is moved whole
	taken []bool // by piece; nil: none
}

// collect lists the runs of the tree, which must not overlap.
func (a *arranger) collect(root *Inode) error {
	seen := map[*Inode]bool{}
	err := root.Walk(func(_ string, n *Inode) error {
		if !seen[n] {
			seen[n] = true
			for _, r := range n.Runs {
				a.runs = append(a.runs, &placing{in: n, run: r, piece: pieceOf(n.Size)})
			}
		}
		return nil
	})
	slices.SortFunc(a.runs, func(x, y *placing) int { return cmp.Compare(x.run.Block, y.run.Block) })
	for i := 1; i < len(a.runs); i++ {
		if p := a.runs[i-1].run; uint64(p.Block)+uint64(p.Count) > uint64(a.runs[i].run.Block) {
			return errors.New("data: two files share a block")
		}
	}
	return err
}

// pieceOf is the size in which a file is split: so that its indexes are few.
func pieceOf(size int64) int64 {
	if size < splitFrom {
		return 0
	}
	piece := int64(leastPiece)
	for size/piece >= mostPieces {
		piece <<= 1
	}
	return piece
}

// part places the pieces that have blocks of the part, in their order.
func (a *arranger) part(p Part) {
	end := uint64(p.Block) + uint64(p.Count)
	i := sort.Search(len(a.runs), func(i int) bool {
		r := a.runs[i].run
		return uint64(r.Block)+uint64(r.Count) > uint64(p.Block)
	})
	for ; i < len(a.runs) && uint64(a.runs[i].run.Block) < end; i++ {
		r := a.runs[i]
		from := int64(max(p.Block, r.run.Block)-r.run.Block) * BlockSize
		to := int64(min(end, uint64(r.run.Block)+uint64(r.run.Count))-uint64(r.run.Block)) * BlockSize
		for k := r.index(from); k <= r.index(to-1); k++ {
			a.place(r, k)
		}
	}
}

func (a *arranger) rest(r *placing) {
	for k := range r.index(int64(r.run.Count)*BlockSize-1) + 1 {
		a.place(r, k)
	}
}

// index is the number of the piece, in its run, of a byte of the run.
func (r *placing) index(off int64) int64 {
	if r.piece == 0 {
		return 0
	}
	return (r.run.Off+off)/r.piece - r.run.Off/r.piece
}

// cut is where a piece is: blocks of the run. Pieces have borders at multiples of
// their size in the file, and at the ends of the run.
func (r *placing) cut(k int64) (from, to uint32) {
	if r.piece == 0 {
		return 0, r.run.Count
	}
	begin := (r.run.Off/r.piece+k)*r.piece - r.run.Off
	return uint32(max(begin, 0) / BlockSize), uint32(min((begin+r.piece)/BlockSize, int64(r.run.Count)))
}

func (a *arranger) place(r *placing, k int64) {
	if r.taken == nil {
		r.taken = make([]bool, r.index(int64(r.run.Count)*BlockSize-1)+1)
	}
	if r.taken[k] {
		return
	}
	r.taken[k] = true
	from, to := r.cut(k)
	m := moved{from: r.run.Block + from, to: uint32(a.out.Blocks), count: to - from}
	a.new[r.in] = append(a.new[r.in], Run{Off: r.run.Off + int64(from)*BlockSize, Block: m.to, Count: m.count})
	a.out.Blocks += uint64(m.count)
	if n := len(a.out.moves) - 1; n >= 0 && a.out.moves[n].from+a.out.moves[n].count == m.from {
		a.out.moves[n].count += m.count
		return
	}
	a.out.moves = append(a.out.moves, m)
}

// joined sorts the runs of a file and puts neighbours together.
func joined(runs []Run) []Run {
	slices.SortFunc(runs, func(x, y Run) int { return cmp.Compare(x.Off, y.Off) })
	out := runs[:0]
	for _, r := range runs {
		if n := len(out) - 1; n >= 0 && out[n].Off+int64(out[n].Count)*BlockSize == r.Off && out[n].Block+out[n].Count == r.Block {
			out[n].Count += r.Count
			continue
		}
		out = append(out, r)
	}
	return out
}
