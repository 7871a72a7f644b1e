package gvisor

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
)

// imageFile is what an image's file is called in its directory.
const imageFile = "root.erofs"

// imagesVersion is in the name of every image, and changes with what is made of a stack.
const imagesVersion = "1"

// Images are stacks of layers as one file of plain EROFS each: the sentry knows neither
// the chunks nor the second device of ours, and stacks nothing. They are made when they
// are first needed, by the digests of the layers, and removed by Collect. An image is in
// the way of a directory that holds one file, which is how it is mounted.
type Images struct {
	dir      string
	complete func(context.Context, layer.Local) error // see Config

	mu     sync.Mutex
	making map[string]*imageMaking
	used   map[string]map[string]bool // images by who uses them
}

type imageMaking struct {
	done chan struct{}
	err  error
}

// OpenImages opens a store, whose directory exists. What was half-made is removed.
func OpenImages(dir string) (*Images, error) {
	half, err := filepath.Glob(filepath.Join(dir, "*.new*"))
	if err != nil {
		return nil, dsec.E(dsec.Internal, "open images", dir, err)
	}
	for _, p := range half {
		if err := os.RemoveAll(p); err != nil {
			return nil, dsec.E(dsec.Internal, "open images", dir, err)
		}
	}
	return &Images{dir: dir, making: map[string]*imageMaking{}, used: map[string]map[string]bool{}}, nil
}

