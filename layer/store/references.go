package store

import (
	"context"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// unknownRef is a reference that may become known.
type unknownRef struct{ err error }

func (u *unknownRef) Error() string { return u.err.Error() }
func (u *unknownRef) Unwrap() error { return u.err }

// hasRegistry tells whether a name says in which registry it is, so that a typing
// error does not ask one that nobody meant.
func hasRegistry(ref string) bool {
	host, rest, ok := strings.Cut(strings.TrimPrefix(ref, "docker://"), "/")
	return ok && rest != "" && (strings.ContainsAny(host, ".:") || host == "localhost")
}

// staleLocked tells whether a reference, not a tag, was resolved too long ago.
func (s *Store) staleLocked(ref dsec.LayerRef) bool {
	o := s.opts.References
	if o == nil || o.MaxAge <= 0 || !hasRegistry(string(ref)) || image.IsPinned(string(ref)) {
		return false
	}
	if t, err := s.readTagLocked(string(ref)); err == nil && s.sees(t.project) {
		return false
	}
	r, ok := s.refLocked(string(ref), image.Options{})
	return ok && time.Since(r.At) >= o.MaxAge
}

// makeKnown ensures the references that a lease asks for and nobody knows. What
// a registry refuses to show is, for who asks, not there.
func (s *Store) makeKnown(ctx context.Context, refs []dsec.LayerRef) error {
	o := *s.opts.References
	if o.MaxAge <= 0 {
		o.MaxAge = -1
	}
	g, gctx := errgroup.WithContext(ctx)
	for _, ref := range refs {
		s.mu.Lock()
		_, err := s.resolveLocked(ref)
		stale := err == nil && s.staleLocked(ref)
		s.mu.Unlock()
		if !hasRegistry(string(ref)) || err == nil && !stale {
			continue
		}
		g.Go(func() error {
			_, err := s.Ensure(gctx, string(ref), o, func(p Progress) { layer.Told(ctx, ref, p) })
			if dsec.ClassOf(err) == dsec.PermissionDenied {
				return dsec.Errorf(dsec.NotFound, "pull", string(ref), "not there, or not for this machine's credentials: %w", err)
			}
			return err
		})
	}
	return g.Wait()
}
