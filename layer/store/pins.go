package store

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
)

const (
	rootEvery  = 10 * time.Minute // the root is written again at least so often
	removePoll = 50 * time.Millisecond
	longPoll   = 2 * time.Second
)

// pin says in the blob store what a piece of work relies on, see
// docs/formats/collect.md. Without a blob store it is nothing.
type pin struct {
	s    *Store
	key  string
	keep []string
	at   time.Time // by the store's clock, when it was written, and
	here time.Time // by ours
}

// announce says that objects are relied on, and returns when no collection that
// did not hear it can remove them any more. It says nothing of whether they are
// there: look afterwards.
func (s *Store) announce(ctx context.Context, keys ...string) (*pin, error) {
	if s.opts.Blobs == nil {
		return nil, nil
	}
	p := &pin{s: s, key: layer.RootPrefix + s.id + "/" + dsec.Random(20)}
	s.mu.Lock()
	s.pins[p.key] = true
	s.mu.Unlock()
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
	r := layer.NewRoot(p.s.opts.Name, rootEvery, append(p.keep, keys...))
	p.keep = r.Keep
	if err := p.s.opts.Blobs.Put(ctx, p.key, bytes.NewReader(r.Encode()), blob.PutOptions{}); err != nil {
		return err
	}
	info, err := p.s.opts.Blobs.Stat(ctx, p.key)
	if err != nil {
		return err
	}
	p.at, p.here = info.ModTime, time.Now()
	return p.clear(ctx, keys)
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
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return dsec.E(dsec.ClassOf(ctx.Err()), "wait for garbage collection", p.s.id, ctx.Err())
		}
	}
}

// removing reads what runs that are alive remove; mostly there is none.
func (p *pin) removing(ctx context.Context) (map[string]bool, error) {
	removed := map[string]bool{}
	blobs := p.s.opts.Blobs
	for info, err := range blobs.List(ctx, layer.RunPrefix) {
		if err != nil {
			return nil, err
		}
		if p.at.Add(time.Since(p.here)).Sub(info.ModTime) > layer.RunDead {
			continue
		}
		b, err := blob.ReadAll(ctx, blobs, info.Key, layer.MaxRun)
		if errors.Is(err, dsec.NotFound.Err()) {
			continue // it has ended
		}
		if err != nil {
			return nil, err
		}
		run, err := layer.DecodeRun(b, info.Key)
		if err != nil {
			return nil, err
		}
		for _, name := range run.Removes {
			b, err := blob.ReadAll(ctx, blobs, layer.CondemnedPrefix+name, layer.MaxCondemned)
			if errors.Is(err, dsec.NotFound.Err()) {
				continue // executed
			}
			if err != nil {
				return nil, err
			}
			c, err := layer.DecodeCondemned(b, name)
			if err != nil {
				return nil, err
			}
			for _, key := range c.Keys {
				removed[key] = true
			}
		}
	}
	return removed, nil
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
		if err := p.s.opts.Blobs.Delete(ctx, p.key); err != nil {
			p.s.opts.Log.Warn("announcement in the blob store stays for now", "key", p.key, "err", err)
		}
	}
	p.s.mu.Lock()
	delete(p.s.pins, p.key)
	p.s.mu.Unlock()
}

