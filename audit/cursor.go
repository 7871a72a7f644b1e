package audit

import (
	"context"
	"errors"
	"os"
	"slices"

	"github.com/opendsec/dsec"
)

// Cursor reads a log from its beginning on.
type Cursor struct {
	l       *log
	at      [2]place
	since   uint64          // number of the last record that was returned
	changed <-chan struct{} // of the moment of the last Next
}

type place struct {
	segment int
	offset  int64
}

// Next returns the records there are after the last ones, in order; none: there
// is nothing new now. Where the log has dropped some, a record of kind lost stands for them.
func (c *Cursor) Next() ([]dsec.AuditRecord, error) {
	c.l.mu.Lock()
	if err := c.l.openLocked(); err != nil {
		c.l.mu.Unlock()
		return nil, dsec.E(dsec.Internal, "read audit log", c.l.dir, err)
	}
	c.changed = c.l.changed
	end := [2]place{}
	for i, x := range c.l.lanes {
		end[i] = place{x.segment, x.end}
	}
	c.l.mu.Unlock()
	var all []dsec.AuditRecord
	for i, x := range c.l.lanes {
		if err := c.lane(x, &c.at[i], end[i], func(r dsec.AuditRecord) { all = append(all, r) }); err != nil {
			return nil, dsec.E(dsec.Internal, "read audit log", c.l.dir, err)
		}
	}
	slices.SortFunc(all, func(a, b dsec.AuditRecord) int { return int(int64(a.Seq - b.Seq)) })
	return c.fill(all), nil
}

// lane reads one up to its end at a moment.
func (c *Cursor) lane(x *lane, at *place, end place, take func(dsec.AuditRecord)) error {
	list, err := x.segments()
	if err != nil {
		return err
	}
	for _, n := range list {
		if n < at.segment || n > end.segment {
			continue
		}
		if n > at.segment {
			*at = place{segment: n}
		}
		most := int64(-1)
		if n == end.segment {
			most = end.offset
		}
		at.offset, _, err = readSegment(x.path(n), at.offset, most, take)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // dropped meanwhile
			return err
		}
	}
	return nil
}

// fill drops what is not wanted and says what is missing.
func (c *Cursor) fill(all []dsec.AuditRecord) (out []dsec.AuditRecord) {
	for _, r := range all {
		if r.Seq <= c.since {
			continue
		}
		if missing := r.Seq - c.since - 1; missing > 0 {
			l := Lost(int64(missing), "the log is full: its beginning and its end are kept")
			l.Seq, l.Time = r.Seq-1, r.Time
			out = append(out, l)
		}
		c.since = r.Seq
		out = append(out, r)
	}
	return out
}

// Wait waits until there may be more than the last Next returned. It errs when ctx
// ends, and with NotFound when the log is removed.
func (c *Cursor) Wait(ctx context.Context) error {
	c.l.mu.Lock()
	gone := c.l.gone
	c.l.mu.Unlock()
	if gone {
		return dsec.E(dsec.NotFound, "follow audit log", c.l.dir, nil)
	}
	select {
	case <-c.changed: // nil before the first Next: waits for ctx
		return nil
	case <-ctx.Done():
		return dsec.E(dsec.ClassOf(ctx.Err()), "follow audit log", "", context.Cause(ctx))
	}
}
