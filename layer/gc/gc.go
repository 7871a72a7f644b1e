// Package gc removes from a blob store what no node keeps, and checks what is
// there against its digests.
//
// Collect is described in docs/formats/collect.md, with the reason why it is
// safe beside pushes and fetches of any number of nodes. It may be killed at
// any moment and begun again; it does one thing at a time with what a due
// condemnation names, and deletes nothing of which it does not know all that
// needs it. Without Options.Delete it writes nothing.
//
// Verify reads a whole store and says which objects are damaged or missing and
// which layers that hits.
package gc

import (
	"context"
	"log/slog"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
)

// Defaults of Options.
const (
	DefaultGrace  = 24 * time.Hour
	DefaultWait   = 24 * time.Hour
	DefaultExpiry = 30 * 24 * time.Hour
)

// Options of a collection; durations of 0 are the defaults, below 0 none.
type Options struct {
	Delete bool          // else nothing is written
	Grace  time.Duration // what is younger is kept
	Wait   time.Duration // between condemning and deleting
	Expiry time.Duration // after which a root that nobody renews does not count
	Owner  string        // of the run, for people
	Log    *slog.Logger
}

// Count is a number of objects and their bytes.
type Count struct {
	Objects int64 `json:"objects"`
	Bytes   int64 `json:"bytes"`
}

func (c *Count) add(bytes int64) { c.Objects, c.Bytes = c.Objects+1, c.Bytes+bytes }

// Row says of the objects of one kind what a collection makes of them. Without
// Options.Delete, Condemn and Delete are what it would do now.
type Row struct {
	Kind    string `json:"kind"`
	All     Count  `json:"all"`
	Kept    Count  `json:"kept"`    // by roots, and what those need
	Young   Count  `json:"young"`   // not kept, but new, or needed by what is
	Waiting Count  `json:"waiting"` // condemned, not yet for long enough
	Condemn Count  `json:"condemn"`
	Delete  Count  `json:"delete"`
}

// RootInfo is who keeps something.
type RootInfo struct {
	Key     string        `json:"key"`
	Node    string        `json:"node"`
	Age     time.Duration `json:"age"` // since it was renewed
	Keeps   int           `json:"keeps"`
	Expired bool          `json:"expired,omitempty"`
}

// Report of a collection.
type Report struct {
	Deleted bool       `json:"deleted"` // Options.Delete was given, and obeyed
	Rows    []Row      `json:"rows"`
	Roots   []RootInfo `json:"roots"`
	// Dead are bytes of kept packs that no kept index names.
	Dead int64 `json:"dead_bytes"`
	// Missing are kept objects that are not there.
	Missing []string `json:"missing,omitempty"`
	// Damaged are kept objects of which nobody can say what they need. While
	// there are any nothing is condemned or deleted.
	Damaged []Damage `json:"damaged,omitempty"`
	Unknown Count    `json:"unknown"` // objects that are not ours
}

// Damage is an object that is not what its name says.
type Damage struct {
	Key    string         `json:"key"`
	Error  string         `json:"error"`
	Layers []layer.Digest `json:"layers,omitempty"` // that cannot be used for it
}

