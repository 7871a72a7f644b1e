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
	foldSlots  = 64          // of a sandbox at one time: none takes those of all others
)

// folder makes one record of many that say the same but for their time and process.
type folder struct {
	id   dsec.SandboxID
	held *held
	seen map[string]*fold
	done []*slot // of records that are to be written now
	has  int     // slots of what is held back
}

type fold struct {
	since  time.Time // of the first that counts
	n      int
	latest dsec.AuditRecord
	slot   *slot // nil: nothing is held back
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
			if r.Kind == dsec.AuditPhase { // what was before it gets the name of that phase
				out = append(out, f.due(now, true)...)
			}
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
		if r.Time.IsZero() {
			r.Time = now
		}
		if !f.hold(x, &r) {
			out = append(out, r)
		}
	}
	return out
}

// hold adds a record to what is held back, if the next process would find it there.
func (f *folder) hold(x *fold, r *dsec.AuditRecord) bool {
	if x.slot != nil && !x.slot.add(max(1, r.Count)) {
		return false
	}
	if x.slot == nil {
		if f.has >= foldSlots {
			return false
		}
		if x.slot = f.held.take(f.id, r); x.slot == nil {
			return false
		}
		f.has++
	}
	x.latest = *r
	return true
}

// written empties the slots of what was handed out.
func (f *folder) written() error {
	done := f.done
	f.done = nil
	return f.held.release(done)
}

// due returns what was held back for long enough, or all of it.
func (f *folder) due(now time.Time, all bool) (out []dsec.AuditRecord) {
	for key, x := range f.seen {
		if !all && now.Sub(x.since) < foldWithin {
			continue
		}
		some := x.slot != nil
		if some {
			r := x.latest
			if x.slot.count > 1 {
				r.Count = x.slot.count
			}
			out = append(out, r)
			f.done = append(f.done, x.slot)
			f.has--
		}
		if all || !some {
			delete(f.seen, key)
			continue
		}
		x.since, x.slot = now, nil // it goes on: still one a second
	}
	return out
}

func (f *folder) pending() bool { return len(f.seen) > 0 }
