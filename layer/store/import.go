package store

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
)

// job is one conversion that any number of callers wait for.
type job struct {
	done chan struct{}
	info layer.Info
	err  error
}

// Import makes a layer of a source and points the tag to it, unless the tag is
// empty. Concurrent imports of one source with equal options convert it once.
func (s *Store) Import(ctx context.Context, source, tag string, opts image.Options) (layer.Info, error) {
	if tag != "" {
		if _, err := tagFile(tag); err != nil {
			return layer.Info{}, err
		}
	}
	key, err := json.Marshal([]any{source, opts})
	if err != nil {
		return layer.Info{}, dsec.E(dsec.Internal, "import layer", source, err)
	}
	info, err := s.once(ctx, string(key), func() (layer.Info, error) {
		return s.convert(ctx, source, nil, opts)
	})
	if err != nil || tag == "" {
		return info, err
	}
	return info, s.Tag(ctx, tag, info.Digest)
}

// once runs make, or waits for whoever runs it under the same key. If that one
// was cancelled the next caller runs it again.
func (s *Store) once(ctx context.Context, key string, make func() (layer.Info, error)) (layer.Info, error) {
	for {
		s.mu.Lock()
		j, running := s.jobs[key]
		if !running {
			j = &job{done: newDone()}
			s.jobs[key] = j
		}
		s.mu.Unlock()
		if !running {
			j.info, j.err = make()
			s.mu.Lock()
			delete(s.jobs, key)
			s.mu.Unlock()
			close(j.done)
			return j.info, j.err
		}
		select {
		case <-j.done:
			if class := dsec.ClassOf(j.err); class == dsec.Canceled || class == dsec.Timeout {
				continue
			}
			return j.info, j.err
		case <-ctx.Done():
			return layer.Info{}, diskError("import layer", key, ctx.Err())
		}
	}
}

func newDone() chan struct{} { return make(chan struct{}) }

// convert makes a layer in tmp and moves it to its place.
func (s *Store) convert(ctx context.Context, source string, config *image.Config, opts image.Options) (info layer.Info, err error) {
	const op = "import layer"
	dir, err := os.MkdirTemp(s.path("tmp"), "layer-*")
	if err != nil {
		return info, diskError(op, source, err)
	}
	defer func() {
		if rmErr := os.RemoveAll(dir); err == nil && rmErr != nil {
			err = diskError(op, source, rmErr)
		}
	}()
	w, err := createFiles(dir)
	if err != nil {
		return info, diskError(op, source, err)
	}
	defer func() { err = errors.Join(err, w.Meta.Close(), w.Data.Close()) }()
	res, err := s.opts.Convert(ctx, source, w, opts)
	if err != nil {
		return info, diskError(op, source, err)
	}
	if config != nil {
		res.Config = config
	}
	info, err = s.seal(dir, w, res, source)
	if err != nil {
		return info, diskError(op, source, err)
	}
	return info, nil
}

func createFiles(dir string) (image.Files, error) {
	meta, err := os.OpenFile(filepath.Join(dir, "meta"), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return image.Files{}, err
	}
	data, err := os.OpenFile(filepath.Join(dir, "data"), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return image.Files{}, errors.Join(err, meta.Close())
	}
	return image.Files{Meta: meta, Data: data}, nil
}

// seal reads back what the converter wrote, names it by its digest, and
// publishes it. Nothing the converter says about it is believed.
func (s *Store) seal(dir string, w image.Files, res image.Result, source string) (layer.Info, error) {
	for _, f := range []*os.File{w.Meta, w.Data} {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return layer.Info{}, err
		}
	}
	m, sums, err := layer.Describe(w.Meta, w.Data)
	if err != nil {
		return layer.Info{}, err
	}
	m.Entries, m.Config = res.Entries, res.Config
	if err := w.Data.Truncate((m.Data.Size + erofs.Align - 1) / erofs.Align * erofs.Align); err != nil {
		return layer.Info{}, err
	}
	info := layer.Info{Digest: m.Digest(), MetaSize: m.Meta.Size, DataSize: m.Data.Size, Entries: m.Entries, Source: source, Config: m.Config}
	about, err := json.Marshal(info)
	if err != nil {
		return layer.Info{}, err
	}
	for name, b := range map[string][]byte{"manifest": m.Encode(), "chunks": sums, "info": about} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			return layer.Info{}, err
		}
	}
	return info, s.publish(dir, info.Digest)
}

// publish syncs a finished layer and moves it to its place, where an equal one
// may already be.
func (s *Store) publish(dir string, d layer.Digest) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := syncFile(filepath.Join(dir, f.Name())); err != nil {
			return err
		}
	}
	if err := syncDir(dir); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	to := s.path("layers", d.Hex())
	err = os.Rename(dir, to)
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENOTEMPTY) {
		return nil // the same bytes, by name
	}
	if err != nil {
		return err
	}
	return syncDir(s.path("layers"))
}

func syncFile(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

func mergeEnv(base, up []string) []string {
	out := append([]string(nil), base...)
	for _, kv := range up {
		name, _, _ := strings.Cut(kv, "=")
		found := false
		for i, old := range out {
			if n, _, _ := strings.Cut(old, "="); n == name {
				out[i], found = kv, true
			}
		}
		if !found {
			out = append(out, kv)
		}
	}
	return out
}
