package store

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// LetGo ends what still reads the files of a layer that nobody leases: its mounts.
// What was read first of it is to be recorded before.
type LetGo func(ctx context.Context, d layer.Digest) error

// Evict gives back the room that a layer's data take on this machine: they come
// again, on demand, from the blob store; of an image of several layers, those of
// all that are here. It returns the bytes that became free. It is refused while a
// layer is leased; who leases one that is being evicted waits. A layer that is
// fetched whole because it is small stays as it is.
func (s *Store) Evict(ctx context.Context, ref dsec.LayerRef, letGo LetGo) (freed int64, err error) {
	const op = "evict layer"
	s.mu.Lock()
	d, err := s.resolveLocked(ref)
	digests := []layer.Digest{d}
	if st, ok := s.stacks[d]; ok {
		digests = digests[:0]
		for _, p := range st.Layers {
			if _, err := s.localLocked(p.Digest); dsec.ClassOf(err) != dsec.NotFound {
				digests = append(digests, p.Digest)
			}
		}
	}
	s.mu.Unlock()
	if err != nil {
		return 0, err
	}
	if s.opts.Blobs == nil || !s.opts.OnDemand {
		return 0, dsec.Errorf(dsec.Unsupported, op, string(d), "there is nothing that brings its data again")
	}
	for _, d := range digests {
		n, err := s.evict(ctx, d, letGo)
		freed += n
		if err != nil {
			return freed, diskError(op, string(d), err)
		}
	}
	return freed, nil
}

func (s *Store) evict(ctx context.Context, d layer.Digest, letGo LetGo) (freed int64, err error) {
	m, err := s.manifest(d)
	if err != nil || m.Data.Size <= s.opts.Small {
		return 0, err
	}
	if err := s.push(ctx, d); err != nil {
		return 0, err
	}
	e, err := s.Inspect(ctx, dsec.LayerRef(d))
	if err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp(s.path("tmp"), "evict-*")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	_, ix, err := s.fetchInto(ctx, dir, d)
	if err == nil {
		err = s.complement(dir, m, ix, about{Source: e.Source, Image: &e.Image, Lineage: e.Lineage})
	}
	if err != nil {
		return 0, err
	}
	end, err := s.beginEviction(d)
	if err != nil {
		return 0, err
	}
	defer end()
	if err := letGo(ctx, d); err != nil {
		return 0, err
	}
	return s.swap(ctx, d, dir)
}

// beginEviction has whoever wants to lease the layer wait until end. From then on
// nobody does, and nobody mounts it.
func (s *Store) beginEviction(d layer.Digest) (end func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, held := range s.leases {
		if slices.Contains(held.Digests, d) {
			return nil, dsec.Errorf(dsec.IllegalState, "evict layer", string(d), "leased by %s", name)
		}
	}
	if s.evicting[d] != nil {
		return nil, dsec.Errorf(dsec.IllegalState, "evict layer", string(d), "it is being evicted")
	}
	ended := make(chan struct{})
	s.evicting[d] = ended
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.evicting, d)
		close(ended)
	}, nil
}

// awaitEviction waits until a layer is not being evicted.
func (s *Store) awaitEviction(ctx context.Context, d layer.Digest) (waited bool, err error) {
	s.mu.Lock()
	ended := s.evicting[d]
	s.mu.Unlock()
	if ended == nil {
		return false, nil
	}
	select {
	case <-ended:
		return true, nil
	case <-ctx.Done():
		return true, dsec.E(dsec.ClassOf(ctx.Err()), "wait for the eviction of layer", string(d), ctx.Err())
	}
}

// swap puts a directory in the place of a layer, in one step: a program that is
// killed leaves the one or the other. The trace goes along.
func (s *Store) swap(ctx context.Context, d layer.Digest, fresh string) (freed int64, err error) {
	leave, err := s.aloneWith(ctx, d)
	if err != nil {
		return 0, err
	}
	defer leave()
	trace, err := s.readOptional(filepath.Join("layers", d.Hex(), layer.TraceFile))
	if err == nil && len(trace) > 0 {
		err = os.WriteFile(filepath.Join(fresh, layer.TraceFile), trace, 0o600)
	}
	if err == nil {
		err = syncDir(fresh)
	}
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.path("layers", d.Hex())
	if err := unix.Renameat2(unix.AT_FDCWD, fresh, unix.AT_FDCWD, at, unix.RENAME_EXCHANGE); err != nil {
		return 0, &os.LinkError{Op: "exchange", Old: fresh, New: at, Err: err}
	}
	delete(s.known, d)
	var was, is unix.Stat_t
	if err := errors.Join(unix.Stat(filepath.Join(fresh, layer.DataFile), &was), unix.Stat(filepath.Join(at, layer.DataFile), &is)); err != nil {
		return 0, err
	}
	return (was.Blocks - is.Blocks) * 512, syncFile(s.path("layers"))
}

// complement puts the small files of a layer beside its large ones.
func (s *Store) complement(dir string, m layer.Manifest, ix layer.Index, from about) error {
	about, err := json.Marshal(from)
	if err != nil {
		return err
	}
	for name, b := range map[string][]byte{layer.ManifestFile: m.Encode(), layer.TableFile: ix.Table(), layer.InfoFile: about} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			return err
		}
	}
	// A mapping of the file by huge pages must not end before the file.
	return os.Truncate(filepath.Join(dir, layer.DataFile), alignUp(m.Data.Size))
}

// syncDir makes durable what is in a directory.
func syncDir(dir string) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := syncFile(filepath.Join(dir, f.Name())); err != nil {
			return err
		}
	}
	return syncFile(dir)
}
