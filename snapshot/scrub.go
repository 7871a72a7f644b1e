package snapshot

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
)

const (
	maxHashed = 1 << 30 // bytes of the largest file that is compared with known ones
	maxHoles  = 1 << 30 // bytes of holes that are hashed for that, of all files
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
	sizes   map[int64]bool   // of copies
	unread  map[inode]bool   // not compared, or not looked at to its end
	holes   int64            // bytes of holes that may still be hashed
	report  dsec.ScrubReport
}

func newScrubber(rules dsec.Scrub, below *Below) *scrubber {
	s := &scrubber{rules: rules, below: below, answers: map[sum]bool{}, gone: map[inode]string{}, copies: map[sum]string{},
		sizes: map[int64]bool{}, unread: map[inode]bool{}, holes: maxHoles, report: dsec.ScrubReport{Version: dsec.ScrubReportVersion, Rules: rules}}
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
			full, dir := at.child(name), st.Mode&unix.S_IFMT == unix.S_IFDIR
			r := s.rule(full, dir)
			if at.gone != nil {
				if r = at.gone.and(r); !dir {
					s.removed(full, r.name, st)
				}
			}
			switch {
			case dir:
				var over overlaid
				err := eachXattr(f.File, func(key string, value []byte) error {
					over.note(key, value)
					return nil
				})
				sub := at.sub(name, f.view, over)
				if r.name != "" {
					sub.gone = r.inherited()
				}
				return sub, err
			case st.Mode&unix.S_IFMT == unix.S_IFREG && r.all != "":
				if err := s.lookAt(r, p.contents(f.File, st), st); err != nil {
					return nil, fmt.Errorf("/%s: %w", full, err)
				}
			}
			return nil, nil
		}
	})
}

// lookAt notes a regular file that goes under all its names. Of a large one the
// beginning is looked at: it is told apart by the inode, its copies are not.
func (s *scrubber) lookAt(r rule, c *contents, st *unix.Stat_t) error {
	data, whole, err := c.head()
	if err != nil {
		return err
	}
	if r.ifToken && !holdsCredential(data) {
		if st.Size > maxLooked {
			s.unread[inodeOf(st)] = true
		}
		return nil
	}
	s.gone[inodeOf(st)] = r.all
	if len(data) >= minCopy && st.Size <= maxLooked {
		s.copies[sha256.Sum256(whole)] = "a copy of what was removed: " + r.all
		s.sizes[st.Size] = true
	}
	return nil
}

// drops decides by name, and by what the first walk found.
func (s *scrubber) drops(name string, st *unix.Stat_t) bool {
	why, dir := "", st.Mode&unix.S_IFMT == unix.S_IFDIR
	if !dir {
		why = s.gone[inodeOf(st)]
	}
	if why == "" {
		if why = s.rule(name, dir).name; why == "" {
			return false
		}
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

// text looks at what of a file is not its contents. A nil scrubber does not.
func (s *scrubber) text(name, where, value string) {
	if s == nil {
		return
	}
	if kind := token([]byte(value)); kind != "" {
		s.suspicious(name, kind+" in its "+where, 0, 0)
	}
}

func (s *scrubber) done() *dsec.ScrubReport {
	s.report.Unread = int64(len(s.unread))
	return &s.report
}

// shown is a path as a report has it.
func shown(name string) string {
	name = "/" + name
	if utf8.ValidString(name) {
		return name
	}
	q := strconv.Quote(name)
	return q[1 : len(q)-1]
}
