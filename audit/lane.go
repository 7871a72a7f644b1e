package audit

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
)

// lane is one of the two sequences of segments of a log: numbers 0..head-1 are
// kept for ever, of the others the newest.
type lane struct {
	dir  string
	name string
	size Sizes

	segment int   // that is written to
	end     int64 // bytes in it; 0: it is not there yet
	last    uint64
	phase   string
}

// Sizes bound a log: a lane has at most Head+Tail segments of about Segment bytes.
type Sizes struct {
	Segment int64
	Head    int
	Tail    int
}

// defaultSizes make 16 MiB for each sandbox.
var defaultSizes = Sizes{Segment: 2 << 20, Head: 2, Tail: 2}

func (l *lane) path(segment int) string {
	return filepath.Join(l.dir, l.name+strconv.Itoa(segment))
}

// segments lists the numbers there are, in order.
func (l *lane) segments() ([]int, error) {
	entries, err := os.ReadDir(l.dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var list []int
	for _, e := range entries {
		rest, ok := strings.CutPrefix(e.Name(), l.name)
		if n, err := strconv.Atoi(rest); ok && err == nil && n >= 0 {
			list = append(list, n)
		}
	}
	slices.Sort(list)
	return list, nil
}

// open finds where an earlier process stopped, and cuts off what it did not
// write to its end.
func (l *lane) open() error {
	list, err := l.segments()
	if err != nil || len(list) == 0 {
		return err
	}
	l.segment = list[len(list)-1]
	for _, n := range list[max(0, len(list)-2):] { // the newest may have no record yet
		_, l.end, err = readSegment(l.path(n), 0, -1, func(r dsec.AuditRecord) {
			l.last, l.phase = r.Seq, r.Phase
		})
		if err != nil {
			return err
		}
	}
	if l.end == 0 { // not even its magic
		return os.Remove(l.path(l.segment))
	}
	return os.Truncate(l.path(l.segment), l.end)
}

// write adds frames, in the next segment if this one is full.
func (l *lane) write(frames []byte) error {
	if l.end >= l.size.Segment {
		l.segment, l.end = l.segment+1, 0
		if old := l.segment - l.size.Tail; old >= l.size.Head {
			if err := os.Remove(l.path(old)); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	if l.end == 0 {
		frames = append([]byte(magic), frames...)
	}
	f, err := os.OpenFile(l.path(l.segment), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt(frames, l.end); err != nil {
		return errors.Join(err, f.Truncate(l.end))
	}
	l.end += int64(len(frames))
	return nil
}

// readSegment reads whole records from offset on, at most up to end (-1: all), and
// returns where it stopped and how far the file is whole.
func readSegment(path string, offset, end int64, take func(dsec.AuditRecord)) (int64, int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return offset, 0, err
	}
	defer f.Close()
	if end < 0 {
		st, err := f.Stat()
		if err != nil {
			return offset, 0, err
		}
		end = st.Size()
	}
	b := make([]byte, max(0, end-offset))
	n, err := f.ReadAt(b, offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return offset, 0, err
	}
	b = b[:n]
	if offset == 0 {
		rest, ok := strings.CutPrefix(string(b[:min(len(b), len(magic))]), magic)
		if !ok || rest != "" {
			return 0, 0, nil
		}
		b, offset = b[len(magic):], int64(len(magic))
	}
	for len(b) > 0 {
		r, n, err := decodeFrame(b)
		if err != nil {
			break
		}
		take(r)
		b, offset = b[n:], offset+int64(n)
	}
	return offset, offset, nil
}
