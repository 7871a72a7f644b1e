package bucket

import (
	"bytes"
	"context"
	"io"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

// memory is a store that ends with its process.
type memory struct {
	mu      sync.Mutex
	objects map[string]memObject
}

type memObject struct {
	b []byte // never changed
	t time.Time
}

func (m *memory) find(ctx context.Context, op, key string) (memObject, error) {
	if err := blob.CheckKey(key); err != nil {
		return memObject{}, err
	}
	if err := ctx.Err(); err != nil {
		return memObject{}, classify(op, key, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	o, ok := m.objects[key]
	if !ok {
		return o, dsec.E(dsec.NotFound, op, key, nil)
	}
	return o, nil
}

func (m *memory) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if err := checkRange(key, off); err != nil {
		return nil, err
	}
	o, err := m.find(ctx, readOp, key)
	if err != nil {
		return nil, err
	}
	b := o.b[min(off, int64(len(o.b))):]
	if n >= 0 {
		b = b[:min(n, int64(len(b)))]
	}
	return io.NopCloser(&memReader{ctx, key, bytes.NewReader(b)}), nil
}

type memReader struct {
	ctx context.Context
	key string
	r   *bytes.Reader
}

func (r *memReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, classify(readOp, r.key, err)
	}
	return r.r.Read(p)
}

func (m *memory) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	b, err := io.ReadAll(r)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return classify(writeOp, key, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.objects[key]; ok && o.IfAbsent {
		return dsec.Errorf(dsec.AlreadyExists, writeOp, key, "the key is taken")
	}
	m.objects[key] = memObject{b, time.Now()}
	return nil
}

func (m *memory) Stat(ctx context.Context, key string) (blob.Info, error) {
	o, err := m.find(ctx, statOp, key)
	if err != nil {
		return blob.Info{}, err
	}
	return blob.Info{Key: key, Size: int64(len(o.b)), ModTime: o.t}, nil
}

func (m *memory) Delete(ctx context.Context, key string) error {
	if _, err := m.find(ctx, deleteOp, key); err != nil {
		if dsec.ClassOf(err) == dsec.NotFound {
			err = nil
		}
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.objects, key)
	return nil
}

func (m *memory) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		m.mu.Lock()
		now := maps.Clone(m.objects)
		m.mu.Unlock()
		for _, key := range slices.Sorted(maps.Keys(now)) {
			if err := ctx.Err(); err != nil {
				yield(blob.Info{}, classify(listOp, prefix, err))
				return
			}
			o := now[key]
			if strings.HasPrefix(key, prefix) && !yield(blob.Info{Key: key, Size: int64(len(o.b)), ModTime: o.t}, nil) {
				return
			}
		}
	}
}

func (m *memory) Close() error { return nil }
