package gc

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
)

// atOneTime is how many objects are read or deleted at one time.
const atOneTime = 16

// object is what a list says of one.
type object struct {
	size int64
	mod  time.Time
}

// world is what there is, and what needs what.
type world struct {
	objects map[string]object              // by key, of the kinds that can be kept
	needs   map[string][]string            // of checkpoints, stacks, manifests and indexes that could be read
	broken  map[string]error               // of those that could not
	hints   map[string][][sha256.Size]byte // of each index
	named   map[string][]span              // by index: where its chunks are
	weak    map[string]map[string]object   // by first part of the key
	unknown Count
}

// weakKinds keep nothing.
var weakKinds = []string{"hints", "traces", "lineages", "oci", "claims", "probe"}

// read lists a store and reads all that needs something. It takes what is gone
// when it is read for not there.
func (w *world) read(ctx context.Context, blobs blob.Store) error {
	w.objects, w.needs, w.broken = map[string]object{}, map[string][]string{}, map[string]error{}
	w.hints, w.named, w.weak = map[string][][sha256.Size]byte{}, map[string][]span{}, map[string]map[string]object{}
	for _, kind := range weakKinds {
		w.weak[kind] = map[string]object{}
	}
	for info, err := range blobs.List(ctx, "") {
		if err != nil {
			return err
		}
		w.note(info)
	}
	var mu sync.Mutex
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(atOneTime)
	for key := range w.objects {
		kind, d, err := layer.ParseKey(key)
		if err != nil || kind == layer.KindMeta || kind == layer.KindPack {
			continue
		}
		g.Go(func() error {
			n, err := readNeeds(gctx, blobs, kind, d)
			mu.Lock()
			defer mu.Unlock()
			switch class := dsec.ClassOf(err); {
			case err == nil:
				w.needs[key] = n.keys
				if kind == layer.KindIndex {
					w.hints[key], w.named[key] = n.hints, n.spans
				}
			case class == dsec.NotFound:
				delete(w.objects, key)
			case class == dsec.Corrupt:
				w.broken[key] = err
			default:
				return err
			}
			return nil
		})
	}
	return g.Wait()
}

func (w *world) note(info blob.Info) {
	o := object{info.Size, info.ModTime}
	if _, _, err := layer.ParseKey(info.Key); err == nil {
		w.objects[info.Key] = o
		return
	}
	first, _, _ := strings.Cut(info.Key, "/")
	switch weak, ok := w.weak[first]; {
	case ok:
		weak[info.Key] = o
	case first == "roots", strings.HasPrefix(info.Key, layer.RunPrefix), strings.HasPrefix(info.Key, layer.CondemnedPrefix):
	default:
		w.unknown.add(info.Size)
	}
}

// wants is what an object needs.
type wants struct {
	keys  []string
	hints [][sha256.Size]byte
	spans []span
}

// readNeeds reads a checkpoint, a stack, a manifest or an index. What is wrong with it is
// Corrupt.
func readNeeds(ctx context.Context, blobs blob.Store, kind layer.Kind, d layer.Digest) (w wants, err error) {
	limit := map[layer.Kind]int64{layer.KindCheckpoint: layer.MaxCheckpoint, layer.KindStack: maxStack, layer.KindManifest: layer.MaxManifest, layer.KindIndex: layer.MaxIndex}[kind]
	b, err := blob.ReadAll(ctx, blobs, kind.Key(d), limit)
	if err != nil {
		return w, err
	}
	switch kind {
	case layer.KindCheckpoint:
		var c layer.Checkpoint
		if c, err = layer.DecodeCheckpoint(b, d); err == nil {
			w.keys = []string{layer.IndexKey(c.Disk.Chunks), layer.IndexKey(c.Memory.Chunks)}
		} else if dsec.ClassOf(err) == dsec.Unsupported { // of another version: nobody knows what it needs
			err = dsec.E(dsec.Corrupt, "read checkpoint", string(d), err)
		}
	case layer.KindStack:
		w.keys, err = stackNeeds(b, d)
	case layer.KindManifest:
		var m layer.Manifest
		if m, err = layer.DecodeManifest(b, d); err == nil {
			w.keys = append(w.keys, layer.MetaKey(m.Meta.Digest))
			if m.Data.Size > 0 {
				w.keys = append(w.keys, layer.IndexKey(m.Data.Chunks))
			}
		}
	case layer.KindIndex:
		var ix layer.Index
		if ix, err = layer.DecodeIndexOf(b, d); err == nil {
			for _, pack := range ix.Packs {
				w.keys = append(w.keys, layer.PackKey(pack))
			}
			w.hints, w.spans = ix.Hints(), spansOf(ix)
		}
	}
	return w, err
}

// maxStack is the most bytes of a stack, docs/formats/stack.md.
const maxStack = 1 << 20

// stackNeeds reads of a stack which layers are in it; the rest is not our concern.
func stackNeeds(b []byte, d layer.Digest) ([]string, error) {
	const op = "read stack"
	if got := layer.DigestOf(b); got != d {
		return nil, dsec.Errorf(dsec.Corrupt, op, string(d), "content has digest %s", got)
	}
	var s struct {
		Version int `json:"version"`
		Layers  []struct {
			Digest string `json:"digest"`
		} `json:"layers"`
	}
	err := json.NewDecoder(bytes.NewReader(b)).Decode(&s)
	if err == nil && s.Version != 1 {
		err = fmt.Errorf("version %d, this program knows 1", s.Version)
	}
	if err == nil && len(s.Layers) == 0 {
		err = errors.New("no layers")
	}
	if err != nil {
		return nil, dsec.E(dsec.Corrupt, op, string(d), err)
	}
	var keys []string
	for _, l := range s.Layers {
		part, err := layer.ParseDigest(l.Digest)
		if err != nil {
			return nil, dsec.E(dsec.Corrupt, op, string(d), err)
		}
		keys = append(keys, layer.ManifestKey(part))
	}
	return keys, nil
}

// reach adds to seen what the keys need, and they themselves.
func (w *world) reach(seen map[string]bool, keys ...string) {
	for len(keys) > 0 {
		key := keys[len(keys)-1]
		keys = keys[:len(keys)-1]
		if !seen[key] {
			seen[key] = true
			keys = append(keys, w.needs[key]...)
		}
	}
}
