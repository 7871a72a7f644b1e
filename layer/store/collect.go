package store

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// Collect removes, or with dry only lists, the layers that nothing keeps. It
// removes them from this machine; the blob store, which others use, is not
// touched.
func (s *Store) Collect(ctx context.Context, dry bool) ([]layer.Info, error) {
	s = s.View("") // what keeps a layer is everybody's
	if err := s.expireTags(ctx, time.Now(), dry); err != nil {
		return nil, err
	}
	s.mu.Lock()
	all, err := s.listLocked()
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	var gone []layer.Info
	if !dry {
		if err := errors.Join(s.dropParts(), s.expireCheckpoints(time.Now())); err != nil {
			return nil, err
		}
	}
	// Stacks first: what they alone keep goes with them.
	slices.SortStableFunc(all, func(a, b Entry) int { return len(a.Stacks) - len(b.Stacks) })
	going := map[string]bool{}
	for _, e := range all {
		e.Stacks = slices.DeleteFunc(e.Stacks, func(d string) bool { return going[d] })
		if err := ctx.Err(); err != nil {
			return gone, dsec.E(dsec.ClassOf(err), "collect layers", s.dir, err)
		}
		if e.keepers() != "" || time.Since(e.LastUse) < s.opts.Grace {
			continue
		}
		if !dry {
			// What has changed since the list was made is seen again.
			removed, err := s.drop(e.Digest, s.opts.Grace)
			if err != nil {
				return gone, err
			}
			if !removed {
				continue
			}
		}
		going[string(e.Digest)] = true
		gone = append(gone, e.Info)
	}
	return gone, nil
}

// dropParts removes downloads that nobody went on with for the grace time.
func (s *Store) dropParts() error {
	files, err := os.ReadDir(s.path("parts"))
	if err != nil {
		return diskError("collect layers", s.dir, err)
	}
	for _, f := range files {
		st, err := f.Info()
		if err == nil && time.Since(st.ModTime()) >= s.opts.Grace {
			err = os.Remove(s.path("parts", f.Name()))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return diskError("collect layers", f.Name(), err)
		}
	}
	return nil
}

// Remove takes a tag away, and with it the layer if nothing else keeps it; or
// removes a layer named by digest that nothing keeps.
func (s *Store) Remove(ctx context.Context, ref dsec.LayerRef) error {
	s.mu.Lock()
	d, err := s.resolveLocked(ref)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if !strings.HasPrefix(string(ref), "sha256:") {
		err := s.Untag(ctx, string(ref))
		if dsec.ClassOf(err) == dsec.NotFound {
			var stacks []layer.Digest
			if stacks, err = s.forgetRefs(string(ref)); err == nil && len(stacks) == 0 {
				err = dsec.Errorf(dsec.NotFound, "remove layer", dsec.Quote(string(ref)), "no image or layer of that name")
			}
		}
		if err != nil {
			return err
		}
		_, err = s.drop(d, 0)
		return err
	}
	e, err := s.Inspect(ctx, ref)
	if err != nil {
		return err
	}
	if removed, err := s.drop(d, 0); err != nil || removed {
		return err
	}
	return dsec.Errorf(dsec.IllegalState, "remove layer", string(d), "in use: %s", e.keepers())
}

// drop removes a layer unless something keeps it.
func (s *Store) drop(d layer.Digest, grace time.Duration) (removed bool, err error) {
	s = s.View("")
	s.mu.Lock()
	to, err := s.unlinkLocked(d, grace)
	s.mu.Unlock()
	if err != nil || to == "" {
		return false, err
	}
	if err := os.RemoveAll(to); err != nil {
		return true, diskError("remove layer", string(d), err)
	}
	return true, nil
}

// unlinkLocked moves a layer out of the way in one step; "" if it stays.
func (s *Store) unlinkLocked(d layer.Digest, grace time.Duration) (to string, err error) {
	tags, err := s.tagsLocked()
	if err != nil {
		return "", err
	}
	below, err := s.standingLocked(tags)
	if err != nil {
		return "", err
	}
	e, err := s.entryLocked(d, tags, below)
	if err != nil {
		if dsec.ClassOf(err) == dsec.NotFound {
			err = nil
		}
		return "", err
	}
	if e.keepers() != "" || time.Since(e.LastUse) < grace {
		return "", nil
	}
	tmp, err := os.MkdirTemp(s.path("tmp"), "gone-*")
	if err != nil {
		return "", diskError("remove layer", string(d), err)
	}
	kind := "layers"
	if e.IsStack() {
		kind = "stacks"
	}
	if err := os.Rename(s.path(kind, d.Hex()), filepath.Join(tmp, "layer")); err != nil {
		return "", diskError("remove layer", string(d), err)
	}
	s.forgetLocked(d)
	return tmp, nil
}
