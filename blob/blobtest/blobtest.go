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
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

// Run checks an implementation. factory returns an empty store each time.
func Run(t *testing.T, factory func(t *testing.T) blob.Store) {
	for name, test := range map[string]func(*testing.T, blob.Store){
		"round trip and ranges": ranges, "unknown keys": unknown, "if absent": ifAbsent, "replace": replace,
		"list": list, "list of many": listMany, "order of keys": listOrder, "broken write": brokenWrite, "keys": keys, "cancel": canceled,
		"deadline": deadline, "end while reading": endWhileReading, "large": large, "large if absent": largeIfAbsent,
		"concurrent if absent": race, "concurrent replace": replaceRace, "sweep": sweep,
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
	big := io.MultiReader(bytes.NewReader(make([]byte, 20<<20)), errReader{}) // parts of it are sent
	if err := s.Put(context.Background(), "k", big, blob.PutOptions{}); err == nil {
		t.Error("a broken large write succeeded")
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

// race: of those who write what is absent one wins, and its content is there.
func race(t *testing.T, s blob.Store) {
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() {
			errs[i] = blob.PutBytes(context.Background(), s, "k", content(i), blob.PutOptions{IfAbsent: true})
		})
	}
	wg.Wait()
	winner := -1
	for i, err := range errs {
		if err == nil {
			if winner >= 0 {
				t.Errorf("%d and %d won", winner, i)
			}
			winner = i
		} else if !errors.Is(err, dsec.AlreadyExists.Err()) {
			t.Error(err)
		}
	}
	if winner < 0 {
		t.Fatal("nobody won")
	}
	if got := get(t, s, "k", 0, -1); got != string(content(winner)) {
		t.Errorf("%d won, but now there are %d bytes of another", winner, len(got))
	}
}

func content(i int) []byte { return bytes.Repeat([]byte{byte('a' + i)}, 64<<10+i) }

// replaceRace: who reads while others replace reads one of them, whole.
func replaceRace(t *testing.T, s blob.Store) {
	if err := blob.PutBytes(context.Background(), s, "k", content(0), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 5 {
				if err := blob.PutBytes(context.Background(), s, "k", content(i), blob.PutOptions{}); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for range 10 {
				b, err := blob.ReadAll(context.Background(), s, "k", 1<<20)
				if err != nil {
					t.Error(err)
				} else if !bytes.Equal(b, content(int(b[0]-'a'))) {
					t.Errorf("%d bytes of more than one writer", len(b))
				}
			}
		})
	}
	wg.Wait()
}

// listMany has more than what a server gives in one answer.
func listMany(t *testing.T, s blob.Store) {
	const n = 1100
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < n; i += 8 {
				if err := blob.PutBytes(context.Background(), s, fmt.Sprintf("m/%04d", i), []byte{1}, blob.PutOptions{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	i := 0
	for o, err := range s.List(context.Background(), "m/") {
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("m/%04d", i); o.Key != want || o.Size != 1 || o.ModTime.IsZero() {
			t.Fatalf("number %d is %+v", i, o)
		}
		i++
	}
	if i != n {
		t.Errorf("%d of %d", i, n)
	}
}

// listOrder: a directory sorts as the keys in it, and a prefix may end anywhere.
func listOrder(t *testing.T, s blob.Store) {
	all := []string{"a-b", "a.b", "a/x", "a/y/z", "ab", "b/a"}
	for _, k := range all {
		put(t, s, k, k)
	}
	for prefix, want := range map[string]string{"": strings.Join(all, " "), "a": "a-b a.b a/x a/y/z ab", "a/": "a/x a/y/z", "a/y": "a/y/z",
		"a/y/z": "a/y/z", "a/x/": "", "c": "", "../": ""} {
		var got []string
		for i, err := range s.List(context.Background(), prefix) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, i.Key)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%q: %v, want %s", prefix, got, want)
		}
	}
}

func deadline(t *testing.T, s blob.Store) {
	put(t, s, "k", "x")
	ctx, cancel := context.WithDeadline(context.Background(), time.Unix(1, 0))
	defer cancel()
	_, openErr := s.Open(ctx, "k", 0, -1)
	_, statErr := s.Stat(ctx, "k")
	var listErr error
	for _, err := range s.List(ctx, "") {
		listErr = err
	}
	for what, err := range map[string]error{"open": openErr, "stat": statErr, "list": listErr, "delete": s.Delete(ctx, "k"),
		"put": blob.PutBytes(ctx, s, "k", []byte("y"), blob.PutOptions{})} {
		if !errors.Is(err, dsec.Timeout.Err()) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if got := get(t, s, "k", 0, -1); got != "x" {
		t.Errorf("now %q", got)
	}
}

// endWhileReading: the context of Open ends the reading.
func endWhileReading(t *testing.T, s blob.Store) {
	put(t, s, "k", strings.Repeat("x", 8<<20))
	ctx, cancel := context.WithCancel(context.Background())
	r, err := s.Open(ctx, "k", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := io.ReadFull(r, make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if n, err := io.Copy(io.Discard, r); !errors.Is(err, dsec.Canceled.Err()) {
		t.Errorf("read %d bytes more, %v", n, err)
	}
}

func largeIfAbsent(t *testing.T, s blob.Store) {
	b := bytes.Repeat([]byte("0123456789abcdef"), 9<<20/16)
	for i, want := range []dsec.Class{"", dsec.AlreadyExists} {
		err := s.Put(context.Background(), "large", onlyReader{bytes.NewReader(b)}, blob.PutOptions{IfAbsent: true})
		if dsec.ClassOf(err) != want {
			t.Errorf("put %d: %v", i, err)
		}
	}
	i, err := s.Stat(context.Background(), "large")
	if err != nil || i.Size != int64(len(b)) {
		t.Errorf("%+v, %v", i, err)
	}
}

type onlyReader struct{ io.Reader }

// sweep spares what a key shows.
func sweep(t *testing.T, s blob.Store) {
	sw, ok := s.(blob.Sweeper)
	if !ok {
		return // nothing can be left in it
	}
	put(t, s, "a/b", "x")
	if n, err := sw.Sweep(context.Background(), 0); err != nil || n != 0 {
		t.Errorf("%d swept, %v", n, err)
	}
	if got := get(t, s, "a/b", 0, -1); got != "x" {
		t.Errorf("now %q", got)
	}
}
