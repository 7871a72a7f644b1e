package debian

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// Cache keeps files by their SHA-256 in a directory:
//
//	files/<hex>   what has this digest, whole, or is damaged
//	dates/<hex>   the newest Date that was seen of a suite
//	tmp-*         what is being written
//
// A file is compared with its name each time it is asked for; one that is
// damaged is removed, as if it had never been there.
type Cache struct{ Dir string }

// Path returns the file with this digest. not_found if there is none.
func (c Cache) Path(sum string) (string, error) {
	name := filepath.Join(c.Dir, "files", sum)
	f, err := os.Open(name)
	if err != nil {
		return "", dsec.E(dsec.NotFound, "open cached file", name, err)
	}
	defer func() { _ = f.Close() }()
	got, err := sumOf(f)
	if err != nil || got == sum {
		if err != nil {
			err = dsec.E(dsec.Internal, "read cached file", name, err)
		}
		return name, err
	}
	if err := os.Remove(name); err != nil {
		return "", dsec.E(dsec.Internal, "remove damaged file", name, err)
	}
	return "", dsec.Errorf(dsec.NotFound, "open cached file", name, "it was damaged: its digest is %s", got)
}

func sumOf(r io.Reader) (string, error) {
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// fill puts what get writes into the cache, if it is what was promised. The
// name appears when all of it is on the disk.
func (c Cache) fill(ctx context.Context, want promise, object string, get func(context.Context, *os.File) error) (string, error) {
	f, err := c.temp("files")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.Remove(f.Name()); _ = f.Close() }()
	if err := get(ctx, f); err != nil {
		return "", err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", dsec.E(dsec.Internal, "read", f.Name(), err)
	}
	if st, err := f.Stat(); err != nil || st.Size() != want.size {
		return "", refuse("check", object, "not the %d bytes that were promised (%w)", want.size, sizeIs(st, err))
	}
	got, err := sumOf(f)
	if err != nil {
		return "", dsec.E(dsec.Internal, "read", f.Name(), err)
	}
	if got != want.sum {
		return "", refuse("check", object, "its digest is %s, not %s", got, want.sum)
	}
	name := filepath.Join(c.Dir, "files", want.sum)
	return name, keep(f, name)
}

func sizeIs(st os.FileInfo, err error) error {
	if err != nil {
		return err
	}
	return fmt.Errorf("it has %d", st.Size())
}

func (c Cache) temp(dir string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Join(c.Dir, dir), 0o755); err != nil {
		return nil, diskError("make cache", c.Dir, err)
	}
	f, err := os.CreateTemp(c.Dir, "tmp-")
	if err != nil {
		return nil, diskError("make cache", c.Dir, err)
	}
	return f, nil
}

// keep gives a file that was written its name, for good.
func keep(f *os.File, name string) error {
	dir, err := os.Open(filepath.Dir(name))
	if err != nil {
		return diskError("write", name, err)
	}
	defer func() { _ = dir.Close() }()
	if err := errors.Join(f.Chmod(0o444), f.Sync()); err != nil {
		return diskError("write", name, err)
	}
	if err := os.Rename(f.Name(), name); err != nil {
		return diskError("write", name, err)
	}
	if err := dir.Sync(); err != nil {
		return diskError("write", name, err)
	}
	return nil
}

// Sweep removes what writers left that were killed. Only who holds the lock of
// the directory may ask for it.
func (c Cache) Sweep() error {
	left, err := filepath.Glob(filepath.Join(c.Dir, "tmp-*"))
	if err != nil {
		return dsec.E(dsec.Invalid, "sweep cache", c.Dir, err)
	}
	for _, name := range left {
		if err := os.RemoveAll(name); err != nil {
			return dsec.E(dsec.Internal, "sweep cache", c.Dir, err)
		}
	}
	return nil
}

// notOlder refuses a state of a suite that is older than one that was seen, and
// remembers it if it is newer.
func (c Cache) notOlder(key, object string, date time.Time) error {
	sum := sha256.Sum256([]byte(key))
	name := filepath.Join(c.Dir, "dates", hex.EncodeToString(sum[:]))
	if text, err := os.ReadFile(name); err == nil {
		if seen, err := time.Parse(time.RFC3339, strings.TrimSpace(string(text))); err == nil {
			if date.Before(seen) {
				return refuse("check", object, "it is of %s, and one of %s was there before", date.Format(time.RFC3339), seen.Format(time.RFC3339))
			}
			if date.Equal(seen) {
				return nil
			}
		}
	}
	f, err := c.temp("dates")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()); _ = f.Close() }()
	if _, err := f.WriteString(date.UTC().Format(time.RFC3339) + "\n"); err != nil {
		return diskError("write", name, err)
	}
	return keep(f, name)
}
