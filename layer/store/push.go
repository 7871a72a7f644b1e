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
	"github.com/opendsec/dsec/layer"
)

// push puts a layer that is here into the blob store, if there is one. All
// that it writes has its content in its name, so whoever was first is right.
func (s *Store) push(ctx context.Context, d layer.Digest) error {
	if s.opts.Blobs == nil {
		return nil
	}
	if _, err := s.opts.Blobs.Stat(ctx, layer.ManifestKey(d)); err == nil || !errors.Is(err, dsec.NotFound.Err()) {
		return err
	}
	m, err := s.manifest(d)
	if err != nil {
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
		if err := s.pushData(ctx, dir, d, m); err != nil {
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
	_, err = io.Copy(z, ctxReader{ctx, meta})
	if err = errors.Join(err, z.Close()); err != nil {
		return err
	}
	if _, err := out.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return s.put(ctx, layer.MetaKey(m.Meta.Digest), out)
}

// pushData compresses the chunks that no layer like this one has there into
// packs named by their content, and writes where everything is. The index is of
// the data, not of the layer: what an earlier push of the same data wrote does
// as well.
func (s *Store) pushData(ctx context.Context, dir string, d layer.Digest, m layer.Manifest) error {
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
	if err != nil {
		return err
	}
	p, err := newPacker(dir, known, func(name layer.Digest, pack io.Reader) error { return s.put(ctx, layer.PackKey(name), pack) })
	if err != nil {
		return err
	}
	defer p.close()
	if ix, err = p.pack(ix, ctxReader{ctx, io.NewSectionReader(data, 0, m.Data.Size)}); err != nil {
		return err
	}
	b, err := ix.Encode()
	if err != nil {
		return err
	}
	if err := s.put(ctx, layer.IndexKey(m.Data.Chunks), bytes.NewReader(b)); err != nil {
		return err
	}
	return s.hint(ctx, ix, m.Data.Chunks)
}
