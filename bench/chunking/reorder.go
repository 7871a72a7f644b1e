package chunking

import (
	"math"
	"slices"
	"sort"
)

// Reorder lays the data of a layer out anew: the files that accesses touch
// first, in the order in which they do, then the others as they were. It
// returns the data under another name, and the accesses that touch it as they
// would read it then; what they read of other layers stays.
func Reorder(d *Data, name string, accesses []Access) (*Data, []Access) {
	first := make([]int, len(d.Files))
	for i := range first {
		first[i] = math.MaxInt
	}
	n := 0
	for _, a := range accesses {
		for _, r := range a.Reads {
			if r.Layer != d.Name {
				continue
			}
			for i := d.fileAt(r.Off); i < len(d.Files) && d.Files[i].Off < r.Off+r.Len; i++ {
				first[i] = min(first[i], n)
				n++
			}
		}
	}
	order := make([]int, len(d.Files))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		if first[a] != first[b] && first[a] < first[b] {
			return -1
		} else if first[a] != first[b] {
			return 1
		}
		return 0
	})
	out := &Data{Name: name, Bytes: make([]byte, 0, len(d.Bytes))}
	moved := make([]int64, len(d.Files)) // by which each file
	for _, i := range order {
		f := d.Files[i]
		moved[i] = int64(len(out.Bytes)) - f.Off
		out.Files = append(out.Files, Extent{int64(len(out.Bytes)), f.Len})
		out.Bytes = append(out.Bytes, d.Bytes[f.Off:f.Off+f.Len]...)
	}
	return out, d.translate(name, accesses, moved)
}

// fileAt is the file that a byte belongs to, or the first behind it.
func (d *Data) fileAt(off int64) int {
	return sort.Search(len(d.Files), func(i int) bool { return d.Files[i].Off+d.Files[i].Len > off })
}

func (d *Data) translate(name string, accesses []Access, moved []int64) (out []Access) {
	for _, a := range accesses {
		b := Access{Name: a.Name}
		for _, r := range a.Reads {
			if r.Layer != d.Name {
				b.Reads = append(b.Reads, r)
				continue
			}
			// A read is of one file, but readahead may go over the border of its last block.
			for i := d.fileAt(r.Off); i < len(d.Files) && d.Files[i].Off < r.Off+r.Len; i++ {
				from, to := max(r.Off, d.Files[i].Off), min(r.Off+r.Len, d.Files[i].Off+d.Files[i].Len)
				b.Reads = append(b.Reads, Read{name, Extent{from + moved[i], to - from}})
			}
		}
		out = append(out, b)
	}
	return out
}
