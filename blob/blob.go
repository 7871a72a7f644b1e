// Package blob is the contract for object storage: whole objects under keys,
// read in ranges, never changed in place.
//
// # Promises
//
// A Put that returns nil is durable, and seen by every Open and Stat that
// starts afterwards; until then, and after a Put that failed or whose writer
// was killed, the key holds what it held before, whole. Delete of an unknown
// key is no error. List is in the order of keys and sees what was there when it
// began. Methods may be called concurrently. A context that ends stops a call,
// and the reading of what Open returned.
//
// Errors are *dsec.Error: NotFound for an unknown key, AlreadyExists for a Put
// with IfAbsent, Invalid for a key that is none, Conflict for one that cannot be
// beside what is there (a file "a" and a key "a/b", on a directory), NoSpace,
// PermissionDenied, Timeout and Canceled for a context that ended, and
// Unavailable for what may work later: throttled, refused, broken off, and a
// bucket that is not there, which is never taken for an unknown key. Objects are
// not verified here: who knows the digest checks it.
//
// Of concurrent Puts with IfAbsent at most one returns nil. If the answer of the
// store is lost, a Put that failed may have written, whole; a second one with
// IfAbsent then says AlreadyExists.
//
// A writer that is killed can leave what no key shows, such as a temporary file
// or the parts of an upload; Sweeper removes it.
//
// Implementations: blob/bucket. Decorators: blob/retry, blob/limit, blob/hedge,
// blob/stall, and blob/stack for all of them in their order. For tests:
// blob/blobtest is the conformance suite, blob/fault breaks a store on purpose,
// blob/s3test is a real S3 server.
package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"regexp"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// Info describes an object.
type Info struct {
	Key     string
	Size    int64 // bytes
	ModTime time.Time
}

// PutOptions say how to write.
type PutOptions struct {
	IfAbsent bool // AlreadyExists if the key is taken
}

// Store is a place for objects.
type Store interface {
	// Open reads n bytes from off; n < 0 reads to the end. Asking for more
	// than there is returns what there is.
	Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error)
	Put(ctx context.Context, key string, r io.Reader, o PutOptions) error
	Stat(ctx context.Context, key string) (Info, error)
	Delete(ctx context.Context, key string) error
	List(ctx context.Context, prefix string) iter.Seq2[Info, error]
	Close() error
}

// Sweeper is the ability of a store in which killed writers leave something.
type Sweeper interface {
	// Sweep removes what writers began and did not touch for age, and says how
	// much it was. Nothing that a key shows is touched.
	Sweep(ctx context.Context, age time.Duration) (int, error)
}

var keyPattern = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$`)

// CheckKey refuses what is no key: parts of letters, digits, "._-", not
// starting with a dot, separated by slashes, 512 bytes at most. So a key is
// also a path that leads nowhere else.
func CheckKey(key string) error {
	if len(key) > 512 || !keyPattern.MatchString(key) {
		return dsec.Errorf(dsec.Invalid, "check key", dsec.Quote(key), "want parts of letters, digits and ._- separated by slashes")
	}
	return nil
}

// ReadAll reads a whole object of at most limit bytes.
func ReadAll(ctx context.Context, s Store, key string, limit int64) ([]byte, error) {
	r, err := s.Open(ctx, key, 0, limit+1)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(r)
	if err = errors.Join(err, r.Close()); err != nil {
		return nil, dsec.E(dsec.ClassOf(err), "read object", key, err)
	}
	if int64(len(b)) > limit {
		return nil, dsec.E(dsec.Corrupt, "read object", key, fmt.Errorf("more than %d bytes", limit))
	}
	return b, nil
}

// PutBytes writes a small object.
func PutBytes(ctx context.Context, s Store, key string, b []byte, o PutOptions) error {
	return s.Put(ctx, key, strings.NewReader(string(b)), o)
}