// Renew says in the blob store what this store keeps: all layers that are in
// it. It has to be called when the store has been opened, and every ten minutes
// (RenewEvery) or more often. What other nodes may collect depends on it.
func (s *Store) Renew(ctx context.Context) error {
	if s.opts.Blobs == nil {
		return nil
	}
	s.renewing.Lock()
	defer s.renewing.Unlock()
	// Pins that are not of work in progress now are of work whose layers are here,
	// or of a program that has ended; one that comes later is not in this list.
	old, lost, err := s.oldRoots(ctx)
	if err != nil {
		return err
	}
	keep, err := s.keeps()
	if err != nil {
		return err
	}
	r := layer.NewRoot(s.opts.Name, rootEvery, keep)
	if len(r.Keep) > layer.MaxRootKeys {
		return dsec.Errorf(dsec.Internal, "write root", s.id, "%d objects, at most %d", len(r.Keep), layer.MaxRootKeys)
	}
	if err := s.opts.Blobs.Put(ctx, s.root, bytes.NewReader(r.Encode()), blob.PutOptions{}); err != nil {
		return err
	}
	for _, key := range old {
		if err := s.opts.Blobs.Delete(ctx, key); err != nil {
			return err
		}
	}
	if lost {
		if err := s.restore(ctx); err != nil {
			return err
		}
	}
	return diskError("write root", s.id, s.writeFile("rooted", []byte(s.root+"\n"), true))
}

// RenewEvery is how often Renew wants to be called.
const RenewEvery = rootEvery

// oldRoots lists what of this store has to go when its root is written, and
// whether it had written one that is gone: then it has been away so long that
// what it keeps may have been removed.
func (s *Store) oldRoots(ctx context.Context) (old []string, lost bool, err error) {
	b, err := s.readOptional("rooted")
	if err != nil {
		return nil, false, err
	}
	last := strings.TrimSpace(string(b))
	lost = last != ""
	for info, err := range s.opts.Blobs.List(ctx, layer.RootPrefix+s.id+"/") {
		if err != nil {
			return nil, false, err
		}
		s.mu.Lock()
		working := s.pins[info.Key]
		s.mu.Unlock()
		if info.Key == last {
			lost = false
		}
		if !working && info.Key != s.root {
			old = append(old, info.Key)
		}
	}
	return old, lost, nil
}

// keeps lists the keys of what is here.
func (s *Store) keeps() ([]string, error) {
	s.mu.Lock()
	all, err := s.View("").listLocked()
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	var keep []string
	for _, e := range all {
		keep = append(keep, layer.ManifestKey(e.Digest))
		packs, err := s.namedPacks(e.Digest)
		if err != nil {
			return nil, err
		}
		keep = append(keep, packs...)
	}
	return keep, nil
}

// namedPacks are the packs from which a layer that is not whole is fetched.
func (s *Store) namedPacks(d layer.Digest) ([]string, error) {
	raw, err := s.readOptional("layers", d.Hex(), layer.IndexFile)
	if raw == nil || err != nil {
		return nil, diskError("read layer", string(d), err)
	}
	m, err := s.manifest(d)
	if errors.Is(err, dsec.NotFound.Err()) {
		return nil, nil // just collected here
	}
	if err != nil {
		return nil, err
	}
	ix, err := layer.DecodeIndex(raw, m.Data)
	if err != nil {
		return nil, err
	}
	return packKeys(ix), nil
}

func packKeys(ix layer.Index) []string {
	keys := make([]string, 0, len(ix.Packs))
	for _, d := range ix.Packs {
		keys = append(keys, layer.PackKey(d))
	}
	return keys
}

// restore puts layers back that were removed while this store said nothing.
func (s *Store) restore(ctx context.Context) error {
	all, err := s.View("").List(ctx)
	if err != nil {
		return err
	}
	for _, e := range all {
		packs, err := s.namedPacks(e.Digest)
		if err != nil {
			return err
		}
		if packs != nil { // not whole: it cannot be made again from here
			if err := s.present(ctx, packs); err != nil {
				s.opts.Log.Error("a layer that is not whole here was removed from the blob store while this node was away", "layer", e.Digest, "err", err)
			}
			continue
		}
		if err := s.push(ctx, e.Digest); err != nil {
			return err
		}
	}
	return nil
}

// present looks whether objects are there, and says which is not.
func (s *Store) present(ctx context.Context, keys []string) error {
	return each(keys, func(key string) error {
		_, err := s.opts.Blobs.Stat(ctx, key)
		return err
	})
}
