// Package blobtest is the conformance suite of blob.Store.
package blobtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

// Run checks an implementation. factory returns an empty store each time.
func Run(t *testing.T, factory func(t *testing.T) blob.Store) {
	for name, test := range map[string]func(*testing.T, blob.Store){
		"round trip and ranges": ranges, "unknown keys": unknown, "if absent": ifAbsent, "replace": replace,
		"list": list, "broken write": brokenWrite, "keys": keys, "cancel": canceled, "large": large, "concurrent if absent": race,
	} {
		t.Run(name, func(t *testing.T) {
			s := factory(t)
			t.Cleanup(func() {
				if err := s.Close(); err != nil {
					t.Error("close:", err)
				}
			})
			test(t, s)
		})
	}
}

func put(t *testing.T, s blob.Store, key, body string) {
	t.Helper()
	if err := s.Put(context.Background(), key, strings.NewReader(body), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
}

func get(t *testing.T, s blob.Store, key string, off, n int64) string {
	t.Helper()
	r, err := s.Open(context.Background(), key, off, n)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(r)
	if err = errors.Join(err, r.Close()); err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func ranges(t *testing.T, s blob.Store) {
	put(t, s, "a/b", "0123456789")
	put(t, s, "empty", "")
	for _, c := range []struct {
		off, n int64
		want   string
	}{{0, -1, "0123456789"}, {3, 4, "3456"}, {8, 100, "89"}, {10, -1, ""}, {0, 0, ""}} {
		if got := get(t, s, "a/b", c.off, c.n); got != c.want {
			t.Errorf("%d+%d: %q, want %q", c.off, c.n, got, c.want)
		}
	}
	if got := get(t, s, "empty", 0, -1); got != "" {
		t.Errorf("empty: %q", got)
	}
	i, err := s.Stat(context.Background(), "a/b")
	if err != nil || i.Size != 10 || i.Key != "a/b" || i.ModTime.IsZero() {
		t.Errorf("stat: %+v, %v", i, err)
	}
	b, err := blob.ReadAll(context.Background(), s, "a/b", 10)
	if err != nil || string(b) != "0123456789" {
		t.Errorf("read all: %q, %v", b, err)
	}
	if _, err := blob.ReadAll(context.Background(), s, "a/b", 9); !errors.Is(err, dsec.Corrupt.Err()) {
		t.Errorf("read all beyond the limit: %v", err)
	}
}

func unknown(t *testing.T, s blob.Store) {
	ctx := context.Background()
	_, openErr := s.Open(ctx, "no/such", 0, -1)
	_, statErr := s.Stat(ctx, "no/such")
	for _, err := range []error{openErr, statErr} {
		if !errors.Is(err, dsec.NotFound.Err()) {
			t.Errorf("unknown key: %v", err)
		}
	}
	if err := s.Delete(ctx, "no/such"); err != nil {
		t.Errorf("delete of an unknown key: %v", err)
	}
}

func ifAbsent(t *testing.T, s blob.Store) {
	ctx := context.Background()
	if err := blob.PutBytes(ctx, s, "k", []byte("first"), blob.PutOptions{IfAbsent: true}); err != nil {
		t.Fatal(err)
	}
	if err := blob.PutBytes(ctx, s, "k", []byte("second"), blob.PutOptions{IfAbsent: true}); !errors.Is(err, dsec.AlreadyExists.Err()) {
		t.Errorf("second: %v", err)
	}
	if got := get(t, s, "k", 0, -1); got != "first" {
		t.Errorf("now %q", got)
	}
}

func replace(t *testing.T, s blob.Store) {
	put(t, s, "k", "a longer first value")
	put(t, s, "k", "second")
	if got := get(t, s, "k", 0, -1); got != "second" {
		t.Errorf("now %q", got)
	}
	if err := s.Delete(context.Background(), "k"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Stat(context.Background(), "k"); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("after delete: %v", err)
	}
}

func list(t *testing.T, s blob.Store) {
	var want []string
	for i := range 25 {
		key := fmt.Sprintf("p/%02d/x", i)
		put(t, s, key, key)
		want = append(want, key)
	}
	put(t, s, "other", "")
	var got []string
	for i, err := range s.List(context.Background(), "p/") {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, i.Key)
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("got %v", got)
	}
	for range s.List(context.Background(), "p/") {
		break // stopping early must not hang
	}
}

// brokenWrite: content that ends in an error leaves what was there.
func brokenWrite(t *testing.T, s blob.Store) {
	put(t, s, "k", "old")
	broken := io.MultiReader(bytes.NewReader(make([]byte, 1<<20)), errReader{})
	for _, key := range []string{"k", "new"} {
		if err := s.Put(context.Background(), key, broken, blob.PutOptions{}); err == nil {
			t.Errorf("%s: a broken write succeeded", key)
		}
	}
	if got := get(t, s, "k", 0, -1); got != "old" {
		t.Errorf("now %d bytes", len(got))
	}
	if _, err := s.Stat(context.Background(), "new"); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("a broken write is there: %v", err)
	}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errors.New("content broke") }

func keys(t *testing.T, s blob.Store) {
	ctx := context.Background()
	for _, key := range []string{"", "/a", "a/", "a//b", "../a", "a/../b", "a/.b", "a b", "a\x00", strings.Repeat("k", 513)} {
		_, openErr := s.Open(ctx, key, 0, -1)
		_, statErr := s.Stat(ctx, key)
		for _, err := range []error{openErr, statErr, s.Delete(ctx, key), blob.PutBytes(ctx, s, key, nil, blob.PutOptions{})} {
			if !errors.Is(err, dsec.Invalid.Err()) {
				t.Errorf("%q: %v", key, err)
			}
		}
	}
}

func canceled(t *testing.T, s blob.Store) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := blob.PutBytes(ctx, s, "k", []byte("x"), blob.PutOptions{}); err == nil {
		t.Error("a put with a dead context succeeded")
	}
	if _, err := s.Stat(context.Background(), "k"); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("it is there: %v", err)
	}
}

func large(t *testing.T, s blob.Store) {
	b := bytes.Repeat([]byte("0123456789abcdef"), 12<<20/16) // more than one part of a multipart upload
	if err := blob.PutBytes(context.Background(), s, "large", b, blob.PutOptions{IfAbsent: true}); err != nil {
		t.Fatal(err)
	}
	if got := get(t, s, "large", 5<<20, 64); got != string(b[:64]) {
		t.Errorf("range: %q", got)
	}
}

func race(t *testing.T, s blob.Store) {
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() {
			errs[i] = blob.PutBytes(context.Background(), s, "k", []byte("same content"), blob.PutOptions{IfAbsent: true})
		})
	}
	wg.Wait()
	won := 0
	for _, err := range errs {
		if err == nil {
			won++
		} else if !errors.Is(err, dsec.AlreadyExists.Err()) {
			t.Error(err)
		}
	}
	if won == 0 {
		t.Error("nobody won")
	}
	if got := get(t, s, "k", 0, -1); got != "same content" {
		t.Errorf("now %q", got)
	}
}
