// Package bucket is blob.Store on a directory, on S3 or in memory.
//
//	file:///srv/dsec/blobs       a directory, which is also how NFS, CephFS, JuiceFS and 3FS are used
//	s3://bucket/prefix?region=…  S3 and what speaks it
//	mem://                       for tests
//
// # S3
//
// Everything is below the prefix. The query takes
//
//	endpoint=http://host:port  another server than Amazon's
//	region=eu-central-1        default: what the AWS configuration says; with an endpoint, us-east-1
//	path_style=true            the bucket in the path and not in the host name; the default with an endpoint
//	profile=name               of the AWS configuration
//	credentials=/path          a file as ~/.aws/credentials
//
// and nothing else. Credentials come from where the AWS SDK takes them:
// environment, files, or the machine's role; never from the URL, which is logged.
// They need s3:GetObject, PutObject, DeleteObject, ListBucket, AbortMultipartUpload
// and ListBucketMultipartUploads. Without ListBucket S3 says "forbidden" where it
// would say "not found".
//
// Reading and listing are gocloud.dev's; writing is ours, because an upload that
// is given up must take its parts with it. Objects of more than 8 MiB
// are written in parts. Each request is tried once (parts of an upload, four
// times): trying again is what blob/retry is for.
//
// # Directory
//
// One file for each object. A file is written aside, synced, and then given its
// name in one step, so that a writer that is killed changes nothing and a crash of
// the machine leaves no half of an object. IfAbsent holds among all machines that
// share the directory. A file system that does not answer delays nobody longer
// than its context: the call is left behind, up to a bounded number of them.
package bucket

import (
	"context"
	"fmt"
	"io"
	"iter"
	"net/url"
	"path"
	"strings"

	gocloud "gocloud.dev/blob"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

const openOp = "open blob store"

// Open opens the store that a URL names. A directory is made if it is not
// there; S3 is not asked anything yet, so that a server which is away now can be
// used later.
func Open(ctx context.Context, rawURL string) (blob.Store, error) {
	u, err := parse(rawURL)
	if err != nil {
		return nil, err
	}
	switch u.Scheme {
	case "file":
		return openDir(ctx, u.Path)
	case "s3":
		return openS3(ctx, u)
	}
	return &memory{objects: map[string]memObject{}}, nil
}

// Check says whether a URL can name a store, without touching anything.
func Check(rawURL string) error {
	_, err := parse(rawURL)
	return err
}

// parse never quotes what it was given: somebody may have put a password there.
func parse(rawURL string) (*url.URL, error) {
	bad := func(format string, args ...any) (*url.URL, error) {
		return nil, dsec.Errorf(dsec.Invalid, openOp, "", format, args...)
	}
	u, err := url.Parse(rawURL)
	if err != nil {
		return bad("no URL: want file:///path or s3://bucket/prefix")
	}
	if u.User != nil {
		return bad("credentials do not belong into a URL: use the environment, or credentials=/path/of/a/file")
	}
	q, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return bad("the query after ? cannot be read")
	}
	switch u.Scheme {
	case "file":
		if !path.IsAbs(u.Path) || u.Host != "" || len(q) > 0 {
			return bad("want file:///absolute/path")
		}
		u.Path = path.Clean(u.Path)
		return u, nil
	case "mem":
		if u.Host != "" || u.Path != "" || len(q) > 0 {
			return bad("want mem://")
		}
		return u, nil
	case "s3":
		return u, checkS3(u, q)
	}
	return bad("want file:///path or s3://bucket/prefix")
}

// bucket is the reading half of a store, through gocloud.dev.
type bucket struct {
	b *gocloud.Bucket
}

func (b *bucket) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if err := checkRange(key, off); err != nil {
		return nil, err
	}
	r, err := b.b.NewRangeReader(ctx, key, off, n, nil)
	if beyondEnd(err) {
		return io.NopCloser(strings.NewReader("")), nil
	}
	if err != nil {
		return nil, classify(readOp, key, err)
	}
	return &reader{r, key}, nil
}

func checkRange(key string, off int64) error {
	if off < 0 {
		return dsec.Errorf(dsec.Invalid, readOp, key, "offset %d", off)
	}
	return blob.CheckKey(key)
}

// reader hides that gocloud's can write itself, past the classes of errors.
type reader struct {
	r   *gocloud.Reader
	key string
}

func (r *reader) Close() error { return r.r.Close() }

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if err != nil && err != io.EOF {
		err = classify(readOp, r.key, err)
	}
	return n, err
}

func (b *bucket) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	a, err := b.b.Attributes(ctx, key)
	if err != nil {
		return blob.Info{}, classify(statOp, key, err)
	}
	return blob.Info{Key: key, Size: a.Size, ModTime: a.ModTime}, nil
}

func (b *bucket) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		it := b.b.List(&gocloud.ListOptions{Prefix: prefix})
		for {
			o, err := it.Next(ctx)
			if err == io.EOF {
				return
			}
			if err != nil {
				yield(blob.Info{}, classify(listOp, prefix, err))
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

func (b *bucket) Close() error {
	if err := b.b.Close(); err != nil {
		return fmt.Errorf("close blob store: %w", err)
	}
	return nil
}
