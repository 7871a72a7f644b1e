package bucket

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"iter"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

// leftBehind is how many calls may wait for a file system that does not answer.
// Each holds a thread.
const leftBehind = 128

// aside is where files are written before they have their name. No key begins
// with a dot.
const aside = ".writing"

// dir is a store in a directory. It holds the directory open, so that a mount
// that goes away is not mistaken for an empty store, and nothing in it leads
// outside.
type dir struct {
	root  *os.Root
	path  string
	hands chan struct{}
}

func openDir(ctx context.Context, path string) (blob.Store, error) {
	d := &dir{path: path, hands: make(chan struct{}, leftBehind)}
	root, err := await(ctx, d, func() (*os.Root, error) {
		if err := os.MkdirAll(path, 0o700); err != nil {
			return nil, err
		}
		return os.OpenRoot(path)
	}, func(r *os.Root) { r.Close() })
	if err != nil {
		return nil, classify(openOp, path, err)
	}
	d.root = root
	return d, nil
}

// await does what may never return, and goes on without it when ctx ends. What
// it then still gives is dropped.
func await[T any](ctx context.Context, d *dir, do func() (T, error), drop func(T)) (T, error) {
	type result struct {
		v   T
		err error
	}
	var none T
	if err := ctx.Err(); err != nil {
		return none, notBegun{err}
	}
	select {
	case d.hands <- struct{}{}:
	case <-ctx.Done():
		return none, notBegun{ctx.Err()}
	}
	done := make(chan result, 1)
	go func() {
		v, err := do()
		<-d.hands
		done <- result{v, err}
	}()
	select {
	case r := <-done:
		return r.v, r.err
	case <-ctx.Done():
		go func() {
			if r := <-done; r.err == nil {
				drop(r.v)
			}
		}()
		return none, ctx.Err()
	}
}

// notBegun is the error of what was not even tried.
type notBegun struct{ error }

func (e notBegun) Unwrap() error { return e.error }

func ignore[T any](T) {}

// tidyWithin is how long a call may take to clean up behind itself after its
// context has ended; then it is left behind, too.
const tidyWithin = time.Second

func (d *dir) tidy(ctx context.Context, do func()) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidyWithin)
	defer cancel()
	_, _ = await(ctx, d, func() (struct{}, error) { do(); return struct{}{}, nil }, ignore)
}

func (d *dir) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if err := checkRange(key, off); err != nil {
		return nil, err
	}
	r, err := await(ctx, d, func() (*fileReader, error) {
		// A pipe that somebody put there must not hold us.
		f, err := d.root.OpenFile(key, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return nil, err
		}
		st, err := f.Stat()
		if err == nil && !st.Mode().IsRegular() {
			err = fs.ErrNotExist
		}
		if err != nil {
			f.Close()
			return nil, err
		}
		left := max(0, st.Size()-off)
		if n >= 0 {
			left = min(left, n)
		}
		return &fileReader{d: d, ctx: ctx, f: f, key: key, off: off, left: left}, nil
	}, func(r *fileReader) { r.f.Close() })
	if err != nil {
		return nil, unknown(readOp, key, err)
	}
	return r, nil
}

// unknown: a key that leads through a file, in a circle or out of the directory is
// not there.
func unknown(op, key string, err error) error {
	if errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.EISDIR) || errors.Is(err, syscall.ELOOP) || escapes(err) {
		err = fs.ErrNotExist
	}
	return classify(op, key, withoutPath(err))
}

// escapes says whether os.Root has refused to leave its directory. It has no
// error for that which others can name.
func escapes(err error) bool {
	p, ok := errors.AsType[*fs.PathError](err)
	return ok && p.Err.Error() == "path escapes from parent"
}

// withoutPath: the key is in the error already.
func withoutPath(err error) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err
	}
	if l, ok := errors.AsType[*os.LinkError](err); ok {
		return l.Err
	}
	return err
}

// readAhead is read from a file at one time, into memory of its own: a read
// that was left behind writes into nobody else's.
const readAhead = 256 << 10

type fileReader struct {
	d         *dir
	ctx       context.Context // of Open, which bounds the reading
	f         *os.File
	key       string
	off, left int64
	ahead     []byte
}

