package iam

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
)

// FileStore keeps keys in one JSON file of mode 0600, replaced atomically.
type FileStore struct {
	Path string

	mu sync.Mutex
}

func (s *FileStore) read() (map[string]json.RawMessage, error) {
	all := map[string]json.RawMessage{}
	b, err := os.ReadFile(s.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return all, nil
	}
	if err != nil {
		return nil, err
	}
	return all, json.Unmarshal(b, &all)
}

// Put implements Store.
func (s *FileStore) Put(_ context.Context, id string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.read()
	if err != nil {
		return err
	}
	all[id] = value
	b, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return replace(s.Path, b)
}

// Load implements Store.
func (s *FileStore) Load(_ context.Context, fn func(id string, value []byte)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.read()
	for id, value := range all {
		fn(id, value)
	}
	return err
}

func replace(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".keys-")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}
