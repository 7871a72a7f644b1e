package layer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// What keeps objects of a blob store, and what is about to remove them, see
// docs/formats/collect.md.
const (
	keepVersion      = 1
	MaxRootKeys      = 1 << 20
	MaxCondemnedKeys = 1 << 16
	MaxRoot          = 96 << 20 // bytes of an encoding
	MaxCondemned     = 8 << 20
	MaxRun           = 1 << 20

	// RunEvery is within which time a run that goes on is written again. Its
	// owner deletes nothing when RunStops has passed since, by his clock; for
	// others it is dead after RunDead, by the store's.
	RunEvery = 2 * time.Minute
	RunStops = 10 * time.Minute
	RunDead  = 20 * time.Minute
)

// Prefixes of the objects.
const (
	RootPrefix      = "roots/"
	CondemnedPrefix = "gc/condemned/"
	RunPrefix       = "gc/runs/"
)

// Kind is what an object that can be kept is: the first part of its key.
type Kind string

// The kinds, in the order in which they may be deleted: what needs others
// before what is needed.
const (
	KindCheckpoint Kind = "checkpoints"
	KindStack      Kind = "stacks"
	KindManifest   Kind = "manifests"
	KindIndex      Kind = "indexes"
	KindMeta       Kind = "meta"
	KindPack       Kind = "packs"
)

// Kinds lists all of them in that order.
var Kinds = []Kind{KindCheckpoint, KindStack, KindManifest, KindIndex, KindMeta, KindPack}

// Key is where the object of a kind is.
func (k Kind) Key(d Digest) string { return string(k) + "/" + d.Hex() }

// ParseKey reads the key of an object that can be kept.
func ParseKey(key string) (Kind, Digest, error) {
	kind, hex, _ := strings.Cut(key, "/")
	d, err := ParseDigest(digestPrefix + hex)
	if err != nil || !slices.Contains(Kinds, Kind(kind)) {
		return "", "", dsec.Errorf(dsec.Invalid, "read key", dsec.Quote(key), "want a kind and 64 hex digits")
	}
	return Kind(kind), d, nil
}

// Root says what somebody keeps.
type Root struct {
	Version int      `json:"version"`
	Node    string   `json:"node"`  // for people
	Every   int64    `json:"every"` // seconds within which it is written again
	Keep    []string `json:"keep"`
}

// NewRoot sorts what is kept.
func NewRoot(node string, every time.Duration, keep []string) Root {
	return Root{keepVersion, node, int64(every / time.Second), sorted(keep)}
}

// Condemned are keys that a later run may delete.
type Condemned struct {
	Version int      `json:"version"`
	Keys    []string `json:"keys"`
}

// NewCondemned sorts the keys.
func NewCondemned(keys []string) Condemned { return Condemned{keepVersion, sorted(keys)} }

// Run is a collector at work. Removes names the condemnations that it executes.
type Run struct {
	Version int      `json:"version"`
	Owner   string   `json:"owner"`
	Removes []string `json:"removes"`
}

// NewRun sorts the names.
func NewRun(owner string, removes []string) Run { return Run{keepVersion, owner, sorted(removes)} }

func sorted(list []string) []string {
	out := append([]string{}, list...)
	slices.Sort(out)
	return slices.Compact(out)
}

// Encode returns the one encoding.
func (r Root) Encode() []byte { return encodeLine(r) }

// Encode returns the one encoding.
func (c Condemned) Encode() []byte { return encodeLine(c) }

// Encode returns the one encoding.
func (r Run) Encode() []byte { return encodeLine(r) }

func encodeLine(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil { // strings and integers only
		panic(err)
	}
	return append(b, '\n')
}

// DecodeRoot reads an encoding.
func DecodeRoot(b []byte, name string) (r Root, err error) {
	err = decodeLine(b, MaxRoot, &r, func() error {
		if r.Every < 0 || r.Every > 1<<31 || len(r.Node) > 256 {
			return fmt.Errorf("every %d s, node of %d bytes", r.Every, len(r.Node))
		}
		return checkKeys(r.Keep, MaxRootKeys)
	})
	if err != nil {
		return Root{}, dsec.E(dsec.Corrupt, "read root", name, err)
	}
	return r, nil
}

// DecodeCondemned reads an encoding.
func DecodeCondemned(b []byte, name string) (c Condemned, err error) {
	err = decodeLine(b, MaxCondemned, &c, func() error { return checkKeys(c.Keys, MaxCondemnedKeys) })
	if err != nil {
		return Condemned{}, dsec.E(dsec.Corrupt, "read condemnation", name, err)
	}
	return c, nil
}

// DecodeRun reads an encoding.
func DecodeRun(b []byte, name string) (r Run, err error) {
	err = decodeLine(b, MaxRun, &r, func() error {
		if !ascending(r.Removes) {
			return errors.New("names are not in order")
		}
		return nil
	})
	if err != nil {
		return Run{}, dsec.E(dsec.Corrupt, "read run", name, err)
	}
	return r, nil
}

// decodeLine reads v, which must be written as encodeLine does. A version other
// than ours is said before anything else that is wrong.
func decodeLine(b []byte, limit int, v any, check func() error) error {
	if len(b) > limit {
		return fmt.Errorf("%d bytes, at most %d", len(b), limit)
	}
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return err
	}
	if head.Version != keepVersion {
		return fmt.Errorf("version %d, this program knows %d", head.Version, keepVersion)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if err := check(); err != nil {
		return err
	}
	if !bytes.Equal(encodeLine(v), b) {
		return errors.New("not in canonical form")
	}
	return nil
}

func checkKeys(keys []string, limit int) error {
	if len(keys) > limit {
		return fmt.Errorf("%d keys, at most %d", len(keys), limit)
	}
	if !ascending(keys) {
		return errors.New("keys are not in order")
	}
	for _, key := range keys {
		if _, _, err := ParseKey(key); err != nil {
			return err
		}
	}
	return nil
}

func ascending(list []string) bool {
	for i := 1; i < len(list); i++ {
		if list[i-1] >= list[i] {
			return false
		}
	}
	return true
}