func (r *fileReader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if len(r.ahead) == 0 {
		if r.left == 0 {
			return 0, io.EOF
		}
		buf, f, off := make([]byte, min(r.left, readAhead)), r.f, r.off // nor does it look at what is ours
		n, err := await(r.ctx, r.d, func() (int, error) { return f.ReadAt(buf, off) }, ignore)
		if n == 0 {
			if err == io.EOF { // it was made shorter
				err = io.ErrUnexpectedEOF
			}
			return 0, classify(readOp, r.key, withoutPath(err))
		}
		r.off, r.left, r.ahead = r.off+int64(n), r.left-int64(n), buf[:n]
	}
	n := copy(p, r.ahead)
	r.ahead = r.ahead[n:]
	return n, nil
}

// Close of a file that was only read has nothing to report.
func (r *fileReader) Close() error {
	f := r.f
	if f == nil {
		return nil
	}
	r.f, r.left, r.ahead = nil, 0, nil
	r.d.tidy(r.ctx, func() { f.Close() })
	return nil
}

func (d *dir) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	st, err := await(ctx, d, func() (fs.FileInfo, error) { return d.root.Stat(key) }, ignore)
	if err == nil && !st.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return blob.Info{}, unknown(statOp, key, err)
	}
	return blob.Info{Key: key, Size: st.Size(), ModTime: st.ModTime()}, nil
}

func (d *dir) Delete(ctx context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	_, err := await(ctx, d, func() (struct{}, error) {
		st, err := d.root.Lstat(key)
		if err == nil && !st.IsDir() {
			err = d.root.Remove(key)
		}
		return struct{}{}, err
	}, ignore)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil
	}
	if err != nil {
		return classify(deleteOp, key, withoutPath(err))
	}
	return nil
}

func (d *dir) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		start := "."
		if i := strings.LastIndexByte(prefix, '/'); i >= 0 {
			start = prefix[:i]
			if blob.CheckKey(start) != nil {
				return // no key begins with it
			}
		}
		if _, err := d.walk(ctx, start, prefix, yield); err != nil {
			yield(blob.Info{}, unknown(listOp, prefix, err))
		}
	}
}

// walk yields what is below a directory in the order of keys: that of names, a
// directory's with the slash that follows it in the key.
func (d *dir) walk(ctx context.Context, name, prefix string, yield func(blob.Info, error) bool) (more bool, err error) {
	entries, err := await(ctx, d, func() ([]blob.Info, error) { return d.entries(name, prefix) }, ignore)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		if sub, ok := strings.CutSuffix(e.Key, "/"); ok {
			more, err = d.walk(ctx, sub, prefix, yield)
		} else {
			more = yield(e, nil)
		}
		if !more || err != nil {
			return more, err
		}
	}
	return true, nil
}

// entries of a directory that a key with the prefix can be or be in; those of
// directories end in a slash.
func (d *dir) entries(name, prefix string) ([]blob.Info, error) {
	f, err := d.root.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	list, err := f.ReadDir(-1)
	if err != nil {
		return nil, err
	}
	var out []blob.Info
	for _, e := range list {
		key := path.Join(name, e.Name())
		if blob.CheckKey(key) != nil {
			continue
		}
		if e.IsDir() {
			if key += "/"; strings.HasPrefix(key, prefix) || strings.HasPrefix(prefix, key) {
				out = append(out, blob.Info{Key: key})
			}
			continue
		}
		st, err := d.root.Stat(key)
		if err == nil && st.Mode().IsRegular() && strings.HasPrefix(key, prefix) {
			out = append(out, blob.Info{Key: key, Size: st.Size(), ModTime: st.ModTime()})
		} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	slices.SortFunc(out, func(a, b blob.Info) int { return strings.Compare(a.Key, b.Key) })
	return out, nil
}

// Sweep implements blob.Sweeper.
func (d *dir) Sweep(ctx context.Context, age time.Duration) (int, error) {
	before := time.Now().Add(-age)
	n, err := await(ctx, d, func() (n int, err error) {
		f, err := d.root.Open(aside)
		if err != nil {
			return 0, err
		}
		defer f.Close()
		list, err := f.ReadDir(-1)
		for _, e := range list {
			if st, ierr := e.Info(); ierr == nil && st.ModTime().Before(before) && d.root.Remove(path.Join(aside, e.Name())) == nil {
				n++
			}
		}
		return n, err
	}, ignore)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return n, classify(sweepOp, d.path, err)
	}
	return n, nil
}

func (d *dir) Close() error {
	if err := d.root.Close(); err != nil {
		return dsec.E(dsec.Internal, "close blob store", d.path, err)
	}
	return nil
}
