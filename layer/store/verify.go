package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/layer"
)

// Verify reads a layer that is here and compares every byte with its digest. Of
// one whose data are not whole these are those that are here.
func (s *Store) Verify(ctx context.Context, ref dsec.LayerRef) error {
	s.mu.Lock()
	d, err := s.resolveLocked(ref)
	stack, isStack := s.stacks[d]
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if isStack {
		for _, p := range stack.Layers {
			if err := s.Verify(ctx, dsec.LayerRef(p.Digest)); err != nil {
				return err
			}
		}
		return nil
	}
	want, err := s.manifest(d)
	if err != nil {
		return err
	}
	meta, err := os.Open(s.path("layers", d.Hex(), "meta"))
	if err != nil {
		return diskError("verify layer", string(d), err)
	}
	defer meta.Close()
	data, err := os.Open(s.path("layers", d.Hex(), "data"))
	if err != nil {
		return diskError("verify layer", string(d), err)
	}
	defer data.Close()
	if err := s.verifyFiles(ctx, d, want, meta, data); err != nil {
		return dsec.E(fault.Class(err, dsec.Corrupt), "verify layer", string(d), err)
	}
	return nil
}

func (s *Store) verifyFiles(ctx context.Context, d layer.Digest, want layer.Manifest, meta io.Reader, data io.ReaderAt) error {
	h := sha256.New()
	n, err := io.Copy(h, ctxReader{ctx, meta})
	if err != nil {
		return err
	}
	if n != want.Meta.Size || layer.FromSum(h.Sum(nil)) != want.Meta.Digest {
		return errors.New("metadata: content has another digest")
	}
	if want.Data.Size == 0 {
		return nil
	}
	table, err := os.ReadFile(s.path("layers", d.Hex(), "chunks"))
	if err != nil {
		return err
	}
	ix, err := layer.DecodeTable(table, want.Data)
	if err != nil {
		return err
	}
	has := func(int) bool { return ctx.Err() == nil }
	f, err := os.OpenFile(s.path("layers", d.Hex(), layer.PresentFile), os.O_RDWR, 0)
	if err == nil {
		present, err := layer.OpenPresence(f, len(ix.Chunks))
		if err != nil {
			return err
		}
		defer present.Close()
		has = func(i int) bool { return ctx.Err() == nil && present.Has(i) }
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := ix.Verify(data, has); err != nil {
		return err
	}
	return ctx.Err()
}

// ctxReader ends when a context does.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
