package store

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

var (
	leasePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}$`)
)

// tagFile is the file of a tag. A slash cannot be in a file name, and a tag
// has no "%".
func tagFile(tag string) (string, error) {
	if err := layer.CheckTag(tag); err != nil {
		return "", err
	}
	return path.Join("tags", strings.ReplaceAll(tag, "/", "%")), nil
}

// Tag points a name to a layer that is here. It replaces what the name meant.
func (s *Store) Tag(_ context.Context, tag string, d layer.Digest) error {
	const op = "tag layer"
	file, err := tagFile(tag)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.manifest(d); err != nil {
		return err
	}
	if err := s.writeFile(file, []byte(d+"\n"), true); err != nil {
		return diskError(op, tag, err)
	}
	return nil
}

// Untag removes a name. The layer stays until it is collected.
func (s *Store) Untag(_ context.Context, tag string) error {
	file, err := tagFile(tag)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := os.Remove(s.path(file)); err != nil {
		return diskError("untag layer", tag, err)
	}
	return nil
}

// Tags maps every name to its layer.
func (s *Store) Tags(_ context.Context) (map[string]layer.Digest, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tagsLocked()
}

func (s *Store) tagsLocked() (map[string]layer.Digest, error) {
	files, err := os.ReadDir(s.path("tags"))
	if err != nil {
		return nil, diskError("list tags", s.dir, err)
	}
	tags := map[string]layer.Digest{}
	for _, f := range files {
		tag := strings.ReplaceAll(f.Name(), "%", "/")
		d, err := s.resolveLocked(dsec.LayerRef(tag))
		if err != nil {
			return nil, err
		}
		tags[tag] = d
	}
	return tags, nil
}

// resolveLocked turns a ref into a digest; it need not be here.
func (s *Store) resolveLocked(ref dsec.LayerRef) (layer.Digest, error) {
	const op = "resolve layer"
	if strings.HasPrefix(string(ref), "sha256:") {
		return layer.ParseDigest(string(ref))
	}
	file, err := tagFile(string(ref))
	if err != nil {
		return "", err
	}
	b, err := os.ReadFile(s.path(file))
	if errors.Is(err, fs.ErrNotExist) {
		return "", dsec.Errorf(dsec.NotFound, op, dsec.Quote(string(ref)), "no layer of that name")
	}
	if err != nil {
		return "", diskError(op, string(ref), err)
	}
	return layer.ParseDigest(strings.TrimSuffix(string(b), "\n"))
}
