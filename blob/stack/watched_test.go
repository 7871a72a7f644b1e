package stack_test

import (
	"context"
	"io"
	"sync"
	"sync/atomic"

	"github.com/opendsec/dsec/blob"
)

// watched knows how many reads there were at one time.
type watched struct {
	blob.Store
	now, most atomic.Int64
}

func (w *watched) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	now := w.now.Add(1)
	for most := w.most.Load(); now > most && !w.most.CompareAndSwap(most, now); most = w.most.Load() {
	}
	done := sync.OnceFunc(func() { w.now.Add(-1) })
	r, err := w.Store.Open(ctx, key, off, n)
	if err != nil {
		done()
		return nil, err
	}
	return &watchedReader{r, done}, nil
}

type watchedReader struct {
	io.ReadCloser
	done func()
}

func (r *watchedReader) Close() error {
	defer r.done()
	return r.ReadCloser.Close()
}
