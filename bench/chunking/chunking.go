// Package chunking measures ways to cut the data files of layers into chunks:
// what a store then holds, and what a node fetches to read a part of it.
//
// A Scheme is where the borders are. Pack cuts, compresses and deduplicates a
// set of data files as a push into a store would, one pack for each layer with
// what no earlier layer brought. Replay counts what reads of a part of a data
// file ask of such a store; Fetch does it against a real HTTP server that is
// as far away as one likes.
package chunking

import (
	"slices"
	"sort"
)

// Block is the unit of a data file: contents of a file start at a multiple.
const Block = 4096

// Extent is a part of a data file, in bytes. Both are multiples of Block.
type Extent struct{ Off, Len int64 }

// Data is the data file of a layer. Files are the contents of its regular
// files, ascending, a file's parts between holes each alone.
type Data struct {
	Name  string
	Bytes []byte
	Files []Extent
}

// Scheme cuts data files. Ends returns where each chunk ends, ascending, the
// last at the end of the data.
type Scheme struct {
	Name     string
	Variable bool // chunks say how long they are
	Ends     func(d *Data) []int64
}

// Fixed cuts every size bytes.
func Fixed(name string, size int64) Scheme {
	return Scheme{Name: name, Ends: func(d *Data) (ends []int64) {
		for off := size; off < int64(len(d.Bytes)); off += size {
			ends = append(ends, off)
		}
		return closeEnds(ends, d)
	}}
}

// Limits of a content-defined scheme, in bytes. The average is what random
// contents would give.
type Limits struct{ Min, Avg, Max int64 }

// Gear cuts at any byte where a rolling hash of the 64 bytes before says so:
// FastCDC with normalized chunk sizes.
func Gear(name string, l Limits) Scheme {
	return Scheme{Name: name, Variable: true, Ends: func(d *Data) (ends []int64) {
		for off := int64(0); off < int64(len(d.Bytes)); {
			off += gearCut(d.Bytes[off:], l)
			ends = append(ends, off)
		}
		return ends
	}}
}

// Blocks cuts at multiples of Block only, after a block whose own hash says so.
// So does equal content wherever it lies, and a chunk never splits a page.
func Blocks(name string, l Limits) Scheme {
	return Scheme{Name: name, Variable: true, Ends: func(d *Data) []int64 {
		return closeEnds(blockEnds(nil, d.Bytes, Extent{0, int64(len(d.Bytes))}, l), d)
	}}
}

// FilesAndBlocks is Blocks with a border where a file of at least whole bytes
// starts and where it ends, so that what lies beside it does not matter to it.
func FilesAndBlocks(name string, l Limits, whole int64) Scheme {
	return Scheme{Name: name, Variable: true, Ends: func(d *Data) []int64 {
		return perFile(d, whole, func(ends []int64, e Extent, _ bool) []int64 { return blockEnds(ends, d.Bytes, e, l) })
	}}
}

// FilesFixed cuts files of at least whole bytes every size bytes from their
// start, and the small ones between them as Blocks does.
func FilesFixed(name string, l Limits, whole, size int64) Scheme {
	return Scheme{Name: name, Variable: true, Ends: func(d *Data) []int64 {
		return perFile(d, whole, func(ends []int64, e Extent, large bool) []int64 {
			if !large {
				return blockEnds(ends, d.Bytes, e, l)
			}
			for off := e.Off + size; off < e.Off+e.Len; off += size {
				ends = append(ends, off)
			}
			return ends
		})
	}}
}

// perFile cuts large files and what lies between two of them each alone.
func perFile(d *Data, whole int64, cut func([]int64, Extent, bool) []int64) (ends []int64) {
	piece := func(e Extent, large bool) {
		if e.Len > 0 {
			ends = append(cut(ends, e, large), e.Off+e.Len)
		}
	}
	at := int64(0)
	for _, f := range d.Files {
		if f.Len < whole {
			continue
		}
		piece(Extent{at, f.Off - at}, false)
		piece(f, true)
		at = f.Off + f.Len
	}
	piece(Extent{at, int64(len(d.Bytes)) - at}, false)
	return ends
}

// closeEnds adds the end of the data unless it is there.
func closeEnds(ends []int64, d *Data) []int64 {
	if n := int64(len(d.Bytes)); n > 0 && (len(ends) == 0 || ends[len(ends)-1] != n) {
		ends = append(ends, n)
	}
	return ends
}

// over returns the chunks [from, to) that an extent lies in.
func over(ends []int64, e Extent) (from, to int) {
	from = sort.Search(len(ends), func(i int) bool { return ends[i] > e.Off })
	to, found := slices.BinarySearch(ends, e.Off+e.Len)
	if found || to < len(ends) {
		to++
	}
	return from, max(from, to)
}
