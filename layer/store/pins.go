package store

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/layer"
)

const (
	removePoll = 50 * time.Millisecond
	longPoll   = 2 * time.Second
)

// pin says in the blob store what a piece of work relies on, see
// docs/formats/collect.md. Without a blob store it is nothing. Each thing it says
// is an object of its own, so that a write that was given up and is carried out
// later takes nothing back.
type pin struct {
	s    *Store
	keys []string
	at   time.Time // by the store's clock, when the last was written; zero: nobody asked yet
	here time.Time // by ours, before that
}

// announce says that objects are relied on, and returns when no collection that
// did not hear it can remove them any more. It says nothing of whether they are
// there: look afterwards.
func (s *Store) announce(ctx context.Context, keys ...string) (*pin, error) {
	if s.opts.Blobs == nil {
		return nil, nil
	}
	p := &pin{s: s}
	if err := p.add(ctx, keys...); err != nil {
		p.release(ctx, false)
		return nil, err
	}
	return p, nil
}

// add announces more.
func (p *pin) add(ctx context.Context, keys ...string) error {
	if p == nil {
		return nil
	}
	key := layer.RootPrefix + p.s.id + "/" + dsec.Random(20)
	p.s.mu.Lock()
	p.s.pins[key] = true
	p.s.mu.Unlock()
	p.keys = append(p.keys, key)
	p.at, p.here = time.Time{}, time.Now()
	r := layer.NewRoot(p.s.opts.Name, RenewEvery, keys)
	if err := p.s.opts.Blobs.Put(ctx, key, bytes.NewReader(r.Encode()), blob.PutOptions{}); err != nil {
		return err
	}
	return p.clear(ctx, keys)
}

// now is the store's time, or a little later.
func (p *pin) now(ctx context.Context) (time.Time, error) {
	if p.at.IsZero() {
		info, err := p.s.opts.Blobs.Stat(ctx, p.keys[len(p.keys)-1])
		if err != nil {
			return time.Time{}, err
		}
		p.at = info.ModTime
	}
	return p.at.Add(time.Since(p.here)), nil
}

// clear waits until no run that is alive removes one of the keys.
func (p *pin) clear(ctx context.Context, keys []string) error {
	for wait := removePoll; ; wait = min(2*wait, longPoll) {
		removed, err := p.removing(ctx)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(keys, func(key string) bool { return removed[key] }) {
			return nil
		}
		if err := within.Sleep(ctx, wait); err != nil {
			return dsec.E(dsec.ClassOf(err), "wait for garbage collection", p.s.id, err)
		}
	}
}

// runs are the keys of runs that are alive; mostly there is none.
func (p *pin) runs(ctx context.Context) (alive []string, err error) {
	for info, err := range p.s.opts.Blobs.List(ctx, layer.RunPrefix) {
		if err != nil {
			return nil, err
		}
		now, err := p.now(ctx)
		if err != nil {
			return nil, err
		}
		if now.Sub(info.ModTime) <= layer.RunDead {
			alive = append(alive, info.Key)
		}
	}
	return alive, nil
}

// removing reads what runs that are alive remove.
func (p *pin) removing(ctx context.Context) (map[string]bool, error) {
	runs, err := p.runs(ctx)
	if err != nil {
		return nil, err
	}
	removed := map[string]bool{}
	for _, key := range runs {
		b, err := blob.ReadAll(ctx, p.s.opts.Blobs, key, layer.MaxRun)
		if errors.Is(err, dsec.NotFound.Err()) {
			continue // it has ended
		}
		if err != nil {
			return nil, err
		}
		run, err := layer.DecodeRun(b, key)
		if err != nil {
			return nil, err
		}
		for _, name := range run.Removes {
			if err := p.condemned(ctx, name, removed); err != nil {
				return nil, err
			}
		}
	}
	return removed, nil
}

// condemned adds the keys of a condemnation that is not executed yet.
func (p *pin) condemned(ctx context.Context, name string, to map[string]bool) error {
	b, err := blob.ReadAll(ctx, p.s.opts.Blobs, layer.CondemnedPrefix+name, layer.MaxCondemned)
	if errors.Is(err, dsec.NotFound.Err()) {
		return nil
	}
	if err != nil {
		return err
	}
	c, err := layer.DecodeCondemned(b, name)
	for _, key := range c.Keys {
		to[key] = true
	}
	return err
}

// release ends the work. What it made is kept: then the pin stays until a root
// has been written that lists it. Otherwise the pin goes now; if it cannot,
// with the next root.
func (p *pin) release(ctx context.Context, kept bool) {
	if p == nil {
		return
	}
	if !kept {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		for _, key := range p.keys {
			if err := p.s.opts.Blobs.Delete(ctx, key); err != nil {
				p.s.opts.Log.Warn("announcement in the blob store stays for now", "key", key, "err", err)
			}
		}
	}
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	for _, key := range p.keys {
		delete(p.s.pins, key)
	}
}
