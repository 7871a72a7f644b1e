package store

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// tagFile is the file of a tag. A slash cannot be in a file name, and a tag
// has no "%".
func tagFile(tag string) (string, error) {
	if err := layer.CheckTag(tag); err != nil {
		return "", err
	}
	return path.Join("tags", strings.ReplaceAll(tag, "/", "%")), nil
}

// tagged is what a tag says.
type tagged struct {
	digest  layer.Digest
	project string    // whose it is; "": nobody's
	expires time.Time // zero: never
}

func (t tagged) encode() []byte {
	b := []byte(t.digest + "\n")
	if t.project != "" || !t.expires.IsZero() {
		b = append(b, t.project+"\n"...)
	}
	if !t.expires.IsZero() {
		b = append(b, t.expires.UTC().Format(time.RFC3339)+"\n"...)
	}
	return b
}

func decodeTagged(b []byte) (t tagged, err error) {
	lines := strings.Split(string(b), "\n")
	if len(lines) > 1 {
		t.project = lines[1]
	}
	if len(lines) > 2 && lines[2] != "" {
		if t.expires, err = time.Parse(time.RFC3339, lines[2]); err != nil {
			return t, err
		}
	}
	t.digest, err = layer.ParseDigest(lines[0])
	return t, err
}

// sees tells whether a tag of a project exists for this view.
func (s *Store) sees(project string) bool {
	return s.project == "" || project == "" || project == s.project
}

// MayTag says whether this view may make a name mean something, so that a long
// work for it is not begun in vain.
func (s *Store) MayTag(tag string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mayTagLocked(tag)
}

func (s *Store) mayTagLocked(tag string) error {
	t, err := s.readTagLocked(tag)
	switch {
	case dsec.ClassOf(err) == dsec.NotFound:
		return nil
	case err != nil || s.project == "" || t.project == s.project:
		return err
	}
	return dsec.Errorf(dsec.PermissionDenied, "tag layer", dsec.Quote(tag), "the tag is not of project %s", s.project)
}

// Tag points a name to a layer or stack that is here. It replaces what the name meant,
// and whose it was.
func (s *Store) Tag(_ context.Context, tag string, d layer.Digest) error {
	return s.tagUntil(tag, d, time.Time{})
}

// tagUntil is Tag of a name that goes by itself; a zero time is never.
func (s *Store) tagUntil(tag string, d layer.Digest, expires time.Time) error {
	const op = "tag layer"
	file, err := tagFile(tag)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.mayTagLocked(tag); err != nil {
		return err
	}
	if _, ok := s.stacks[d]; !ok {
		if _, err := s.manifest(d); err != nil {
			return err
		}
	}
	if err := s.writeFile(file, tagged{d, s.project, expires}.encode(), true); err != nil {
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
	if err := s.mayTagLocked(tag); err != nil {
		return err
	}
	if err := os.Remove(s.path(file)); err != nil {
		return diskError("untag layer", tag, err)
	}
	return nil
}

// expireTags removes the names whose time is over.
func (s *Store) expireTags(ctx context.Context, now time.Time, dry bool) error {
	s.mu.Lock()
	all, err := s.tagsLocked()
	s.mu.Unlock()
	if err != nil {
		return err
	}
	for tag, t := range all {
		if t.expires.IsZero() || now.Before(t.expires) || dry {
			continue
		}
		if err := s.Untag(ctx, tag); err != nil && dsec.ClassOf(err) != dsec.NotFound {
			return err
		}
	}
	return nil
}

// Tags maps every name this view sees to its layer.
func (s *Store) Tags(_ context.Context) (map[string]layer.Digest, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.tagsLocked()
	tags := map[string]layer.Digest{}
	for tag, t := range all {
		if s.sees(t.project) {
			tags[tag] = t.digest
		}
	}
	return tags, err
}

// tagsLocked maps every name there is.
func (s *Store) tagsLocked() (map[string]tagged, error) {
	files, err := os.ReadDir(s.path("tags"))
	if err != nil {
		return nil, diskError("list tags", s.dir, err)
	}
	tags := map[string]tagged{}
	for _, f := range files {
		tag := strings.ReplaceAll(f.Name(), "%", "/")
		t, err := s.readTagLocked(tag)
		if err != nil {
			return nil, err
		}
		tags[tag] = t
	}
	return tags, nil
}

func (s *Store) readTagLocked(tag string) (tagged, error) {
	const op = "resolve layer"
	file, err := tagFile(tag)
	if err != nil {
		return tagged{}, err
	}
	b, err := os.ReadFile(s.path(file))
	if errors.Is(err, fs.ErrNotExist) {
		return tagged{}, dsec.Errorf(dsec.NotFound, op, dsec.Quote(tag), "no image or layer of that name%s", elsewhere(tag))
	}
	if err != nil {
		return tagged{}, diskError(op, tag, err)
	}
	return decodeTagged(b)
}

// elsewhere says where to look for a name that means nothing: in the list, or
// in the registry that a short name means to those who come from docker.
func elsewhere(ref string) string {
	text := "; dsec layer ls shows what there is"
	if _, err := image.ReferenceName(ref, image.Options{}); err != nil || hasRegistry(ref) {
		return text
	}
	whole := "docker.io/" + ref
	if !strings.Contains(ref, "/") {
		whole = "docker.io/library/" + ref
	}
	return text + ", " + whole + " is the form that pulls"
}

// resolveLocked turns a ref into a digest; it need not be here.
func (s *Store) resolveLocked(ref dsec.LayerRef) (layer.Digest, error) {
	if strings.HasPrefix(string(ref), "sha256:") {
		return layer.ParseDigest(string(ref))
	}
	t, err := s.readTagLocked(string(ref))
	if err != nil || !s.sees(t.project) {
		if r, ok := s.refLocked(string(ref), image.Options{}); ok {
			return r.Stack, nil
		}
	}
	if err == nil && !s.sees(t.project) {
		err = dsec.Errorf(dsec.NotFound, "resolve layer", dsec.Quote(string(ref)), "no image or layer of that name in project %s%s", s.project, elsewhere(string(ref)))
	}
	return t.digest, err
}
