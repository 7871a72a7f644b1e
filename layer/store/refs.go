package store

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// reference notes what an OCI reference meant when it was last resolved. It is
// everybody's: the credentials it was resolved with are the machine's.
type reference struct {
	Version  int          `json:"version"`
	Ref      string       `json:"ref"` // its whole name
	Platform string       `json:"platform,omitempty"`
	Stack    layer.Digest `json:"stack"`
	At       time.Time    `json:"at"`
}

func refKey(name, platform string) string {
	return noteKey("dsec ref\n" + name + "\n" + platform + "\n")
}

func (s *Store) loadRefs() error {
	files, err := os.ReadDir(s.path("refs"))
	if err != nil {
		return err
	}
	for _, f := range files {
		b, err := os.ReadFile(s.path("refs", f.Name()))
		if err != nil {
			return err
		}
		var r reference
		if err = json.Unmarshal(b, &r); err == nil && r.Version != 1 {
			err = fmt.Errorf("version %d", r.Version)
		}
		if err == nil {
			_, err = layer.ParseDigest(string(r.Stack))
		}
		if err != nil { // it is resolved again when it is asked for
			s.opts.Log.Warn("note of a reference is not read", "file", f.Name(), "error", err)
			continue
		}
		s.refs[f.Name()] = r
	}
	return nil
}

// setRef notes what a reference means now.
func (s *Store) setRef(name, platform string, d layer.Digest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.setRefLocked(name, platform, d, time.Now())
}

func (s *Store) setRefLocked(name, platform string, d layer.Digest, at time.Time) error {
	r := reference{Version: 1, Ref: name, Platform: platform, Stack: d, At: at.UTC()}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	key := refKey(name, platform)
	if err := s.writeFile(filepath.Join("refs", key), append(b, '\n'), true); err != nil {
		return err
	}
	s.refs[key] = r
	return nil
}

// refLocked finds what a reference meant when it was last resolved.
func (s *Store) refLocked(source string, opts image.Options) (reference, bool) {
	name, err := image.ReferenceName(source, opts)
	if err != nil {
		return reference{}, false
	}
	r, ok := s.refs[refKey(name, opts.Platform)]
	return r, ok
}

// forgetRefs drops the notes of a reference, for every platform.
func (s *Store) forgetRefs(source string) (stacks []layer.Digest, err error) {
	name, err := image.ReferenceName(source, image.Options{})
	if err != nil {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, r := range s.refs {
		if r.Ref != name {
			continue
		}
		if err := os.Remove(s.path("refs", key)); err != nil {
			return stacks, diskError("forget image", source, err)
		}
		delete(s.refs, key)
		stacks = append(stacks, r.Stack)
	}
	return stacks, nil
}
