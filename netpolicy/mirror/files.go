package mirror

import (
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/subtle"
	"encoding/hex"
	"hash"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

// digest is what a file has to have.
type digest struct {
	kind string // "sha256", "sha384", "sha512", "sha1"; "": nobody says
	hex  string
}

func (d digest) new() hash.Hash {
	switch d.kind {
	case "sha512":
		return sha512.New()
	case "sha384":
		return sha512.New384()
	case "sha1":
		return sha1.New()
	}
	return sha256.New()
}

func (d digest) is(sum []byte) bool {
	return d.kind == "" || subtle.ConstantTimeCompare([]byte(d.hex), []byte(hex.EncodeToString(sum))) == 1
}

// file is one to serve, which may be seen.
type file struct {
	at          *url.URL
	digest      digest
	contentType string
}

// key has the digest if there is one, so that what is kept under it is that.
func (f *file) key() string {
	if f.digest.kind != "" {
		return "file " + f.digest.kind + ":" + f.digest.hex
	}
	return "file " + f.at.String()
}

// download is a file that comes, for all who ask for it meanwhile.
type download struct {
	file    file
	started chan struct{} // closed when draft or err is set, and size
	draft   *draft        // nil with err; open until the last reader is done
	size    int64         // -1: not known

	mu      sync.Mutex
	more    chan struct{} // closed when there is more, or the end
	written int64
	ended   bool
	err     error
	readers int
}

// serveFile gives a file from the cache, or as it comes. The last byte of one that
// comes is held back until the digest of all is right.
func (m *Mirror) serveFile(q *request, f file) error {
	q.w.Header().Set("Content-Type", f.contentType)
	q.w.Header().Set("X-Content-Type-Options", "nosniff")
	for range 2 {
		e, corrupt := m.cache.get(f.key())
		if corrupt {
			m.count(&m.stats.Corrupt)
		}
		if e != nil {
			m.count(&m.stats.Hits)
			defer func() { _ = e.Close() }()
			http.ServeContent(q.w, q.r, "", time.Time{}, e)
			return nil
		}
		d, r, err := m.join(q.r.Context(), f)
		if err != nil {
			return err
		}
		err = d.serve(q, r, q.r.Method == http.MethodHead || q.r.Header.Get("Range") != "")
		if err == errWhole {
			continue // it is in the cache by now
		}
		if dsec.ClassOf(err) == dsec.NoSpace {
			break
		}
		return err
	}
	return m.pass(q, f)
}

// join finds the download of a file, or begins it.
func (m *Mirror) join(ctx context.Context, f file) (*download, *reader, error) {
	key := f.key()
	leave, err := m.place(ctx, func(s *sandbox) chan struct{} { return s.files })
	if err != nil {
		return nil, nil, err
	}
	defer func() { leave() }() // with the lock released
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.files[key]
	if d == nil {
		d = &download{file: f, started: make(chan struct{}), more: make(chan struct{}), readers: 1}
		m.files[key] = d
		end := leave
		leave = func() {}
		m.work.Go(func() {
			defer end()
			err := m.fill(d)
			m.mu.Lock()
			delete(m.files, key)
			m.mu.Unlock()
			d.end(err)
		})
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.readers++
	return d, &reader{d: d}, nil
}

// fill downloads. Its draft is committed, or taken away.
func (m *Mirror) fill(d *download) error {
	begin := sync.OnceFunc(func() { close(d.started) })
	defer begin()
	ctx, cancel := context.WithTimeout(m.ctx, maxFileTime)
	defer cancel()
	resp, r, done, err := m.body(ctx, d.file.at, http.Header{"Accept-Encoding": {"identity"}})
	if err != nil {
		return err
	}
	defer done()
	m.count(&m.stats.Misses)
	d.size = resp.ContentLength
	if err := m.fits(&d.file, resp); err != nil {
		return err
	}
	if d.draft = m.cache.create(max(d.size, 0)); d.draft == nil {
		return dsec.Errorf(dsec.NoSpace, "keep file", d.file.at.Redacted(), "no room in the cache")
	}
	again, err := os.Open(d.draft.Name()) // readers read from one that outlives the draft
	if err != nil {
		m.cache.discard(d.draft)
		return dsec.E(dsec.NoSpace, "keep file", d.file.at.Redacted(), err)
	}
	w := d.draft
	d.draft = &draft{File: again}
	begin()
	own, content := d.file.digest.new(), sha256.New()
	n, err := copyFile(r, m.c.MaxFile, func(b []byte) error {
		_, _ = own.Write(b)
		_, _ = content.Write(b)
		if err := m.cache.write(w, b); err != nil {
			return err
		}
		d.grow(len(b))
		return nil
	})
	if err == nil {
		err = m.verify(&d.file, own.Sum(nil), n, d.size)
	}
	if err != nil {
		m.cache.discard(w)
		return m.explain(d.file.at, err)
	}
	return m.cache.commit(w, footer{Key: d.file.key(), Size: n, SHA256: hex.EncodeToString(content.Sum(nil))})
}

// fits says whether an answer can be the file.
func (m *Mirror) fits(f *file, resp *http.Response) error {
	if resp.ContentLength > m.c.MaxFile {
		return dsec.Errorf(dsec.Unavailable, "get file", f.at.Redacted(), "%d bytes, at most %d", resp.ContentLength, m.c.MaxFile)
	}
	if e := resp.Header.Get("Content-Encoding"); e != "" && e != "identity" {
		return dsec.Errorf(dsec.Unavailable, "get file", f.at.Redacted(), "it comes packed (%s)", dsec.Quote(e))
	}
	return nil
}

func (m *Mirror) verify(f *file, sum []byte, n, size int64) error {
	const op = "verify file"
	if size >= 0 && n != size {
		return dsec.Errorf(dsec.Corrupt, op, f.at.Redacted(), "%d bytes of %d", n, size)
	}
	if !f.digest.is(sum) {
		m.count(&m.stats.Corrupt)
		return dsec.Errorf(dsec.Corrupt, op, f.at.Redacted(), "%s is %x, the index says %s", f.digest.kind, sum, f.digest.hex)
	}
	return nil
}

// copyFile is io.Copy of at most most bytes.
func copyFile(r io.Reader, most int64, write func([]byte) error) (n int64, err error) {
	buf := make([]byte, 64<<10)
	for {
		k, err := r.Read(buf)
		if n += int64(k); n > most {
			return n, dsec.Errorf(dsec.Unavailable, "get file", "", "more than %d bytes", most)
		}
		if k > 0 {
			if err := write(buf[:k]); err != nil {
				return n, err
			}
		}
		if err == io.EOF {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

func (d *download) grow(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.written += int64(n)
	close(d.more)
	d.more = make(chan struct{})
}

func (d *download) end(err error) {
	d.mu.Lock()
	d.ended, d.err = true, err
	close(d.more)
	d.mu.Unlock()
	d.leave()
}

// leave closes the file with the last who has it.
func (d *download) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.readers--; d.readers == 0 && d.draft != nil {
		_ = d.draft.Close()
	}
}

// available waits for what is beyond at. All but the last byte may be read before
// the end is known to be good.
func (d *download) available(ctx context.Context, at int64) (n int64, ended bool, err error) {
	for {
		d.mu.Lock()
		n, ended, err = d.written-at, d.ended, d.err
		more := d.more
		d.mu.Unlock()
		if err != nil || ended {
			return n, ended, err
		}
		if n--; n > 0 {
			return n, false, nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return 0, false, ctx.Err()
		}
	}
}

// reader is one client of a download.
type reader struct {
	d  *download
	at int64
}

// errWhole says that a download is complete, and nothing of it was given.
const errWhole = whole("complete")

type whole string

func (w whole) Error() string { return string(w) }

// serve gives a download as it comes; one of which only a part is asked for, when
// it is complete. With NoSpace nothing was given.
func (d *download) serve(q *request, r *reader, complete bool) error {
	defer d.leave()
	ctx := q.r.Context()
	if complete {
		for at := int64(0); ; {
			n, ended, err := d.available(ctx, at)
			if err != nil {
				return err
			}
			if ended {
				return errWhole
			}
			at += n
		}
	}
	select {
	case <-d.started:
	case <-ctx.Done():
		return ctx.Err()
	}
	begun := false
	for {
		n, ended, err := d.available(ctx, r.at)
		if err != nil && begun {
			return http.ErrAbortHandler
		}
		if err != nil {
			return err
		}
		if !begun {
			if d.size >= 0 {
				q.w.Header().Set("Content-Length", strconv.FormatInt(d.size, 10))
			}
			begun = true
		}
		if _, err := io.Copy(q.w, io.NewSectionReader(d.draft, r.at, n)); err != nil {
			return http.ErrAbortHandler
		}
		if r.at += n; ended {
			return nil
		}
	}
}

// pass gives a file that is not kept.
func (m *Mirror) pass(q *request, f file) error {
	resp, r, done, err := m.body(q.r.Context(), f.at, http.Header{"Accept-Encoding": {"identity"}})
	if err != nil {
		return err
	}
	defer done()
	if err := m.fits(&f, resp); err != nil {
		return err
	}
	if resp.ContentLength >= 0 {
		q.w.Header().Set("Content-Length", strconv.FormatInt(resp.ContentLength, 10))
	}
	if q.r.Method == http.MethodHead {
		return nil
	}
	sum, last := f.digest.new(), []byte(nil)
	n, err := copyFile(r, m.c.MaxFile, func(b []byte) error {
		_, _ = sum.Write(b)
		out := append(last, b[:len(b)-1]...)
		last = []byte{b[len(b)-1]}
		_, err := q.w.Write(out)
		return err
	})
	if err == nil {
		err = m.verify(&f, sum.Sum(nil), n, resp.ContentLength)
	}
	if err == nil {
		_, err = q.w.Write(last)
	}
	if err != nil {
		m.warn("file not passed on", "at", f.at.Redacted(), "err", err)
		return http.ErrAbortHandler
	}
	return nil
}
