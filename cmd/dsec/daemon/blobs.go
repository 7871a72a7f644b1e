package daemon

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/limit"
	"github.com/opendsec/dsec/blob/retry"
	"github.com/opendsec/dsec/blob/stack"
	"github.com/opendsec/dsec/internal/config"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime"
)

const (
	blobsWithin = 30 * time.Second // a directory on a mount that does not answer is given up
	probeWithin = 15 * time.Second
	// What a killed writer left is removed when it is so old that nobody can
	// still be writing it.
	leftoverAge = 24 * time.Hour
	sweepEvery  = time.Hour
)

// blobURL is where objects are, and the limits that the setting gives of it:
// requests= and bandwidth= are ours, the rest of the query is the store's.
func (s *settings) blobURL() (string, limit.Limits, error) {
	var l limit.Limits
	if s.Blobs == "" {
		return (&url.URL{Scheme: "file", Path: s.blobDir()}).String(), l, nil
	}
	bad := func(format string, args ...any) (string, limit.Limits, error) {
		return "", l, dsec.Errorf(dsec.Invalid, "check configuration", "blobs", format, args...)
	}
	base, query, _ := strings.Cut(s.Blobs, "?")
	q, err := url.ParseQuery(query)
	if err != nil {
		return bad("the query after ? cannot be read")
	}
	if v := q.Get("requests"); q.Has("requests") {
		if l.Requests, err = strconv.Atoi(v); err != nil || l.Requests < 1 {
			return bad("requests=%s: want a number of at least 1", dsec.Quote(v))
		}
	}
	if v := q.Get("bandwidth"); q.Has("bandwidth") {
		if l.Bandwidth, err = config.Bytes(v, 0); err != nil || l.Bandwidth < 1 {
			return bad("bandwidth=%s: want bytes a second, such as 200MiB", dsec.Quote(v))
		}
	}
	q.Del("requests")
	q.Del("bandwidth")
	if len(q) > 0 {
		base += "?" + q.Encode()
	}
	if err := bucket.Check(base); err != nil {
		return "", l, err
	}
	return base, l, nil
}

// openBlobs opens the object storage of the settings, with retries, limits and
// hedges. S3 is not asked anything yet.
func openBlobs(ctx context.Context, s *settings) (*stack.Store, error) {
	return openBlobsWith(ctx, s, retry.Policy{})
}

func openBlobsWith(ctx context.Context, s *settings, again retry.Policy) (*stack.Store, error) {
	where, limits, err := s.blobURL()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, blobsWithin)
	defer cancel()
	b, err := bucket.Open(ctx, where)
	if err != nil {
		return nil, err
	}
	return stack.New(b, stack.Options{Limits: limits, Retry: again}), nil
}

// lookBlobs is openBlobs for who looks at what nodes have stored: a directory
// that is not there is an error and is not made.
func lookBlobs(ctx context.Context, s *settings) (*stack.Store, error) {
	where, _, err := s.blobURL()
	if err != nil {
		return nil, err
	}
	if notThere(where) {
		return nil, dsec.Errorf(dsec.NotFound, "open object storage", where, "there is none; --config names the configuration whose blobs or data say where it is")
	}
	return openBlobs(ctx, s)
}

// notThere says that a URL names a directory that does not exist.
func notThere(where string) bool {
	u, err := url.Parse(where)
	if err != nil || u.Scheme != "file" {
		return false
	}
	_, err = os.Stat(u.Path)
	return errors.Is(err, fs.ErrNotExist)
}

// openBlobs is the step of the agent. The credentials leave the environment,
// which the processes that sandboxes come from inherit.
func (a *agent) openBlobs(s *settings, log *slog.Logger) lifecycle.Step {
	var stop func()
	return lifecycle.Step{Name: "blobs", Do: func(ctx context.Context) (err error) {
		a.blobs, err = openBlobs(ctx, s)
		takeCredentials()
		if err == nil {
			log.Info("object storage", "at", blobPlace(s))
			stop = sweeping(a.blobs, sweepEvery, log)
		}
		return err
	}, Undo: func(context.Context) error {
		stop()
		return a.blobs.Close()
	}}
}

