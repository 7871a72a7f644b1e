package image

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// holeReader reads a file as zeros where it has holes without asking the file
// system for them, so that a file that is nearly all hole costs what it holds.
type holeReader struct {
	f    *os.File
	size int64
	off  int64
	data int64 // the next byte that is not in a hole
	end  int64 // of that data
}

func newHoleReader(f *os.File, size int64) io.Reader { return &holeReader{f: f, size: size} }

func (h *holeReader) Read(p []byte) (int, error) {
	if h.off >= h.size {
		return 0, io.EOF
	}
	if h.off >= h.end {
		h.find()
	}
	if h.off < h.data {
		p = p[:min(int64(len(p)), h.data-h.off)]
		clear(p)
		h.off += int64(len(p))
		return len(p), nil
	}
	n, err := h.f.ReadAt(p[:min(int64(len(p)), h.end-h.off)], h.off)
	h.off += int64(n)
	if n > 0 {
		err = nil
	}
	return n, err
}

// find looks for the next data; a file system that cannot tell has no holes.
func (h *holeReader) find() {
	h.data, h.end = h.off, h.size
	data, err := unix.Seek(int(h.f.Fd()), h.off, unix.SEEK_DATA)
	if err == unix.ENXIO {
		h.data = h.size
		return
	}
	if err != nil {
		return
	}
	end, err := unix.Seek(int(h.f.Fd()), data, unix.SEEK_HOLE)
	if err != nil {
		return
	}
	h.data, h.end = min(data, h.size), min(end, h.size)
}
