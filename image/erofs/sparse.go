package erofs

import "io"

// Sparse is a file whose holes are known.
type Sparse interface {
	io.ReaderAt
	// NextData returns the first range from off on that is no hole; an empty
	// one where nothing is left.
	NextData(off int64) (start, end int64, err error)
}

// AppendSparse copies the first size bytes of f. It reads nothing that is a
// hole, so that a file that is nearly all hole costs what it holds, however
// large the units are in which its holes are kept. An error of f ends it
// between two reads of at most 64 KiB: f may count, and look at a context.
func (d *Data) AppendSparse(f Sparse, size int64) (runs []Run, err error) {
	unit, m := holeUnit(size), dataMap{f: f, size: size}
	for off := int64(0); off < size; off += unit {
		start, _, err := m.next(off)
		if err != nil {
			return nil, err
		}
		if start >= size {
			break
		}
		off = max(off, start/unit*unit)
		if runs, err = d.appendUnit(runs, off, func() (bool, error) { return d.sparseUnit(&m, off, min(unit, size-off)) }); err != nil {
			return nil, err
		}
	}
	return runs, nil
}

// sparseUnit is unit for the n bytes at off of a file whose holes are known.
func (d *Data) sparseUnit(m *dataMap, off, n int64) (wrote bool, err error) {
	u, piece := written{d: d}, int64(len(d.buf))
	for end := off + n; off < end; {
		start, _, err := m.next(off)
		if err != nil {
			return false, err
		}
		if start >= end {
			u.held += end - off
			break
		}
		skip := (start - off) / piece * piece
		u.held, off = u.held+skip, off+skip
		b := d.buf[:min(end-off, piece)]
		if err := m.fill(b, off); err != nil {
			return false, err
		}
		if err := u.put(b); err != nil {
			return false, err
		}
		off += int64(len(b))
	}
	return u.end()
}

// dataMap remembers the range of data that was found last.
type dataMap struct {
	f          Sparse
	size       int64
	start, end int64
}

// next is the first range of data from off on, which never goes back; size
// where nothing is left.
func (m *dataMap) next(off int64) (start, end int64, err error) {
	if off >= m.end {
		if m.start, m.end, err = m.f.NextData(off); err != nil {
			return 0, 0, err
		}
		if m.start >= m.end || m.start >= m.size || m.end <= off {
			m.start, m.end = m.size, m.size
		}
	}
	return max(m.start, off), min(m.end, m.size), nil
}

// fill reads the bytes at off; holes are zeros and are not read.
func (m *dataMap) fill(b []byte, off int64) error {
	for len(b) > 0 {
		start, end, err := m.next(off)
		if err != nil {
			return err
		}
		hole := min(start-off, int64(len(b)))
		clear(b[:hole])
		b, off = b[hole:], off+hole
		n := min(end-off, int64(len(b)))
		if n <= 0 {
			continue
		}
		if k, err := m.f.ReadAt(b[:n], off); int64(k) < n {
			if err == io.EOF || err == nil {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		b, off = b[n:], off+n
	}
	return nil
}
