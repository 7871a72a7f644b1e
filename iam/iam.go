// Package iam says who a caller is and what it may do: API keys, projects,
// roles, and local callers known by the uid the kernel vouches for.
//
// A key is "dsec_" and 40 hex digits. Its SHA-256 is stored, never the key; it
// is shown once. A key belongs to one project and has one role. Projects have
// one level now; their names are paths ("a/b") of which only the first part
// is accepted, so that nesting needs no new format.
package iam

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

// Role is what a principal may do.
type Role string

// The roles.
const (
	Admin Role = "admin" // everything, in every project
	User  Role = "user"  // sandboxes and layers of its project
)

// DefaultProject is where callers belong who name none.
const DefaultProject = "default"

// Principal is a caller that was identified.
type Principal struct {
	Name    string // "key:<id>" or "uid:<n>"
	Project string
	Role    Role
}

// Key is a stored key, without its secret.
type Key struct {
	ID      string    `json:"id"` // first 16 hex digits of Hash
	Name    string    `json:"name"`
	Hash    string    `json:"hash"` // hex SHA-256 of the key
	Role    Role      `json:"role"`
	Project string    `json:"project"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires,omitzero"` // zero: never
	Revoked bool      `json:"revoked,omitempty"`
}

// Store keeps keys durably; cluster has one on JetStream, FileStore is one in
// a file.
type Store interface {
	// Put writes one value; Load calls fn with each.
	Put(ctx context.Context, id string, value []byte) error
	Load(ctx context.Context, fn func(id string, value []byte)) error
}

const (
	prefix   = "dsec_"
	keyBytes = 20
	idDigits = 16
)

// fresh is how long what another gateway changed may go unseen.
const fresh = 10 * time.Second

const reloadWithin = 2 * time.Second

// Keys authenticates by API key. Methods may be called concurrently.
type Keys struct {
	store Store
	now   func() time.Time

	io sync.Mutex // one reload or change at a time, so that none undoes another

	mu     sync.Mutex
	byID   map[string]Key
	loaded time.Time
}

// NewKeys loads the keys of a store.
func NewKeys(ctx context.Context, store Store) (*Keys, error) {
	k := &Keys{store: store, now: time.Now}
	return k, k.reload(ctx)
}

