package store

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"

	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/layer"
)

// pushTries is how often what a push found may be collected before it has said
// that it relies on it.
const pushTries = 3

// push puts a layer that is here into the blob store, if there is one. All
// that it writes has its content in its name, so whoever was first is right.
func (s *Store) push(ctx context.Context, d layer.Digest) error { return s.pushAnew(ctx, d, 0) }

// pushAnew is push that stores the chunks of the first bytes of the data in packs
// of their own, wherever they are already: so that they come in few requests.
func (s *Store) pushAnew(ctx context.Context, d layer.Digest, first int64) error {
	if s.opts.Blobs == nil {
		return nil
	}
	for try := 1; ; try++ {
		err := s.tryPush(ctx, d, first, try > 1)
		if gone, ok := errors.AsType[*collectedError](err); !ok || try == pushTries {
			if ok {
				err = dsec.E(dsec.Unavailable, "push layer", string(d), gone)
			}
			return err
		}
		s.opts.Log.Info("what a push relied on was collected; once more", "layer", d)
	}
}

// collectedError says that an object went away before it was announced.
type collectedError struct{ err error }

func (e *collectedError) Error() string { return "collected while it was pushed: " + e.err.Error() }
func (e *collectedError) Unwrap() error { return e.err }

// tryPush pushes; again, it looks at each pack of other layers before it relies
// on it.
func (s *Store) tryPush(ctx context.Context, d layer.Digest, first int64, again bool) (err error) {
	m, err := s.manifest(d)
	if err != nil {
		return err
	}
	keys := []string{layer.ManifestKey(d), layer.MetaKey(m.Meta.Digest)}
	if m.Data.Size > 0 {
		keys = append(keys, layer.IndexKey(m.Data.Chunks))
	}
	p, err := s.announce(ctx, keys...)
	if err != nil {
		return err
	}
	defer func() { p.release(ctx, err == nil) }()
	if _, err := s.opts.Blobs.Stat(ctx, layer.ManifestKey(d)); err == nil || !errors.Is(err, dsec.NotFound.Err()) {
		return err
	}
	dir, err := os.MkdirTemp(s.path("tmp"), "push-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := s.pushMeta(ctx, dir, d, m); err != nil {
		return err
	}
	if m.Data.Size > 0 {
		if err := s.pushData(ctx, p, pushing{m, dir, again, first}); err != nil {
			return err
		}
	}
	if err := s.pushLineage(ctx, d); err != nil {
		return err
	}
	return s.put(ctx, layer.ManifestKey(d), bytes.NewReader(m.Encode()))
}

// put writes an object unless it is there.
func (s *Store) put(ctx context.Context, key string, r io.Reader) error {
	err := s.opts.Blobs.Put(ctx, key, r, blob.PutOptions{IfAbsent: true})
	if errors.Is(err, dsec.AlreadyExists.Err()) {
		return nil
	}
	return err
}

func (s *Store) pushMeta(ctx context.Context, dir string, d layer.Digest, m layer.Manifest) error {
	meta, err := os.Open(s.path("layers", d.Hex(), "meta"))
	if err != nil {
		return err
	}
	defer meta.Close()
	out, err := os.CreateTemp(dir, "meta-*")
	if err != nil {
		return err
	}
	defer out.Close()
	z, err := zstd.NewWriter(out, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return err
	}
	_, err = io.Copy(z, within.Reader(ctx, io.LimitReader(meta, m.Meta.Size))) // behind it may be a hole
	if err = errors.Join(err, z.Close()); err != nil {
		return err
	}
	if _, err := out.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return s.put(ctx, layer.MetaKey(m.Meta.Digest), out)
}

// pushing is a layer on its way to the blob store.
type pushing struct {
	m     layer.Manifest
	dir   string // for what is packed
	again bool   // what was found to share was gone the last time
	first int64  // bytes of the data that are stored again, in packs of their own
}

// pushData compresses the chunks that no layer like this one has there into
// packs named by their content, and writes where everything is. The index is of
// the data, not of the layer: what an earlier push of the same data wrote does
// as well.
func (s *Store) pushData(ctx context.Context, pin *pin, of pushing) error {
	m, d := of.m, of.m.Digest()
	if _, err := s.opts.Blobs.Stat(ctx, layer.IndexKey(m.Data.Chunks)); err == nil || !errors.Is(err, dsec.NotFound.Err()) {
		return err
	}
	table, err := os.ReadFile(s.path("layers", d.Hex(), "chunks"))
	if err != nil {
		return err
	}
	ix, err := layer.DecodeTable(table, m.Data)
	if err != nil {
		return err
	}
	s.mu.Lock()
	l, err := s.localLocked(d)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	data, err := s.OpenData(ctx, l)
	if err != nil {
		return err
	}
	defer data.Close()
	known, err := s.alike(ctx, ix)
	if err == nil && of.again {
		err = s.dropGone(ctx, known)
	}
	if err != nil {
		return err
	}
	p, err := newPacker(of.dir, known, func(name layer.Digest, pack io.Reader) error { return s.put(ctx, layer.PackKey(name), pack) })
	if err != nil {
		return err
	}
	defer p.close()
	_, p.anew = layer.Span(ix.Offsets(), 0, of.first)
	if ix, err = p.pack(ix, within.Reader(ctx, io.NewSectionReader(data, 0, m.Data.Size))); err != nil {
		return err
	}
	b, err := ix.Encode()
	if err != nil {
		return err
	}
	// Packs of other layers, and own ones that were there, may have gone until now.
	if err := pin.add(ctx, packKeys(ix)...); err != nil {
		return err
	}
	if err := s.present(ctx, packKeys(ix)); err != nil {
		if errors.Is(err, dsec.NotFound.Err()) {
			err = &collectedError{err}
		}
		return err
	}
	if err := s.put(ctx, layer.IndexKey(m.Data.Chunks), bytes.NewReader(b)); err != nil {
		return err
	}
	return s.hint(ctx, ix, m.Data.Chunks)
}
