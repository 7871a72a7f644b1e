package snapshot

import (
	"bytes"
	"crypto/sha256"
	"hash"
	"path"

	"golang.org/x/sys/unix"
)

// watched is a file whose contents are seen on their way into the layer.
type watched struct {
	s     *scrubber
	st    *unix.Stat_t
	name  string
	h     hash.Hash // nil: not compared
	at    int64     // bytes hashed
	free  int64     // bytes of holes that may be hashed for what the file holds
	head  []byte    // what is looked at: of a hole one zero byte
	to    int64     // where that ends in the file
	spend func(n int64) error
}

// watch begins to see a file. A nil scrubber sees nothing.
func (s *scrubber) watch(c *contents, st *unix.Stat_t, name string) *watched {
	if s == nil {
		return nil
	}
	w := &watched{s: s, st: st, name: name, free: st.Blocks * 512}
	switch {
	case len(s.answers) == 0 && !s.sizes[st.Size]: // it equals nothing that goes
	case st.Size <= maxHashed && st.Size-st.Blocks*512-w.free <= s.holes:
		w.h = sha256.New()
	default:
		s.unread[inodeOf(st)] = true
	}
	w.spend, c.seen = c.spend, w.see
	return w
}

func (w *watched) see(b []byte, off int64) error {
	if off < maxLooked {
		if off > w.to {
			w.head = append(w.head, 0)
		}
		w.head = append(w.head, b[:min(int64(len(b)), maxLooked-off)]...)
		w.to = off + int64(len(b))
	}
	if err := w.zeros(off); err != nil || w.h == nil {
		return err
	}
	_, _ = w.h.Write(b) // never errs
	w.at = off + int64(len(b))
	return nil
}

// zeros hashes the hole before an offset. A hole costs as much as data then, and
// nothing to make: of those that are larger than the data of their files, some
// are hashed.
func (w *watched) zeros(to int64) error {
	var hole [64 << 10]byte
	for w.h != nil && w.at < to {
		n := min(to-w.at, int64(len(hole)))
		if w.free -= n; w.free < 0 {
			if w.s.holes += w.free; w.s.holes < 0 {
				w.h, w.s.holes = nil, 0
				w.s.unread[inodeOf(w.st)] = true
				return nil
			}
			w.free = 0
		}
		if err := w.spend(n); err != nil {
			return err
		}
		_, _ = w.h.Write(hole[:n]) // never errs
		w.at += n
	}
	return nil
}

// verdict says whether the file goes, now that all of it was seen.
func (w *watched) verdict(size int64) (gone bool, err error) {
	s := w.s
	if err := w.zeros(size); err != nil {
		return false, err
	}
	if w.h != nil {
		var d sum
		w.h.Sum(d[:0])
		why := s.copies[d]
		if s.answers[d] {
			why = "a known answer"
		}
		if why != "" {
			s.gone[inodeOf(w.st)] = why // its other names go as well
			s.removed(w.name, why, w.st)
			return true, nil
		}
	}
	w.examine(size)
	return false, nil
}

// examine reports what looks like a secret, or like something that was brought
// here, in a file that stays.
func (w *watched) examine(size int64) {
	s, base := w.s, path.Base(w.name)
	if w.st.Mode&(unix.S_ISUID|unix.S_ISGID) != 0 && w.st.Mode&0o111 != 0 {
		s.suspicious(w.name, "a program that runs as its owner", size, 0)
	}
	usual := usualPlace(w.name)
	switch {
	case bytes.HasPrefix(w.head, []byte("\x7fELF")):
		if !usual {
			s.suspicious(w.name, "a program outside of the usual places", size, 0)
		}
		return
	case size >= largeFile && !usual:
		s.suspicious(w.name, "a large file outside of the usual places", size, 0)
	}
	if bytes.IndexByte(w.head[:min(len(w.head), 8<<10)], 0) >= 0 {
		return // not text
	}
	if line, kind := findToken(w.head); kind != "" {
		s.suspicious(w.name, kind, size, line)
	} else if line := findAnswerLike(s, w.head); line {
		s.suspicious(w.name, "a known answer but for the white space at its ends", size, 0)
	} else if !usual && len(w.head) <= maxEntropic {
		if line, what := findEntropic(w.head, base); what != "" {
			s.suspicious(w.name, what, size, line)
		}
	}
}

// findAnswerLike finds an answer that was saved with other line ends.
func findAnswerLike(s *scrubber, b []byte) bool {
	if len(s.answers) == 0 || len(b) == maxLooked {
		return false
	}
	text := bytes.ReplaceAll(bytes.TrimSpace(b), []byte("\r\n"), []byte("\n"))
	return s.answers[sha256.Sum256(text)] || s.answers[sha256.Sum256(append(text, '\n'))]
}