// Collect looks at a store, and with Options.Delete removes from it. The report
// is what there was when it began; with an error it is what was known by then.
func Collect(ctx context.Context, blobs blob.Store, o Options) (Report, error) {
	const op = "collect garbage"
	if o.Grace == 0 {
		o.Grace = DefaultGrace
	}
	if o.Wait == 0 {
		o.Wait = DefaultWait
	}
	if o.Expiry == 0 {
		o.Expiry = DefaultExpiry
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	p := &pass{blobs: blobs, o: o, now: time.Now()}
	if o.Delete {
		if err := p.begin(ctx); err != nil {
			return Report{}, err
		}
	}
	err := p.collect(ctx)
	if o.Delete {
		if endErr := p.end(ctx); err == nil {
			err = endErr
		}
	}
	if err != nil {
		err = dsec.E(dsec.ClassOf(err), op, "", err)
	}
	return p.report, err
}

// pass is one collection.
type pass struct {
	blobs blob.Store
	o     Options
	now   time.Time // by the store's clock; of a dry one by ours
	run   *run      // nil: dry

	waiting   map[string]bool // keys in condemnations that are not due
	due       map[string]bool // keys in those that are executed now
	executing []string        // their names

	world  world
	roots  map[string]bool // keys that roots name
	gone   []string        // roots that have expired
	live   map[string]bool // kept or young, and what that needs
	kept   map[string]bool // of them, what roots name and what that needs
	needed map[string]bool // what may not be deleted
	weak   []string        // keys of weak objects that speak of nothing
	report Report
}

// collect is the order of docs/formats/collect.md.
func (p *pass) collect(ctx context.Context) error {
	if err := p.readCondemned(ctx); err != nil {
		return err
	}
	if p.run != nil {
		if err := p.run.write(ctx, p.executing); err != nil {
			return err
		}
	}
	if err := p.readRoots(ctx); err != nil {
		return err
	}
	if err := p.world.read(ctx, p.blobs); err != nil {
		return err
	}
	p.mark()
	if err := p.findWeak(ctx); err != nil {
		return err
	}
	p.tell()
	if !p.o.Delete {
		return nil
	}
	if err := p.mayDelete(); err != nil {
		return err
	}
	p.report.Deleted = true
	if err := p.sweep(ctx); err != nil {
		return err
	}
	return p.condemn(ctx)
}

// mayDelete says why nothing can be deleted.
func (p *pass) mayDelete() error {
	if len(p.roots) == 0 {
		return dsec.Errorf(dsec.IllegalState, "read roots", layer.RootPrefix, "no node says what it keeps: nothing is removed")
	}
	if n := len(p.report.Damaged); n > 0 {
		return dsec.Errorf(dsec.Corrupt, "read what is kept", p.report.Damaged[0].Key, "%d kept objects cannot be read, nobody knows what they need: nothing is removed: %s", n, p.report.Damaged[0].Error)
	}
	return nil
}

// young says whether an object is within the grace time.
func (p *pass) young(o object) bool { return p.now.Sub(o.mod) < p.o.Grace }

func (p *pass) readCondemned(ctx context.Context) error {
	p.waiting, p.due = map[string]bool{}, map[string]bool{}
	for info, err := range p.blobs.List(ctx, layer.CondemnedPrefix) {
		if err != nil {
			return err
		}
		name := info.Key[len(layer.CondemnedPrefix):]
		b, err := blob.ReadAll(ctx, p.blobs, info.Key, layer.MaxCondemned)
		if err != nil {
			return err
		}
		c, err := layer.DecodeCondemned(b, name)
		if err != nil {
			return err
		}
		due := p.now.Sub(info.ModTime) >= p.o.Wait
		if due {
			p.executing = append(p.executing, name)
		}
		for _, key := range c.Keys {
			if due {
				p.due[key] = true
			} else {
				p.waiting[key] = true
			}
		}
	}
	return nil
}

func (p *pass) readRoots(ctx context.Context) error {
	p.roots = map[string]bool{}
	for info, err := range p.blobs.List(ctx, layer.RootPrefix) {
		if err != nil {
			return err
		}
		b, err := blob.ReadAll(ctx, p.blobs, info.Key, layer.MaxRoot)
		if dsec.ClassOf(err) == dsec.NotFound {
			continue // a pin that is not needed any more
		}
		if err != nil {
			return err
		}
		r, err := layer.DecodeRoot(b, info.Key)
		if err != nil {
			return err
		}
		age := p.now.Sub(info.ModTime)
		expired := age >= max(p.o.Expiry, 3*time.Duration(r.Every)*time.Second)
		p.report.Roots = append(p.report.Roots, RootInfo{info.Key, r.Node, age, len(r.Keep), expired})
		if expired {
			p.gone = append(p.gone, info.Key)
			continue
		}
		for _, key := range r.Keep {
			p.roots[key] = true
		}
	}
	return nil
}
