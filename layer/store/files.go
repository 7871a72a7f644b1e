package store

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// writeFile puts content under the name in one step: whoever reads the name
// sees the old content or the new, also when this program is killed. With
// durable, also after a power failure.
func (s *Store) writeFile(name string, content []byte, durable bool) error {
	f, err := os.CreateTemp(s.path("tmp"), "file-*")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil && durable {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), s.path(name))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	if !durable {
		return nil
	}
	return syncFile(filepath.Dir(s.path(name)))
}

// readOptional reads a file of the store; nil if there is none.
func (s *Store) readOptional(parts ...string) ([]byte, error) {
	b, err := os.ReadFile(s.path(parts...))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

// syncFile makes a file, or the names in a directory, durable.
func syncFile(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
