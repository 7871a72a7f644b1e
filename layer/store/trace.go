package store

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/resident"
)

// Recording is what one mount of a layer touched.
type Recording struct {
	Window  time.Duration // since the first read
	Ranges  []layer.Range
	Ordered bool // the ranges are in the order in which they were touched
}

// Trace is what was read first of a layer: the local one or that of the blob
// store, whichever has more recordings. NotFound if nobody recorded any.
func (s *Store) Trace(ctx context.Context, d layer.Digest) (layer.Trace, error) {
	if _, err := layer.ParseDigest(string(d)); err != nil {
		return layer.Trace{}, err
	}
	t, err := s.bestTrace(ctx, d)
	if err == nil && t.Recordings == 0 {
		err = dsec.Errorf(dsec.NotFound, "read trace", string(d), "nothing has been recorded yet")
	}
	return t, err
}

// LocalTrace is Trace without asking the blob store; for a mount, which does not
// wait. It fetches nothing and has no recording if there is none.
func (s *Store) LocalTrace(d layer.Digest) layer.Trace {
	b, err := os.ReadFile(s.path("layers", d.Hex(), layer.TraceFile))
	if err == nil {
		var t layer.Trace
		if t, err = layer.DecodeTrace(b, d); err == nil {
			return t
		}
	}
	if !errors.Is(err, fs.ErrNotExist) {
		s.opts.Log.Warn("the trace of a layer cannot be read; it counts as none", "layer", d, "err", err)
	}
	return layer.Trace{Layer: d}
}

// RecordTrace adds a recording to the trace of a layer, here and in the blob
// store. If that one cannot be reached the recording is kept here, and the error
// is told.
func (s *Store) RecordTrace(ctx context.Context, d layer.Digest, r Recording) error {
	const op = "record trace"
	if len(r.Ranges) == 0 {
		return nil
	}
	if _, err := s.manifest(d); err != nil {
		return err
	}
	leave, err := s.aloneWith(ctx, d)
	if err != nil {
		return dsec.E(dsec.ClassOf(err), op, string(d), err)
	}
	defer leave()
	have, farErr := s.bestTrace(ctx, d)
	if farErr != nil {
		have = s.LocalTrace(d)
	}
	t, err := layer.MergeTraces(have, layer.TraceOf(d, r.Window, r.Ranges, r.Ordered))
	if err == nil {
		err = errors.Join(s.keepTrace(ctx, t, farErr == nil), farErr)
	}
	return diskError(op, string(d), err)
}

// keepTrace writes a trace here and, with far, to the blob store.
func (s *Store) keepTrace(ctx context.Context, t layer.Trace, far bool) error {
	b, err := t.Encode()
	if err != nil {
		return err
	}
	// Not durable: after a power failure it is an old one, or none.
	if err := s.writeFile(filepath.Join("layers", t.Layer.Hex(), layer.TraceFile), b, false); err != nil {
		return err
	}
	if s.opts.Blobs == nil || !far {
		return nil
	}
	return s.opts.Blobs.Put(ctx, layer.TraceKey(t.Layer), bytes.NewReader(b), blob.PutOptions{})
}

// bestTrace is the trace with more recordings; an empty one if there is none.
func (s *Store) bestTrace(ctx context.Context, d layer.Digest) (layer.Trace, error) {
	here := s.LocalTrace(d)
	if s.opts.Blobs == nil {
		return here, nil
	}
	b, err := blob.ReadAll(ctx, s.opts.Blobs, layer.TraceKey(d), layer.MaxTrace)
	if errors.Is(err, dsec.NotFound.Err()) {
		return here, nil
	}
	var far layer.Trace
	if err == nil {
		far, err = layer.DecodeTrace(b, d)
	}
	switch {
	case dsec.ClassOf(err) == dsec.Corrupt: // it is written anew
		s.opts.Log.Warn("the trace of a layer cannot be read; it counts as none", "layer", d, "err", err)
		return here, nil
	case err != nil:
		return here, err
	case far.Recordings > here.Recordings:
		return far, nil
	}
	return here, nil
}

// aloneWith waits until nobody in this process changes the trace of the layer.
func (s *Store) aloneWith(ctx context.Context, d layer.Digest) (leave func(), err error) {
	mine := make(chan struct{})
	for {
		s.mu.Lock()
		other, busy := s.tracing[d]
		if !busy {
			s.tracing[d] = mine
		}
		s.mu.Unlock()
		if !busy {
			break
		}
		select {
		case <-other:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.tracing, d)
		close(mine)
	}, nil
}

// RecordResident adds to the trace of a whole layer what of it is in the page
// cache of its EROFS mount, given by its root. That is all that was touched since
// the mount was made and not dropped since, so one call for a mount is one
// recording; window is how long after the mount it is made.
func (s *Store) RecordResident(ctx context.Context, d layer.Digest, mount *os.File, window time.Duration) error {
	ranges, err := s.Resident(d, mount)
	if err != nil {
		return err
	}
	return s.RecordTrace(ctx, d, Recording{Window: window, Ranges: ranges})
}

// Resident is what of the data of a layer is in the page cache of its EROFS mount,
// given by its root: all that was touched since the mount was made and not dropped
// since.
func (s *Store) Resident(d layer.Digest, mount *os.File) ([]layer.Range, error) {
	const op = "look at page cache of layer"
	m, err := s.manifest(d)
	if err != nil {
		return nil, err
	}
	meta, err := os.Open(s.path("layers", d.Hex(), layer.MetaFile))
	if err != nil {
		return nil, diskError(op, string(d), err)
	}
	defer meta.Close()
	im, err := erofs.Open(meta, m.Meta.Size, nil)
	if err != nil {
		return nil, dsec.E(dsec.Corrupt, op, string(d), err)
	}
	return resident.Of(mount, im)
}
