package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"os"
	"path"
	"strconv"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
)

const (
	maxHashed = 1 << 30 // bytes of the largest file that is compared with known ones
	maxLooked = 1 << 20 // bytes of the beginning of a file that are looked at
	minCopy   = 16      // bytes: shorter files are equal by chance
)

type sum [sha256.Size]byte

// scrubber decides what is left out, and keeps the report.
//
// It looks at the disk twice. The first time it learns which inodes are to go
// and what is in them: a secret is the same under another name, as a hard link
// or as a copy, and that name may come first.
type scrubber struct {
	rules   dsec.Scrub
	globs   []files.Glob
	answers map[sum]bool
	below   *Below
	gone    map[inode]string // why every name of it goes
	copies  map[sum]string   // contents that go, and why
	report  dsec.ScrubReport
}

func newScrubber(rules dsec.Scrub, below *Below) *scrubber {
	s := &scrubber{rules: rules, below: below, answers: map[sum]bool{}, gone: map[inode]string{}, copies: map[sum]string{},
		report: dsec.ScrubReport{Version: dsec.ScrubReportVersion, Rules: rules}}
	for _, p := range rules.Patterns {
		if g, err := files.CompileGlob(p); err == nil { // Validate has read it
			s.globs = append(s.globs, g)
		}
	}
	for _, a := range rules.Answers {
		var d sum
		if _, err := hex.Decode(d[:], []byte(a)); err == nil {
			s.answers[d] = true
		}
	}
	return s
}

// look is the first walk.
func (s *scrubber) look(p *packer) error {
	return p.walk(place{}, func(place) visit {
		return func(at place, name string, f *opened, st *unix.Stat_t) (*place, error) {
			full := at.child(name)
			r, inherited := s.rule(full), at.gone != nil
			if inherited {
				r = *at.gone
				if st.Mode&unix.S_IFMT != unix.S_IFDIR {
					s.removed(full, r.why, st)
				}
			}
			switch st.Mode & unix.S_IFMT {
			case unix.S_IFDIR:
				var over overlaid
				err := eachXattr(f.File, func(key string, value []byte) error {
					over.note(key, value)
					return nil
				})
				sub := at.sub(name, f.view, over)
				if r.why != "" && !r.ifToken {
					sub.gone = &r
				}
				return sub, err
			case unix.S_IFREG:
				return nil, s.lookAt(full, r, f.File, st)
			}
			return nil, nil
		}
	})
}

// lookAt notes a regular file that goes under all its names.
func (s *scrubber) lookAt(name string, r rule, f *os.File, st *unix.Stat_t) error {
	if r.why == "" || r.nameOnly {
		return nil
	}
	small := st.Size <= maxLooked
	var b []byte
	if small {
		var err error
		if b, err = io.ReadAll(io.NewSectionReader(f, 0, st.Size)); err != nil {
			return fmt.Errorf("/%s: %w", name, err)
		}
	}
	if r.ifToken && !holdsCredential(b) {
		return nil
	}
	s.gone[inodeOf(st)] = r.why
	if small && len(b) >= minCopy {
		s.copies[sha256.Sum256(b)] = "a copy of what was removed: " + r.why
	}
	return nil
}

// drops decides by name, and by what the first walk found.
func (s *scrubber) drops(name string, st *unix.Stat_t) bool {
	why := ""
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		why = s.gone[inodeOf(st)]
	}
	if why == "" {
		r := s.rule(name)
		if r.why == "" || r.ifToken {
			return false
		}
		why = r.why
	}
	s.removed(name, why, st)
	return true
}

func (s *scrubber) removed(name, why string, st *unix.Stat_t) {
	f := dsec.Finding{Path: shown(name), Why: why}
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		f.Size = st.Size
	}
	if s.below != nil {
		n, err := s.below.Find(name)
		f.Below = err == nil && n != nil
	}
	s.report.RemovedCount++
	s.report.RemovedBytes += f.Size
	if len(s.report.Removed) < dsec.MaxFindings {
		s.report.Removed = append(s.report.Removed, f)
	}
}

func (s *scrubber) suspicious(name, why string, size int64, line int) {
	s.report.SuspiciousCount++
	if len(s.report.Suspicious) < dsec.MaxFindings {
		s.report.Suspicious = append(s.report.Suspicious, dsec.Finding{Path: shown(name), Why: why, Size: size, Line: line})
	}
}

// text looks at what of a file is not its contents.
func (s *scrubber) text(name, where, value string) {
	if kind := token([]byte(value)); kind != "" {
		s.suspicious(name, kind+" in its "+where, 0, 0)
	}
}

func (s *scrubber) done() *dsec.ScrubReport { return &s.report }

// shown is a path as a report has it.
func shown(name string) string {
	name = "/" + name
	if utf8.ValidString(name) {
		return name
	}
	q := strconv.Quote(name)
	return q[1 : len(q)-1]
}

// watched is a file whose contents are seen on their way into the layer.
type watched struct {
	s      *scrubber
	st     *unix.Stat_t
	name   string
	h      hash.Hash // nil: not compared
	at     int64     // bytes hashed
	head   []byte
	unread bool // too large to be compared
}

// watch begins to see a file. A nil scrubber sees nothing.
func (s *scrubber) watch(c *contents, st *unix.Stat_t, name string) *watched {
	if s == nil {
		return nil
	}
	w := &watched{s: s, st: st, name: name}
	switch {
	case len(s.answers)+len(s.copies) == 0:
	case st.Size <= maxHashed:
		w.h = sha256.New()
	default:
		w.unread = true
	}
	c.seen = w.see
	return w
}

func (w *watched) see(b []byte, off int64) {
	if off < maxLooked {
		if missing := off - int64(len(w.head)); missing > 0 {
			w.head = append(w.head, make([]byte, missing)...)
		}
		w.head = append(w.head, b[:min(int64(len(b)), maxLooked-off)]...)
	}
	if w.h != nil {
		w.zeros(off)
		_, _ = w.h.Write(b) // never errs
		w.at = off + int64(len(b))
	}
}

// zeros hashes the hole before an offset.
func (w *watched) zeros(to int64) {
	var hole [32 << 10]byte
	for w.at < to {
		n := min(to-w.at, int64(len(hole)))
		_, _ = w.h.Write(hole[:n]) // never errs
		w.at += n
	}
}

// verdict says whether the file goes, now that all of it was seen.
func (w *watched) verdict(size int64) (gone bool, err error) {
	s := w.s
	if w.unread {
		s.report.Unread++
	}
	if w.h != nil {
		w.zeros(size)
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
