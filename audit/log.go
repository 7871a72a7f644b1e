package audit

import (
	"errors"
	"os"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

// log is that of one sandbox.
type log struct {
	dir string

	mu      sync.Mutex
	opened  bool // what an earlier process wrote is known
	made    bool // the directory is there
	gone    bool
	lanes   [2]*lane
	next    uint64
	phase   string
	missed  int64 // records that could not be written
	folds   folder
	changed chan struct{} // closed, and made anew, when something was written
}

const (
	laneProcess = iota
	laneOther
)

func newLog(dir string, s Sizes, f folder) *log {
	return &log{dir: dir, folds: f, changed: make(chan struct{}), lanes: [2]*lane{
		{dir: dir, name: "process-", size: s}, {dir: dir, name: "other-", size: s}}}
}

// openLocked finds what an earlier process wrote.
func (l *log) openLocked() error {
	if l.opened {
		return nil
	}
	for _, x := range l.lanes {
		if err := x.open(); err != nil {
			return err
		}
		if x.last >= l.next {
			l.next, l.phase = x.last, x.phase
		}
	}
	l.next++
	l.opened = true
	return nil
}

// append writes records, folded. It returns those that are in the log now.
func (l *log) append(now time.Time, records []dsec.AuditRecord) ([]dsec.AuditRecord, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return nil, nil
	}
	return l.writeLocked(l.folds.add(now, records), now)
}

// appendAsIs writes a record that was folded before.
func (l *log) appendAsIs(now time.Time, r dsec.AuditRecord) ([]dsec.AuditRecord, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.writeLocked([]dsec.AuditRecord{r}, now)
}

// flush writes what was folded long enough ago, or all.
func (l *log) flush(now time.Time, all bool) ([]dsec.AuditRecord, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return nil, nil
	}
	return l.writeLocked(l.folds.due(now, all), now)
}

// writeLocked: what could not be written is counted, so it is not held back any more either.
func (l *log) writeLocked(records []dsec.AuditRecord, now time.Time) (written []dsec.AuditRecord, err error) {
	if len(records) == 0 {
		return nil, nil
	}
	defer func() { err = errors.Join(err, l.folds.written()) }()
	if !l.made {
		if err := os.MkdirAll(l.dir, 0o700); err != nil {
			l.missed += int64(len(records))
			return nil, err
		}
		l.made = true
	}
	if err := l.openLocked(); err != nil {
		l.missed += int64(len(records))
		return nil, err
	}
	if l.missed > 0 {
		records = append([]dsec.AuditRecord{Lost(l.missed, "they could not be written")}, records...)
	}
	var frames [2][]byte
	first := l.next
	for i := range records {
		r := &records[i]
		l.stamp(r, now)
		n := laneOther
		if r.Kind == dsec.AuditProcess {
			n = laneProcess
		}
		var err error
		if frames[n], err = appendFrame(frames[n], r); err != nil {
			return nil, err
		}
	}
	for n, b := range frames {
		if len(b) == 0 {
			continue
		}
		if err := l.lanes[n].write(b); err != nil {
			l.missed += int64(len(records)) // some may be there: none is said to be
			l.next = max(first, l.next)
			return nil, err
		}
	}
	l.missed = 0
	close(l.changed)
	l.changed = make(chan struct{})
	return records, nil
}

// stamp gives a record its number, and what else it lacks.
func (l *log) stamp(r *dsec.AuditRecord, now time.Time) {
	r.Seq = l.next
	l.next++
	if r.Time.IsZero() {
		r.Time = now
	}
	r.Time = r.Time.UTC()
	if r.Kind == dsec.AuditPhase {
		l.phase = r.Phase
	}
	if r.Phase == "" {
		r.Phase = l.phase
	}
	cut(r)
}

// Lost is a record of n records that are missing; 0: an unknown number.
func Lost(n int64, why string) dsec.AuditRecord {
	return dsec.AuditRecord{Kind: dsec.AuditLost, UID: dsec.NobodyID, GID: dsec.NobodyID, Count: n, Detail: why}
}
