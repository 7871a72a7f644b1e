package debian

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/within"
)

// How a mirror is asked.
const (
	tries     = 5                // in a row that bring nothing
	longStall = 30 * time.Second // without a byte
	longPause = 2 * time.Minute  // the longest a mirror may ask to wait
)

// fetcher reads files of mirrors.
type fetcher struct {
	client *http.Client
	pause  time.Duration // before the second try, doubled with each
	stall  time.Duration // without a byte: the connection counts as broken
}

// fetch writes what is at url to f, from its beginning, and returns the number
// of bytes. A connection that breaks is taken up where it broke; tries count
// from the last byte that came. More than limit bytes are refused.
func (c fetcher) fetch(ctx context.Context, url string, f *os.File, limit int64) (int64, error) {
	const op = "fetch"
	var at, furthest int64
	pause := c.pause
	for failed := 0; ; {
		wait, err := c.once(ctx, url, f, &at, limit)
		if err == nil {
			return at, nil
		}
		if e := ctx.Err(); e != nil {
			return at, dsec.E(dsec.ClassOf(e), op, url, errors.Join(e, err))
		}
		if dsec.ClassOf(err) != dsec.Unavailable {
			return at, err
		}
		// Only what is new counts: a mirror that begins anew each time may break elsewhere each time.
		if failed++; at > furthest {
			furthest, failed, pause = at, 1, c.pause
		}
		if failed >= tries {
			return at, err
		}
		if wait == 0 {
			wait, pause = pause, 2*pause
		}
		if err := within.Sleep(ctx, wait); err != nil {
			return at, dsec.E(dsec.ClassOf(err), op, url, err)
		}
	}
}

// once asks once, from *at on. It returns how long the mirror asks to wait.
func (c fetcher) once(ctx context.Context, url string, f *os.File, at *int64, limit int64) (time.Duration, error) {
	const op = "fetch"
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	quiet := time.AfterFunc(c.stall, func() { cancel(fmt.Errorf("no byte in %v", c.stall)) })
	defer quiet.Stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, dsec.E(dsec.Invalid, op, url, err)
	}
	req.Header.Set("Accept-Encoding", "identity") // a digest is of the bytes as they are
	req.Header.Set("User-Agent", "dsec")
	if *at > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", *at))
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return 0, dsec.E(dsec.Unavailable, op, url, because(ctx, err))
	}
	defer func() { _ = resp.Body.Close() }()
	switch {
	case resp.StatusCode == http.StatusPartialContent && strings.HasPrefix(resp.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", *at)):
	case resp.StatusCode == http.StatusOK:
		*at = 0
	case resp.StatusCode == http.StatusPartialContent, resp.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		*at = 0 // the file has become another
		return 0, dsec.Errorf(dsec.Unavailable, op, url, "%s for the rest of it", resp.Status)
	default:
		return retryAfter(resp), dsec.Errorf(statusClass(resp.StatusCode), op, url, "%s", resp.Status)
	}
	if resp.ContentLength > limit-*at {
		return 0, refuse(op, url, "it has %d bytes, at most %d", *at+resp.ContentLength, limit)
	}
	if err := f.Truncate(*at); err != nil {
		return 0, diskError(op, url, err)
	}
	body := &capped{resp.Body, limit - *at, refuse(op, url, "it has more than %d bytes", limit)}
	buf := make([]byte, 128<<10)
	for {
		n, readErr := body.Read(buf)
		quiet.Reset(c.stall)
		if _, err := f.WriteAt(buf[:n], *at); err != nil {
			return 0, diskError("write", f.Name(), err)
		}
		*at += int64(n)
		switch {
		case readErr == io.EOF:
			return 0, nil
		case readErr == body.over:
			return 0, readErr
		case readErr != nil:
			return 0, dsec.E(dsec.Unavailable, op, url, because(ctx, readErr))
		}
	}
}

func because(ctx context.Context, err error) error {
	if c := context.Cause(ctx); c != nil {
		return c
	}
	return err
}

func statusClass(status int) dsec.Class {
	switch {
	case status == http.StatusNotFound, status == http.StatusGone:
		return dsec.NotFound
	case status == http.StatusUnauthorized, status == http.StatusForbidden:
		return dsec.PermissionDenied
	case status == http.StatusTooManyRequests, status == http.StatusRequestTimeout, status >= 500:
		return dsec.Unavailable
	}
	return dsec.Invalid
}

func retryAfter(resp *http.Response) time.Duration {
	s, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	if err != nil || s < 0 {
		return 0
	}
	return min(time.Duration(s)*time.Second, longPause)
}
