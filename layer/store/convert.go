package store

import (
	"bytes"
	"context"
	"errors"
	"os"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/layer"
)

// unique drops layers that an image has again.
func unique(blobs []image.Blob) (out []image.Blob) {
	seen := map[string]bool{}
	for _, b := range blobs {
		if !seen[b.Digest] {
			seen[b.Digest] = true
			out = append(out, b)
		}
	}
	return out
}

// convertImage makes a layer of each OCI layer, side by side, and settles them
// on one another, the lowest first.
func (s *Store) convertImage(ctx context.Context, m *making, r *image.Remote, opts image.Options) (layer.Stack, error) {
	blobs := unique(r.Layers)
	made := make([]converted, len(blobs))
	index := map[string]int{}
	var largest int64
	for i, b := range blobs {
		index[b.Digest], largest = i, max(largest, b.Size)
	}
	g, gctx := errgroup.WithContext(ctx)
	for i, b := range blobs {
		g.Go(func() (err error) {
			made[i], err = s.ociLayer(gctx, m, r, b, pulling{opts, largest})
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return layer.Stack{}, err
	}
	st := stacking{s: s, opts: opts, source: r.Name}
	defer st.close()
	for _, b := range r.Layers {
		if err := st.add(ctx, made[index[b.Digest]]); err != nil {
			return layer.Stack{}, err
		}
	}
	if len(st.parts) == 0 {
		nothing, err := s.View("").ImportTar(ctx, Tar{R: bytes.NewReader(make([]byte, 1024)), Name: r.Name}, "", image.Options{})
		if err != nil {
			return layer.Stack{}, err
		}
		st.parts = []layer.Part{{Digest: nothing.Digest}}
	}
	parts, err := s.fitting(ctx, s.premerged(ctx, layer.TopMost(st.parts)))
	return layer.Stack{Layers: parts, Config: r.Config}, err
}

// maxImageLayers leaves room for a workspace and toolkits above an image.
const maxImageLayers = layer.MaxStack / 2

// fitting merges the layers at the bottom of an image that has too many.
func (s *Store) fitting(ctx context.Context, parts []layer.Part) ([]layer.Part, error) {
	for len(parts) > maxImageLayers {
		n := min(len(parts)-maxImageLayers+1, layer.MaxStack)
		var bottom []layer.Digest
		for _, p := range parts[:n] {
			bottom = append(bottom, p.Digest)
		}
		info, err := s.mergeLayers(ctx, bottom)
		if err != nil {
			return nil, err
		}
		parts = append([]layer.Part{{Digest: info.Digest}}, parts[n:]...)
	}
	return parts, nil
}

// pulling is how one layer of an image is fetched.
type pulling struct {
	opts    image.Options
	largest int64 // bytes, of the image's layers
}

// ociLayer makes a layer of one OCI layer, or finds what it became.
func (s *Store) ociLayer(ctx context.Context, m *making, r *image.Remote, b image.Blob, p pulling) (converted, error) {
	keys := []string{layerNote(b.Digest, p.opts)}
	if b.DiffID != "" {
		keys = append(keys, layerNote(b.DiffID, p.opts))
	}
	fetched := false
	c, err := s.onceHere(ctx, "oci "+keys[0], func(ctx context.Context) (converted, error) {
		waits := false
		defer func() {
			if waits {
				m.waiting(-1)
			}
		}()
		return s.onceForAll(ctx, keys[0], keys, func() {
			if !waits {
				waits = true
				m.waiting(1)
			}
		}, func() (converted, []string, error) {
			fetched = true
			if err := s.slots.take(ctx, b.Size, p.largest, s.opts.Layers); err != nil {
				return converted{}, nil, err
			}
			defer s.slots.give(b.Size)
			return s.convertBlob(ctx, m, r, b, p.opts)
		})
	})
	if err == nil && !fetched {
		m.came(b.Size, false)
	}
	return c, err
}

// convertBlob fetches and converts, at the same time. It returns the note's
// further key: the content, which is known now.
func (s *Store) convertBlob(ctx context.Context, m *making, r *image.Remote, b image.Blob, opts image.Options) (converted, []string, error) {
	name := s.path("parts", layer.Digest(b.Digest).Hex())
	partial, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return converted{}, nil, err
	}
	defer partial.Close()
	kept, err := partial.Stat()
	if err != nil {
		return converted{}, nil, err
	}
	info, diffID, err := s.stream(ctx, m, r, b, partial, opts)
	if class := dsec.ClassOf(err); err != nil && kept.Size() > 0 && (class == dsec.Corrupt || class == dsec.Invalid) {
		// What was kept may be what a power failure made of it.
		if err := partial.Truncate(0); err != nil {
			return converted{}, nil, err
		}
		m.came(-b.Size, true)
		info, diffID, err = s.stream(ctx, m, r, b, partial, opts)
	}
	if err != nil {
		return converted{}, nil, err
	}
	if err := os.Remove(name); err != nil {
		return converted{}, nil, err
	}
	c := converted{Layer: info.Digest}
	im, closeIt, err := s.image(info.Digest)
	if err != nil {
		return converted{}, nil, err
	}
	defer closeIt()
	loose, empty, err := image.IsLoose(im)
	if err != nil {
		return converted{}, nil, err
	}
	if c.Loose = loose; empty {
		c.Layer = ""
	}
	return c, []string{layerNote(diffID, opts)}, nil
}

// stream converts a blob while it comes.
func (s *Store) stream(ctx context.Context, m *making, r *image.Remote, b image.Blob, partial *os.File, opts image.Options) (layer.Info, string, error) {
	plain, err := r.OpenPlain(ctx, b, partial, func(n int) { m.came(int64(n), true) })
	if err != nil {
		return layer.Info{}, "", err
	}
	defer plain.Close()
	in, fed, err := feed(plain)
	if err != nil {
		return layer.Info{}, "", err
	}
	opts = image.Options{Loose: true, UserXattr: opts.UserXattr, MaxBytes: opts.MaxBytes, MaxEntries: opts.MaxEntries, MaxRatio: opts.MaxRatio}
	v := verified{fed: fed}
	info, err := s.makeLayer(partOf(r.Name), func(files image.Files) (image.Result, error) {
		files.Input = in
		loc := image.Location{Source: r.Name, Kind: image.KindFile, Tar: true, Whiteouts: true}
		res, err := s.opts.Convert(ctx, loc, files, opts)
		in.Close() // stops the feeding if nobody read to the end
		if fedErr := v.wait(ctx); fedErr != nil && !errors.Is(fedErr, unix.EPIPE) {
			err = dsec.E(fault.Class(fedErr, dsec.Invalid), "read blob", b.Digest, fedErr) // a stream that broke looks like a bad tar to who reads it
		}
		if err == nil { // nothing is a layer of what was not verified to the end
			v.diffID, err = plain.Finish()
		}
		return res, err
	})
	return info, v.diffID, err
}

// verified is what is known when a stream has ended.
type verified struct {
	fed    <-chan error
	diffID string
}

func (v *verified) wait(ctx context.Context) error {
	select {
	case err := <-v.fed:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stacking puts an image's layers on one another.
type stacking struct {
	s       *Store
	opts    image.Options
	source  string // for people
	parts   []layer.Part
	below   *image.Below // nil: nothing had to be settled so far
	added   int          // of parts, to below
	closers []func()
}

// add settles a layer if it is loose and puts it on top.
func (st *stacking) add(ctx context.Context, c converted) error {
	if c.Layer == "" {
		return nil
	}
	if c.Loose {
		var err error
		if c, err = st.settle(ctx, c.Layer); err != nil || c.Layer == "" {
			return err
		}
	}
	st.parts = append(st.parts, layer.Part{Digest: c.Layer})
	return nil
}

// settle makes of a loose layer what it is on those below, or finds it.
func (st *stacking) settle(ctx context.Context, loose layer.Digest) (converted, error) {
	var below []layer.Digest
	for _, p := range st.parts {
		below = append(below, p.Digest)
	}
	key := settledNote(loose, below)
	return st.s.onceHere(ctx, "settle "+key, func(ctx context.Context) (converted, error) {
		return st.s.onceForAll(ctx, key, []string{key}, func() {}, func() (converted, []string, error) {
			c, err := st.settleOn(ctx, loose)
			return c, nil, err
		})
	})
}

func (st *stacking) settleOn(ctx context.Context, loose layer.Digest) (converted, error) {
	if st.below == nil {
		var err error
		if st.below, err = image.NewBelow(st.opts); err != nil {
			return converted{}, err
		}
	}
	for ; st.added < len(st.parts); st.added++ {
		im, closeIt, err := st.s.image(st.parts[st.added].Digest)
		if err != nil {
			return converted{}, err
		}
		st.closers = append(st.closers, closeIt)
		if err := st.below.Add(ctx, im); err != nil {
			return converted{}, err
		}
	}
	im, closeIt, err := st.s.image(loose)
	if err != nil {
		return converted{}, err
	}
	defer closeIt()
	var entries int64
	info, err := st.s.makeLayer(partOf(st.source), func(files image.Files) (image.Result, error) {
		res, err := st.below.Settle(ctx, im, files)
		entries = res.Entries
		return res, err
	})
	if err != nil || entries <= 1 {
		return converted{}, err
	}
	return converted{Layer: info.Digest}, nil
}

func (st *stacking) close() {
	for _, c := range st.closers {
		c()
	}
}

// here is a piece of work on notes that callers share.
type here struct {
	done chan struct{}
	c    converted
	err  error
}

// onceHere runs work, or waits for whoever runs it under the same key. If that
// one was cancelled the next caller runs it again.
func (s *Store) onceHere(ctx context.Context, key string, work func(ctx context.Context) (converted, error)) (converted, error) {
	for {
		s.mu.Lock()
		j, running := s.heres[key]
		if !running {
			j = &here{done: make(chan struct{})}
			s.heres[key] = j
		}
		s.mu.Unlock()
		if !running {
			j.c, j.err = work(ctx)
			s.mu.Lock()
			delete(s.heres, key)
			s.mu.Unlock()
			close(j.done)
			return j.c, j.err
		}
		select {
		case <-j.done:
			if class := dsec.ClassOf(diskError("", "", j.err)); j.err != nil && (class == dsec.Canceled || class == dsec.Timeout) {
				continue
			}
			return j.c, j.err
		case <-ctx.Done():
			return converted{}, ctx.Err()
		}
	}
}

// partOf says of a layer that it is one of an image's.
func partOf(source string) about {
	whole := false
	return about{Source: source, Image: &whole}
}
