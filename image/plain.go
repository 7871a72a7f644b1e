package image

import (
	"context"
	"errors"
	"io"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/readahead"
)

// layer is verified as a blob, and as the plain tar that the config names, if it
// does: who has one under its name elsewhere takes it for this one. What
// decompresses runs ahead of what hashes the plain bytes and converts them.
func (r resolver) layer(d v1.Descriptor, diffID string) layerSource {
	return tarLayer{oci: true, open: func(ctx context.Context) (io.ReadCloser, error) {
		ctx, cancel := context.WithCancel(ctx)
		p := &plainLayer{cancel: cancel}
		err := p.open(ctx, r, d, diffID)
		if err != nil {
			return nil, errors.Join(err, p.Close())
		}
		return p, nil
	}}
}

// plainLayer is an OCI layer as a plain tar.
type plainLayer struct {
	io.Reader
	closers []io.Closer // what was opened first is closed last
	cancel  context.CancelFunc
}

func (p *plainLayer) open(ctx context.Context, r resolver, d v1.Descriptor, diffID string) error {
	f, err := r.store.blob(ctx, d, false)
	if err != nil {
		return err
	}
	p.closers = append(p.closers, f)
	plain, err := decompress(verify(f, d.Digest, d.Size), r.opts.MaxRatio)
	if err != nil {
		return err
	}
	p.closers = append(p.closers, plain)
	p.Reader = plain
	if diffID == "" {
		return nil
	}
	ahead, err := readahead.NewReaderSize(plain, aheadBuffers, aheadSize)
	if err != nil {
		return err
	}
	p.closers = append(p.closers, ahead)
	want, err := v1.NewHash(diffID)
	p.Reader = &anySize{verifier: verifier{r: ahead, hash: newHash(), want: want}}
	return err
}

func (p *plainLayer) Close() error {
	p.cancel() // a read that waits ends, and with it the stage
	var errs []error
	for _, c := range slices.Backward(p.closers) {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}