// sweeping removes what killed writers left, now and then, until stop is called,
// which waits for it.
func sweeping(s blob.Sweeper, every time.Duration, log *slog.Logger) (stop func()) {
	return repeating(0, every, func(ctx context.Context) {
		n, err := s.Sweep(ctx, leftoverAge)
		if n > 0 {
			log.Info("leftovers of killed writers removed from object storage", "count", n)
		}
		if err != nil && ctx.Err() == nil {
			log.Warn("remove leftovers from object storage", "err", err)
		}
	})
}

// takeCredentials removes what the AWS SDK reads from the environment of this
// process and returns it. They are for the agent: the gateway has no use for
// them, and what the hold has, its children have.
func takeCredentials() (env []string) {
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(name, "AWS_") {
			env = append(env, v)
			_ = os.Unsetenv(name) // a name without "=" and NUL never fails
		}
	}
	return env
}

// blobPlace is the setting for people: where, and nothing else.
func blobPlace(s *settings) string {
	where, _, err := s.blobURL()
	if err != nil {
		return "object storage"
	}
	base, query, _ := strings.Cut(where, "?")
	if q, err := url.ParseQuery(query); err == nil && q.Get("endpoint") != "" {
		base += " at " + q.Get("endpoint")
	}
	return base
}

// probeBlobs is blobCheck where nothing is open. It makes no directory.
func probeBlobs(ctx context.Context, s *settings) runtime.Check {
	c := runtime.Check{Name: blobCheckName}
	where, _, err := s.blobURL()
	if err != nil {
		c.Detail = err.Error()
		return c
	}
	if notThere(where) {
		c.OK, c.Detail = true, where+": not there yet, the first start makes it"
		return c
	}
	store, err := openBlobs(ctx, s)
	if err != nil {
		c.Detail = fmt.Sprintf("%s: %v", blobPlace(s), err)
		return c
	}
	defer store.Close()
	return blobCheck(ctx, s, store)
}

const (
	blobCheckName = "object storage"
	probeBytes    = 4096
)

// blobCheck writes, reads and deletes an object.
func blobCheck(ctx context.Context, s *settings, store *stack.Store) runtime.Check {
	c := runtime.Check{Name: blobCheckName}
	ctx, cancel := context.WithTimeout(ctx, probeWithin)
	defer cancel()
	began := time.Now()
	err := probeObject(ctx, store)
	switch {
	case err == nil:
		c.OK, c.Detail = true, fmt.Sprintf("%s: wrote, read and deleted %d bytes in %v", blobPlace(s), probeBytes, time.Since(began).Round(time.Millisecond))
	case errors.Is(err, dsec.Timeout.Err()) && ctx.Err() != nil:
		c.Detail = fmt.Sprintf("%s: no answer within %v: %v", blobPlace(s), probeWithin, err)
	default:
		c.Detail = fmt.Sprintf("%s: %v", blobPlace(s), err)
	}
	return c
}

func probeObject(ctx context.Context, s blob.Store) (err error) {
	key, want := "probe/"+dsec.Random(16), make([]byte, probeBytes)
	_, _ = rand.Read(want) // never fails
	if err := blob.PutBytes(ctx, s, key, want, blob.PutOptions{IfAbsent: true}); err != nil {
		return err
	}
	defer func() { // also what could not be read
		err = errors.Join(err, s.Delete(ctx, key))
	}()
	got, err := blob.ReadAll(ctx, s, key, probeBytes)
	if err == nil && !bytes.Equal(got, want) {
		err = dsec.Errorf(dsec.Corrupt, "read object", key, "not what was written")
	}
	return err
}
