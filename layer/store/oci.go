package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/layer"
)

// converterVersion counts changes of what the converter makes of the same
// layer; with another number everything is converted again.
const converterVersion = 1

// converted notes what became of an OCI layer, docs/formats/stack.md.
type converted struct {
	Version int          `json:"version"`
	Layer   layer.Digest `json:"layer,omitempty"` // "": nothing was in it
	Loose   bool         `json:"loose,omitempty"`
}

const maxNote = 4 << 10 // bytes

func noteKey(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// layerNote is the key of an OCI layer by the digest of its blob or content.
func layerNote(digest string, opts image.Options) string {
	said, err := json.Marshal(image.Options{UserXattr: opts.UserXattr, Loose: true}) // what makes other bytes
	if err != nil {                                                                  // plain data
		panic(err)
	}
	return noteKey(fmt.Sprintf("dsec oci layer %d\n%s\n%s\n", converterVersion, digest, said))
}

// settledNote is the key of a loose layer on others.
func settledNote(loose layer.Digest, below []layer.Digest) string {
	var b bytes.Buffer
	fmt.Fprintf(&b, "dsec oci settled %d\n%s\n", converterVersion, loose)
	for _, d := range below {
		fmt.Fprintf(&b, "%s\n", d)
	}
	return noteKey(b.String())
}

func decodeNote(b []byte) (converted, error) {
	var c converted
	err := json.Unmarshal(b, &c)
	if err == nil && c.Version != 1 {
		err = fmt.Errorf("version %d", c.Version)
	}
	if err == nil && c.Layer != "" {
		_, err = layer.ParseDigest(string(c.Layer))
	}
	return c, err
}

// note writes what became of a layer, here.
func (s *Store) note(key string, c converted) error {
	c.Version = 1
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return s.writeFile(filepath.Join("oci", key), append(b, '\n'), true)
}

// notedHere reads a note of this machine; false if there is none that can be read.
func (s *Store) notedHere(key string) (converted, bool) {
	b, err := os.ReadFile(s.path("oci", key))
	if err != nil {
		return converted{}, false
	}
	c, err := decodeNote(b)
	return c, err == nil
}

// noted finds what became of a layer, with the layer made whole here; false if
// it has to be made. What cannot be read is made again.
func (s *Store) noted(ctx context.Context, keys ...string) (converted, bool, error) {
	for _, key := range keys {
		if c, ok := s.notedHere(key); ok && s.whole(ctx, c.Layer) == nil {
			s.shareOnce(c, key)
			return c, true, nil
		}
		if s.opts.Blobs == nil {
			continue
		}
		b, err := blob.ReadAll(ctx, s.opts.Blobs, "oci/"+key, maxNote)
		if err != nil {
			if dsec.ClassOf(err) == dsec.NotFound {
				continue
			}
			return converted{}, false, err
		}
		c, err := decodeNote(b)
		if err != nil {
			s.opts.Log.Warn("note of a converted layer is not read", "key", key, "error", err)
			continue
		}
		if err := s.whole(ctx, c.Layer); err != nil {
			if dsec.ClassOf(err) == dsec.NotFound || dsec.ClassOf(err) == dsec.Corrupt {
				continue
			}
			return converted{}, false, err
		}
		return c, true, s.note(key, c)
	}
	return converted{}, false, nil
}

// whole makes a layer whole here, unless it is.
func (s *Store) whole(ctx context.Context, d layer.Digest) error {
	if d == "" {
		return nil
	}
	if _, err := s.manifest(d); err == nil {
		return s.touch(d)
	}
	return s.fetchOnce(ctx, d)
}

// shareOnce shares what a program that was killed had not, or a store that had
// no blob store.
func (s *Store) shareOnce(c converted, key string) {
	s.mu.Lock()
	sent := s.sent[key]
	s.sent[key] = true
	s.mu.Unlock()
	if sent || s.opts.Blobs == nil {
		return
	}
	s.behind(func(ctx context.Context) {
		if _, err := s.opts.Blobs.Stat(ctx, "oci/"+key); err == nil {
			return
		}
		if err := s.share(ctx, c, key); err != nil {
			s.opts.Log.Warn("converted layer is not shared", "layer", c.Layer, "error", err)
		}
	})
}

// share puts a converted layer and its notes into the blob store.
func (s *Store) share(ctx context.Context, c converted, keys ...string) error {
	if s.opts.Blobs == nil {
		return nil
	}
	s.sends.Lock() // what is packed takes room
	defer s.sends.Unlock()
	if c.Layer != "" {
		if err := s.push(ctx, c.Layer); err != nil {
			return err
		}
	}
	c.Version = 1
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	for _, key := range keys {
		// Overwritten, not kept: what is there may name a layer that is gone.
		if err := s.opts.Blobs.Put(ctx, "oci/"+key, bytes.NewReader(append(b, '\n')), blob.PutOptions{}); err != nil {
			return err
		}
		s.mu.Lock()
		s.sent[key] = true
		s.mu.Unlock()
	}
	return nil
}

// claimPoll is how often a waiting machine looks at first; it looks less often
// as time goes by.
const claimPoll = 100 * time.Millisecond

// onceForAll finds a note, or has the work done by one machine: here, or by
// another while this one waits. What the work returns is shared in the
// background, under the claim.
func (s *Store) onceForAll(ctx context.Context, key string, keys []string, waiting func(), work func() (converted, []string, error)) (converted, error) {
	if s.opts.Blobs == nil {
		c, ok, err := s.noted(ctx, keys...)
		if err != nil || ok {
			return c, err
		}
		c, more, err := work()
		return c, errors.Join(err, s.noteAll(c, err, append(keys, more...)))
	}
	cl := s.newClaim(key)
	for wait := claimPoll; ; wait = min(wait*3/2, s.opts.ClaimTTL/beats) {
		c, ok, err := s.noted(ctx, keys...)
		if err != nil || ok {
			return c, err
		}
		held, err := cl.try(ctx)
		if err != nil {
			return converted{}, err
		}
		if held != nil {
			return s.under(ctx, held, keys, work)
		}
		waiting()
		if err := within.Sleep(ctx, wait); err != nil {
			return converted{}, err
		}
	}
}

// under does the work that was claimed.
func (s *Store) under(ctx context.Context, held *heldClaim, keys []string, work func() (converted, []string, error)) (converted, error) {
	// Between the look and the claim another may have finished.
	c, ok, err := s.noted(ctx, keys...)
	if err != nil || ok {
		held.letGo(ctx)
		return c, err
	}
	c, more, err := work()
	keys = append(keys, more...)
	if err = errors.Join(err, s.noteAll(c, err, keys)); err != nil {
		held.letGo(ctx)
		return c, err
	}
	s.behind(func(ctx context.Context) {
		defer held.letGo(ctx)
		if err := s.share(ctx, c, keys...); err != nil {
			s.opts.Log.Warn("converted layer is not shared: other machines will convert it again", "layer", c.Layer, "error", err)
		}
	})
	return c, nil
}

func (s *Store) noteAll(c converted, err error, keys []string) error {
	for _, key := range keys {
		if err == nil {
			err = s.note(key, c)
		}
	}
	return err
}

// behind runs work that nobody waits for but Close.
func (s *Store) behind(work func(ctx context.Context)) {
	s.wg.Go(func() { work(s.ctx) })
}

// image opens a layer that is here to be read; close what it returns.
func (s *Store) image(d layer.Digest) (*erofs.Image, func(), error) {
	s.mu.Lock()
	l, err := s.localLocked(d)
	s.mu.Unlock()
	if err != nil {
		return nil, nil, err
	}
	meta, err := os.Open(l.Meta)
	if err != nil {
		return nil, nil, err
	}
	if l.Data == "" {
		im, err := erofs.Open(meta, l.MetaSize, nil)
		return im, func() { meta.Close() }, err
	}
	data, err := s.OpenData(s.ctx, l)
	if err != nil {
		meta.Close()
		return nil, nil, err
	}
	im, err := erofs.Open(meta, l.MetaSize, data)
	return im, func() { meta.Close(); data.Close() }, err
}