func (k *Keys) reload(ctx context.Context) error {
	k.io.Lock()
	defer k.io.Unlock()
	byID := map[string]Key{}
	err := k.store.Load(ctx, func(id string, value []byte) {
		var key Key
		if json.Unmarshal(value, &key) == nil && key.ID == id {
			byID[id] = key
		}
	})
	if err != nil {
		return dsec.E(dsec.Unavailable, "load keys", "", err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.byID, k.loaded = byID, k.now()
	return nil
}

// Request describes a new key.
type Request struct {
	Name     string
	Role     Role   // "" is User
	Project  string // "" is DefaultProject
	Lifetime time.Duration
	Secret   string // "" makes one; set by a caller that must know it beforehand
}

// Create stores a key and returns its secret, which is nowhere else.
func (k *Keys) Create(ctx context.Context, r Request) (Key, string, error) {
	if r.Role == "" {
		r.Role = User
	}
	if r.Project == "" {
		r.Project = DefaultProject
	}
	if err := r.validate(); err != nil {
		return Key{}, "", err
	}
	secret := r.Secret
	if secret == "" {
		secret = NewSecret()
	}
	now := k.now().UTC()
	key := Key{Name: r.Name, Hash: hash(secret), Role: r.Role, Project: r.Project, Created: now}
	key.ID = key.Hash[:idDigits]
	if r.Lifetime > 0 {
		key.Expires = now.Add(r.Lifetime)
	}
	return key, secret, k.put(ctx, key)
}

func (r *Request) validate() error {
	bad := func(field, format string, args ...any) error {
		return dsec.Errorf(dsec.Invalid, "create key", field, format, args...)
	}
	switch {
	case r.Role != Admin && r.Role != User:
		return bad("role", "unknown role %s", dsec.Quote(string(r.Role)))
	case len(r.Name) > dsec.MaxNameBytes:
		return bad("name", "%d bytes, at most %d", len(r.Name), dsec.MaxNameBytes)
	case !ValidProject(r.Project):
		return bad("project", "%s, want 1 to 63 of a-z 0-9 -", dsec.Quote(r.Project))
	case r.Lifetime < 0:
		return bad("lifetime", "is negative")
	case r.Secret != "" && !wellFormed(r.Secret):
		return bad("secret", "want %s and %d hex digits", prefix, 2*keyBytes)
	}
	return nil
}

func (k *Keys) put(ctx context.Context, key Key) error {
	k.io.Lock()
	defer k.io.Unlock()
	value, err := json.Marshal(key)
	if err != nil {
		return dsec.E(dsec.Internal, "store key", key.ID, err)
	}
	if err := k.store.Put(ctx, key.ID, value); err != nil {
		return dsec.E(dsec.Unavailable, "store key", key.ID, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.byID[key.ID] = key
	return nil
}

// Revoke ends a key at once; it stays listed.
func (k *Keys) Revoke(ctx context.Context, id string) (existed bool, err error) {
	k.mu.Lock()
	key, ok := k.byID[id]
	k.mu.Unlock()
	if !ok || key.Revoked {
		return false, nil
	}
	key.Revoked = true
	return true, k.put(ctx, key)
}

// List returns every key, oldest first.
func (k *Keys) List(ctx context.Context) ([]Key, error) {
	if err := k.reload(ctx); err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make([]Key, 0, len(k.byID))
	for _, key := range k.byID {
		out = append(out, key)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Created.Before(out[j].Created) })
	return out, nil
}

// Authenticate returns whose key it is. Every way of being wrong gives the
// same error. While the store is away what was loaded last still holds.
func (k *Keys) Authenticate(ctx context.Context, secret string) (Principal, error) {
	wrong := dsec.Errorf(dsec.Unauthenticated, "authenticate", "", "no valid API key")
	if !wellFormed(secret) {
		return Principal{}, wrong
	}
	sum := hash(secret)
	key, ok := k.lookup(ctx, sum[:idDigits])
	if !ok || subtle.ConstantTimeCompare([]byte(key.Hash), []byte(sum)) != 1 || key.Revoked {
		return Principal{}, wrong
	}
	if !key.Expires.IsZero() && !k.now().Before(key.Expires) {
		return Principal{}, wrong
	}
	return Principal{Name: "key:" + key.ID, Project: key.Project, Role: key.Role}, nil
}

func (k *Keys) lookup(ctx context.Context, id string) (Key, bool) {
	k.mu.Lock()
	stale := k.now().Sub(k.loaded) > fresh
	if stale {
		k.loaded = k.now() // one caller reloads, the others go on
	}
	k.mu.Unlock()
	if stale {
		ctx, cancel := context.WithTimeout(ctx, reloadWithin)
		defer cancel()
		_ = k.reload(ctx) // what was loaded last still holds
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	key, ok := k.byID[id]
	return key, ok
}

// NewSecret makes a key.
func NewSecret() string {
	b := make([]byte, keyBytes)
	_, _ = rand.Read(b) // never fails: crypto/rand aborts the process instead
	return prefix + hex.EncodeToString(b)
}

// LooksLikeKey reports whether s has the form of a key, so that it can be kept
// out of logs and out of what is passed on.
func LooksLikeKey(s string) bool { return strings.HasPrefix(s, prefix) }

func wellFormed(s string) bool {
	if len(s) != len(prefix)+2*keyBytes || s[:len(prefix)] != prefix {
		return false
	}
	_, err := hex.DecodeString(s[len(prefix):])
	return err == nil
}

func hash(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}

// ValidProject reports whether s can name a project.
func ValidProject(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' {
		return false
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}
