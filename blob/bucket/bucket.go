// Package bucket is blob.Store on a directory, S3 or memory, through gocloud.dev.
//
//	file:///var/lib/dsec/store   a directory, which is also how NFS, CephFS, JuiceFS and 3FS are used
//	s3://bucket?region=…         S3 and what speaks it (endpoint=, use_path_style=true)
//	mem://                       for tests
//
// A prefix= in the query puts everything below it.
package bucket

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	gocloud "gocloud.dev/blob"
	"gocloud.dev/blob/fileblob"
	"gocloud.dev/blob/memblob"
	"gocloud.dev/blob/s3blob"
	"gocloud.dev/gcerrors"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/internal/fault"
)

// Bucket implements blob.Store.
type Bucket struct {
	b   *gocloud.Bucket
	dir string // of a file bucket: what is written there must be synced by us
}

var _ blob.Store = (*Bucket)(nil)

// Open opens the bucket a URL names. A directory is made if it is not there.
func Open(ctx context.Context, rawURL string) (*Bucket, error) {
	const op = "open blob store"
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, dsec.E(dsec.Invalid, op, dsec.Quote(rawURL), err)
	}
	q := u.Query()
	prefix := strings.Trim(q.Get("prefix"), "/")
	if prefix != "" {
		if err := blob.CheckKey(prefix); err != nil {
			return nil, err
		}
	}
	q.Del("prefix")
	u.RawQuery = q.Encode()
	b := &Bucket{}
	switch u.Scheme {
	case "file":
		b.dir = filepath.Join(u.Path, filepath.FromSlash(prefix))
		if !filepath.IsAbs(u.Path) || u.Host != "" || len(q) > 0 {
			return nil, dsec.Errorf(dsec.Invalid, op, dsec.Quote(rawURL), "want file:///absolute/path")
		}
		b.b, err = fileblob.OpenBucket(b.dir, &fileblob.Options{CreateDir: true, NoTempDir: true, Metadata: fileblob.MetadataDontWrite, DirFileMode: 0o700})
		prefix = ""
	case "s3":
		b.b, err = (&s3blob.URLOpener{}).OpenBucketURL(ctx, u)
	case "mem":
		b.b = memblob.OpenBucket(nil)
	default:
		return nil, dsec.Errorf(dsec.Invalid, op, dsec.Quote(rawURL), "want file, s3 or mem")
	}
	if err != nil {
		return nil, classify(op, rawURL, err)
	}
	if prefix != "" {
		b.b = gocloud.PrefixedBucket(b.b, prefix+"/")
	}
	return b, nil
}

// Open implements blob.Store.
func (b *Bucket) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if err := blob.CheckKey(key); err != nil {
		return nil, err
	}
	r, err := b.b.NewRangeReader(ctx, key, off, n, nil)
	if err != nil {
		return nil, classify("read object", key, err)
	}
	return &reader{r, key}, nil
}

type reader struct {
	*gocloud.Reader
	key string
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = classify("read object", r.key, err)
	}
	return n, err
}

// Put implements blob.Store.
func (b *Bucket) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	const op = "write object"
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	// Cancelling is how a write is given up: Close alone would publish it.
	wctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w, err := b.b.NewWriter(wctx, key, &gocloud.WriterOptions{IfNotExist: o.IfAbsent, ContentType: "application/octet-stream"})
	if err != nil {
		return classify(op, key, err)
	}
	if _, err := io.Copy(w, r); err != nil {
		cancel()
		_ = w.Close() // reports the cancellation
		return classify(op, key, err)
	}
	if err := w.Close(); err != nil {
		return classify(op, key, err)
	}
	if b.dir == "" {
		return nil
	}
	if err := syncFile(b.dir, key); err != nil {
		return classify(op, key, err)
	}
	return nil
}

// syncFile makes a file and the names that lead to it durable.
func syncFile(dir, key string) error {
	for p := filepath.Join(dir, filepath.FromSlash(key)); len(p) >= len(dir); p = filepath.Dir(p) {
		f, err := os.Open(p)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// Stat implements blob.Store.
func (b *Bucket) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	a, err := b.b.Attributes(ctx, key)
	if err != nil {
		return blob.Info{}, classify("stat object", key, err)
	}
	return blob.Info{Key: key, Size: a.Size, ModTime: a.ModTime}, nil
}

// Delete implements blob.Store.
func (b *Bucket) Delete(ctx context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	err := b.b.Delete(ctx, key)
	if err != nil && gcerrors.Code(err) != gcerrors.NotFound {
		return classify("delete object", key, err)
	}
	return nil
}

// List implements blob.Store.
func (b *Bucket) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		it := b.b.List(&gocloud.ListOptions{Prefix: prefix})
		for {
			o, err := it.Next(ctx)
			if err == io.EOF {
				return
			}
			if err != nil {
				yield(blob.Info{}, classify("list objects", prefix, err))
				return
			}
			if blob.CheckKey(o.Key) != nil {
				continue // not written by us
			}
			if !yield(blob.Info{Key: o.Key, Size: o.Size, ModTime: o.ModTime}, nil) {
				return
			}
		}
	}
}

// Close implements blob.Store.
func (b *Bucket) Close() error { return b.b.Close() }

func classify(op, object string, err error) error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	_, isNet := errors.AsType[*net.OpError](err)
	class := fault.Class(err, "")
	switch {
	case class != "":
	case isNet, errors.Is(err, io.ErrUnexpectedEOF):
		class = dsec.Unavailable
	default:
		class = ofCode(gcerrors.Code(err), dsec.Internal)
	}
	return dsec.E(class, op, object, fmt.Errorf("%w", err))
}

func ofCode(c gcerrors.ErrorCode, other dsec.Class) dsec.Class {
	switch c {
	case gcerrors.NotFound:
		return dsec.NotFound
	case gcerrors.FailedPrecondition, gcerrors.AlreadyExists:
		return dsec.AlreadyExists
	case gcerrors.PermissionDenied:
		return dsec.PermissionDenied
	case gcerrors.ResourceExhausted, gcerrors.Unknown:
		return dsec.Unavailable
	case gcerrors.InvalidArgument:
		return dsec.Invalid
	}
	return other
}
