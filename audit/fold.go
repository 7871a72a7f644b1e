package audit

import (
	"strconv"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

const (
	foldAfter  = 4           // records alike that are written one by one
	foldWithin = time.Second // then one is written in this time
	foldKeys   = 512         // that are remembered; with more, all are forgotten
)

// folder makes one record of many that say the same but for their time and process.
type folder struct {
	seen map[string]*fold
}

type fold struct {
	since  time.Time // of the first that counts
	n      int
	latest dsec.AuditRecord
	held   int64
}

// foldKey is "" for what is never folded.
func foldKey(r *dsec.AuditRecord) string {
	switch r.Kind {
	case dsec.AuditProcess, dsec.AuditWrite, dsec.AuditSyscall:
		return strings.Join(append([]string{string(r.Kind), r.Exe, r.Path, r.Detail, r.Exec, strconv.FormatInt(r.UID, 10)}, r.Args...), "\x00")
	}
	return ""
}

// add returns those that are to be written now.
func (f *folder) add(now time.Time, records []dsec.AuditRecord) (out []dsec.AuditRecord) {
	out = f.due(now, false)
	for _, r := range records {
		key := foldKey(&r)
		if key == "" {
			out = append(out, r)
			continue
		}
		x := f.seen[key]
		if x == nil {
			if len(f.seen) >= foldKeys {
				out = append(out, f.due(now, true)...)
			}
			if f.seen == nil {
				f.seen = map[string]*fold{}
			}
			x = &fold{since: now}
			f.seen[key] = x
		}
		x.n++
		if x.n <= foldAfter {
			out = append(out, r)
			continue
		}
		x.latest = r
		x.held += max(1, r.Count)
	}
	return out
}

// due returns what was held back for long enough, or all of it.
func (f *folder) due(now time.Time, all bool) (out []dsec.AuditRecord) {
	for key, x := range f.seen {
		if !all && now.Sub(x.since) < foldWithin {
			continue
		}
		if x.held > 0 {
			r := x.latest
			if x.held > 1 {
				r.Count = x.held
			}
			out = append(out, r)
		}
		if all || x.held == 0 {
			delete(f.seen, key)
			continue
		}
		x.since, x.held = now, 0 // it goes on: still one a second
	}
	return out
}

func (f *folder) pending() bool { return len(f.seen) > 0 }
