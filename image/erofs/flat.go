package erofs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
)

// WriteFlat writes the tree as one file that needs no other: contents are behind
// the metadata, each file's in one row of blocks, and the image has no feature that
// a reader of plain EROFS does not know. It is for readers that know neither chunks
// nor devices; their kernel maps contents right out of the file, so no file ends
// behind its inode. Holes stay holes of the image. data is what the runs of the tree
// point into. w must be empty; after an error it holds nothing of value.
func WriteFlat(w File, root *Inode, data io.ReaderAt) (Stats, error) {
	if !root.IsDir() {
		return Stats{}, errors.New("root: not a directory")
	}
	l, err := plan(root, true)
	if err != nil {
		return Stats{}, err
	}
	if l.inodes[0].nid() > 1<<16-1 {
		return Stats{}, errors.New("root: attributes too large")
	}
	e := &encoder{w: bufio.NewWriterSize(io.NewOffsetWriter(w, 0), 1<<17), layout: l}
	e.super(0)
	for i, n := range l.inodes {
		e.inode(n, uint32(i+1))
	}
	e.padTo(roundUp(l.end, BlockSize))
	for _, n := range l.inodes {
		e.ownBlocks(n)
	}
	if err := e.w.Flush(); err != nil {
		return Stats{}, err
	}
	if err := w.Truncate(l.blocks * BlockSize); err != nil {
		return Stats{}, err
	}
	buf := make([]byte, 1<<20)
	for _, n := range l.inodes {
		for _, r := range n.Runs {
			if err := n.copyRun(w, data, r, buf); err != nil {
				return Stats{}, err
			}
		}
	}
	return Stats{Inodes: int64(len(l.inodes)), MetaSize: e.pos}, nil
}

// copyRun puts a part of a file's contents into its place.
func (n *Inode) copyRun(w File, data io.ReaderAt, r Run, buf []byte) error {
	to, from, left := int64(n.block)*BlockSize+r.Off, int64(r.Block)*BlockSize, int64(r.Count)*BlockSize
	if r.Off+left > roundUp(n.Size, BlockSize) {
		return fmt.Errorf("run of %d blocks at %d: ends behind the file", r.Count, r.Off)
	}
	for left > 0 {
		b := buf[:min(left, int64(len(buf)))]
		if _, err := data.ReadAt(b, from); err != nil {
			return fmt.Errorf("read block %d: %w", from/BlockSize, err)
		}
		if err := writeSparse(w, b, to); err != nil {
			return err
		}
		k := int64(len(b))
		to, from, left = to+k, from+k, left-k
	}
	return nil
}