// imageOf is the name of the image of a stack.
func imageOf(layers []layer.Local) string {
	h := sha256.New()
	_, _ = fmt.Fprintln(h, imagesVersion) // never errs
	for _, l := range layers {
		_, _ = fmt.Fprintln(h, l.Digest)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

// Use has the image of a stack ready, and kept as long as user has it.
func (s *Images) Use(ctx context.Context, user string, layers []layer.Local) (name string, err error) {
	name = imageOf(layers)
	s.hold(user, name)
	if err := s.ensure(ctx, name, layers); err != nil {
		s.Unuse(user)
		return "", err
	}
	return name, nil
}

// hold keeps an image for who may use it already.
func (s *Images) hold(user, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used[name] == nil {
		s.used[name] = map[string]bool{}
	}
	s.used[name][user] = true
}

// Unuse gives up what a user has.
func (s *Images) Unuse(user string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, users := range s.used {
		if delete(users, user); len(users) == 0 {
			delete(s.used, name)
		}
	}
}

// Open opens the directory of an image that is used.
func (s *Images) Open(name string) (*os.File, error) {
	f, err := os.Open(filepath.Join(s.dir, name))
	if err != nil {
		return nil, dsec.E(dsec.Internal, "open image", name, err)
	}
	now := time.Now()
	_ = os.Chtimes(f.Name(), now, now) // only which is removed first depends on it
	return f, nil
}

func (s *Images) ensure(ctx context.Context, name string, layers []layer.Local) error {
	for {
		if _, err := os.Stat(filepath.Join(s.dir, name, imageFile)); err == nil {
			return nil
		}
		s.mu.Lock()
		m := s.making[name]
		mine := m == nil
		if mine {
			m = &imageMaking{done: make(chan struct{})}
			s.making[name] = m
		}
		s.mu.Unlock()
		if mine {
			m.err = s.make(ctx, name, layers)
			s.mu.Lock()
			delete(s.making, name)
			s.mu.Unlock()
			close(m.done)
			return m.err
		}
		select {
		case <-m.done:
			if m.err != nil && dsec.ClassOf(m.err) != dsec.Canceled && dsec.ClassOf(m.err) != dsec.Timeout {
				return m.err
			} // else who made it had no time, and we may have
		case <-ctx.Done():
			return dsec.E(dsec.ClassOf(ctx.Err()), "make image", name, context.Cause(ctx))
		}
	}
}

// make merges the layers and writes what they show as one file.
func (s *Images) make(ctx context.Context, name string, layers []layer.Local) (err error) {
	const op = "make image for gvisor"
	tmp, err := os.MkdirTemp(s.dir, name+".new")
	if err != nil {
		return dsec.E(dsec.Internal, op, name, err)
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o755); err != nil { // it is the root of a mount, and another user reads there
		return dsec.E(dsec.Internal, op, name, err)
	}
	for _, l := range layers {
		if err := s.whole(ctx, l); err != nil {
			return err
		}
	}
	merged, err := merge(ctx, tmp, layers)
	if err != nil {
		return err
	}
	defer merged.close()
	root, err := merged.image.Tree()
	if err != nil {
		return dsec.E(dsec.Corrupt, op, name, err)
	}
	f, err := os.OpenFile(filepath.Join(tmp, imageFile), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return dsec.E(dsec.Internal, op, name, err)
	}
	defer f.Close()
	if _, err := erofs.WriteFlat(f, root, merged.data); err != nil {
		return dsec.E(dsec.ClassOf(err), op, name, err)
	}
	if err := f.Sync(); err != nil {
		return dsec.E(dsec.Internal, op, name, err)
	}
	if err := merged.remove(); err != nil {
		return dsec.E(dsec.Internal, op, name, err)
	}
	if err := ctx.Err(); err != nil {
		return dsec.E(dsec.ClassOf(err), op, name, context.Cause(ctx))
	}
	if err := os.Rename(tmp, filepath.Join(s.dir, name)); err != nil {
		return dsec.E(dsec.Internal, op, name, err)
	}
	return nil
}

// whole has the data of a layer here: what is not would be read as zeros.
func (s *Images) whole(ctx context.Context, l layer.Local) error {
	for range 2 {
		whole, err := l.Whole()
		if err != nil || whole {
			return err
		}
		if s.complete == nil {
			break
		}
		if err := s.complete(ctx, l); err != nil {
			return err
		}
	}
	return dsec.Errorf(dsec.Unavailable, "read layer", string(l.Digest), "its data are not all on this machine, and gvisor needs them all")
}

// mergedLayer is one layer in the two files that ours have.
type mergedLayer struct {
	image *erofs.Image
	files []*os.File
	data  *os.File
	made  bool // the files are ours to remove
}

func (m *mergedLayer) close() {
	for _, f := range m.files {
		_ = f.Close()
	}
}

func (m *mergedLayer) remove() error {
	var errs []error
	for _, f := range m.files {
		if m.made {
			errs = append(errs, os.Remove(f.Name()))
		}
	}
	return errors.Join(errs...)
}

// merge makes one layer of a stack, in a directory of its own; of one layer, itself.
func merge(ctx context.Context, dir string, layers []layer.Local) (*mergedLayer, error) {
	var parts []*erofs.Image
	var opened mergedLayer
	defer func() {
		if len(layers) > 1 {
			opened.close()
		}
	}()
	for _, l := range layers {
		if err := opened.open(l); err != nil {
			opened.close()
			return nil, dsec.E(dsec.ClassOf(err), "open layer", string(l.Digest), err)
		}
		parts = append(parts, opened.image)
	}
	if len(layers) == 1 {
		one := opened
		return &one, nil
	}
	out := &mergedLayer{made: true}
	for _, name := range []string{"meta", "data"} {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			out.close()
			return nil, dsec.E(dsec.Internal, "merge layers", dir, err)
		}
		out.files = append(out.files, f)
	}
	out.data = out.files[1]
	res, err := image.Merge(ctx, parts, image.Files{Meta: out.files[0], Data: out.data}, image.MergeOptions{})
	if err == nil {
		out.image, err = erofs.Open(out.files[0], res.MetaSize, out.data)
	}
	if err != nil {
		out.close()
		return nil, err
	}
	return out, nil
}

// open opens one layer, which is whole.
func (m *mergedLayer) open(l layer.Local) error {
	meta, err := os.Open(l.Meta)
	if err != nil {
		return err
	}
	m.files = append(m.files, meta)
	st, err := meta.Stat()
	if err != nil {
		return err
	}
	m.data = nil
	if l.Data != "" {
		if m.data, err = os.Open(l.Data); err != nil {
			return err
		}
		m.files = append(m.files, m.data)
		m.image, err = erofs.Open(meta, st.Size(), m.data)
		return err
	}
	m.image, err = erofs.Open(meta, st.Size(), nil)
	return err
}

// Collect removes images that nobody uses, the longest unused first, until at most so
// many bytes are taken, and says how many are.
func (s *Images) Collect(most int64) (taken int64, err error) {
	const op = "collect images"
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return 0, dsec.E(dsec.Internal, op, s.dir, err)
	}
	type kept struct {
		name string
		size int64
		used time.Time
	}
	var idle []kept
	for _, e := range entries {
		var size int64
		dir, err1 := e.Info()
		st, err2 := os.Stat(filepath.Join(s.dir, e.Name(), imageFile))
		if err1 != nil || err2 != nil {
			continue // being made, or removed
		}
		size = blocksOf(st)
		taken += size
		idle = append(idle, kept{e.Name(), size, dir.ModTime()})
	}
	for len(idle) > 0 && taken > most {
		oldest := 0
		for i := range idle {
			if idle[i].used.Before(idle[oldest].used) {
				oldest = i
			}
		}
		k := idle[oldest]
		idle = append(idle[:oldest], idle[oldest+1:]...)
		removed, err := s.remove(k.name)
		if err != nil {
			return taken, dsec.E(dsec.Internal, op, k.name, err)
		}
		if removed {
			taken -= k.size
		}
	}
	return taken, nil
}

// remove removes an image unless somebody uses it.
func (s *Images) remove(name string) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.used[name]) > 0 || s.making[name] != nil {
		return false, nil
	}
	gone := filepath.Join(s.dir, name+".new-gone") // what OpenImages removes, if we do not come to it
	if err := os.Rename(filepath.Join(s.dir, name), gone); err != nil {
		return false, err
	}
	return true, os.RemoveAll(gone)
}
