package layer

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
)

// Progress of making an image known.
type Progress struct {
	Phase string        // queue, resolve, wait (another machine is at a layer), convert, stack
	Done  int64         // bytes of layers that were fetched, or need not be
	Total int64         // of those that the image has; 0: not known yet
	Queue int           // images before it and it; 0: it is being made
	Left  time.Duration // as the bytes went so far; 0: not known
}

type progressKey struct{}

// WithProgress has Store.Acquire tell of images that it must make first.
func WithProgress(ctx context.Context, fn func(dsec.LayerRef, Progress)) context.Context {
	return context.WithValue(ctx, progressKey{}, fn)
}

// Told tells whoever asked with WithProgress.
func Told(ctx context.Context, ref dsec.LayerRef, p Progress) {
	if fn, ok := ctx.Value(progressKey{}).(func(dsec.LayerRef, Progress)); ok {
		fn(ref, p)
	}
}
