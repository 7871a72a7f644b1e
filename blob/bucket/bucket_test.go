package bucket_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/blobtest"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/limit"
	"github.com/opendsec/dsec/blob/retry"
)

func open(t *testing.T, url string) blob.Store {
	t.Helper()
	b, err := bucket.Open(context.Background(), url)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestConformance(t *testing.T) {
	for name, factory := range map[string]func(*testing.T) blob.Store{
		"file":   func(t *testing.T) blob.Store { return open(t, "file://"+t.TempDir()) },
		"prefix": func(t *testing.T) blob.Store { return open(t, "file://"+t.TempDir()+"?prefix=a/b") },
		"mem":    func(t *testing.T) blob.Store { return open(t, "mem://") },
		"decorated": func(t *testing.T) blob.Store {
			return limit.New(retry.New(open(t, "file://"+t.TempDir()), retry.Policy{First: time.Millisecond}), 2)
		},
	} {
		t.Run(name, func(t *testing.T) { blobtest.Run(t, factory) })
	}
}

func TestBadURLs(t *testing.T) {
	for _, u := range []string{"", "file://relative/path", "ftp://x", "file:///tmp/x?prefix=../y", "%%"} {
		if _, err := bucket.Open(context.Background(), u); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("%q: %v", u, err)
		}
	}
}

func TestNoStrayFiles(t *testing.T) {
	dir := t.TempDir()
	s := open(t, "file://"+dir)
	defer s.Close()
	if err := blob.PutBytes(context.Background(), s, "a/b", []byte("x"), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	names, err := os.ReadDir(filepath.Join(dir, "a"))
	if err != nil || len(names) != 1 {
		t.Errorf("%v, %v", names, err)
	}
}

// flaky fails calls, and breaks readers, a number of times.
type flaky struct {
	blob.Store
	left atomic.Int32
}

func (f *flaky) fails() bool { return f.left.Add(-1) >= 0 }

var errAway = dsec.Errorf(dsec.Unavailable, "call", "store", "away")

func (f *flaky) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if f.fails() {
		return nil, errAway
	}
	r, err := f.Store.Open(ctx, key, off, n)
	if err != nil || !f.fails() {
		return r, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(io.LimitReader(r, 3), iotest.ErrReader(errAway)), r}, nil
}

func (f *flaky) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	if f.fails() {
		_, _ = io.CopyN(io.Discard, r, 2)
		return errAway
	}
	return f.Store.Put(ctx, key, r, o)
}

func TestRetryResumes(t *testing.T) {
	ctx := context.Background()
	f := &flaky{Store: open(t, "mem://")}
	s := retry.New(f, retry.Policy{Tries: 3, First: time.Millisecond})
	defer s.Close()
	f.left.Store(2)
	if err := blob.PutBytes(ctx, s, "k", []byte("0123456789"), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for fails := range int32(4) {
		f.left.Store(fails)
		b, err := blob.ReadAll(ctx, s, "k", 100)
		if fails < 3 && (err != nil || string(b) != "0123456789") {
			t.Errorf("%d failures: %q, %v", fails, b, err)
		}
	}
	f.left.Store(100)
	if _, err := s.Open(ctx, "k", 0, -1); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Errorf("a store that stays away: %v", err)
	}
}
