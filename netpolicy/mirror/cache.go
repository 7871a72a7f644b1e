package mirror

import (
	"container/list"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
)

// An entry of the cache is a file: the body, then what is known of it as JSON, then
// the length of that and footerMagic. Its modification time is when upstream last
// said that it is so.
const (
	footerMagic = "dsecmir1"
	footerTail  = 4 + len(footerMagic)
	maxFooter   = 16 << 10
	tempPrefix  = "tmp-"
)

// footer is what is known of a body.
type footer struct {
	Key    string `json:"key"`    // what it is, see docs/formats/mirror.md
	Size   int64  `json:"size"`   // bytes of the body
	SHA256 string `json:"sha256"` // of the body, hex
	ETag   string `json:"etag,omitempty"`
}

// encode is what follows the body.
func (f footer) encode() ([]byte, error) {
	b, err := json.Marshal(f)
	if err != nil || len(b) > maxFooter {
		return nil, dsec.Errorf(dsec.Internal, "write cache entry", dsec.Quote(f.Key), "%d bytes: %w", len(b), err)
	}
	n := len(b)
	return append(binary.BigEndian.AppendUint32(b, uint32(n)), footerMagic...), nil
}

// decodeFooter reads the end of a file of size bytes. Corrupt is what cannot be one.
func decodeFooter(r io.ReaderAt, size int64) (f footer, err error) {
	bad := func(why string) (footer, error) {
		return footer{}, dsec.Errorf(dsec.Corrupt, "read cache entry", "", "%s", why)
	}
	tail := make([]byte, footerTail)
	if size < int64(footerTail) {
		return bad("too short")
	}
	if _, err := r.ReadAt(tail, size-int64(footerTail)); err != nil {
		return bad(err.Error())
	}
	n := int64(binary.BigEndian.Uint32(tail))
	if string(tail[4:]) != footerMagic || n > maxFooter || n+int64(footerTail) > size {
		return bad("no footer")
	}
	b := make([]byte, n)
	if _, err := r.ReadAt(b, size-int64(footerTail)-n); err != nil {
		return bad(err.Error())
	}
	if err := json.Unmarshal(b, &f); err != nil {
		return bad(err.Error())
	}
	if f.Size != size-int64(footerTail)-n {
		return bad("size is another")
	}
	return f, nil
}

// cache is a directory of entries, bounded in bytes. What was not used for longest
// goes first.
type cache struct {
	dir string
	max int64

	mu      sync.Mutex
	known   map[string]*list.Element // by file name
	recent  *list.List               // of *slot, last used first
	total   int64
	drafts  int64     // bytes of what is being written
	blocked time.Time // until then the disk is taken for full
}

type slot struct {
	name     string
	size     int64
	verified bool // its bytes were looked at since the start
}

func nameOf(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// openCache finds what is there, and throws away what was never finished.
func openCache(dir string, most int64) (*cache, error) {
	if dir == "" {
		return nil, dsec.Errorf(dsec.Invalid, "open cache", "", "no directory")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, dsec.E(dsec.Internal, "open cache", dir, err)
	}
	if err := ownedAlone(dir); err != nil {
		return nil, err
	}
	c := &cache{dir: dir, max: most, known: map[string]*list.Element{}, recent: list.New()}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "open cache", dir, err)
	}
	var infos []fs.FileInfo
	for _, e := range entries {
		info, err := e.Info()
		switch {
		case err != nil || !info.Mode().IsRegular():
		case strings.HasPrefix(e.Name(), tempPrefix):
			_ = os.Remove(filepath.Join(dir, e.Name()))
		case len(e.Name()) == 2*sha256.Size:
			infos = append(infos, info)
		}
	}
	slices.SortFunc(infos, func(a, b fs.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	for _, i := range infos {
		c.known[i.Name()] = c.recent.PushFront(&slot{name: i.Name(), size: i.Size()})
		c.total += i.Size()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.evictLocked()
	return c, nil
}

// ownedAlone: who else could write there could give packages to sandboxes.
func ownedAlone(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return dsec.E(dsec.Internal, "open cache", dir, err)
	}
	s, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || int(s.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
		return dsec.Errorf(dsec.PermissionDenied, "open cache", dir, "want a directory that only user %d can write", os.Geteuid())
	}
	return nil
}

func (c *cache) size() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.total
}

// evictLocked makes room.
func (c *cache) evictLocked() {
	for c.total+c.drafts > c.max && c.recent.Len() > 0 {
		c.forgetLocked(c.recent.Back().Value.(*slot).name)
	}
}

func (c *cache) forgetLocked(name string) {
	e := c.known[name]
	if e == nil {
		return
	}
	c.total -= e.Value.(*slot).size
	c.recent.Remove(e)
	delete(c.known, name)
	_ = os.Remove(filepath.Join(c.dir, name)) // who reads it, reads on
}

// entry is an open body.
type entry struct {
	*io.SectionReader
	file    *os.File
	footer  footer
	checked time.Time // when upstream last said that it is so
}

func (e *entry) Close() error { return e.file.Close() }

// get opens an entry; nil: there is none. One that is not what was written is taken
// away, and corrupt.
func (c *cache) get(key string) (e *entry, corrupt bool) {
	name := nameOf(key)
	c.mu.Lock()
	at := c.known[name]
	if at == nil {
		c.mu.Unlock()
		return nil, false
	}
	c.recent.MoveToFront(at)
	verified := at.Value.(*slot).verified
	c.mu.Unlock()
	e, err := c.read(key, name, !verified)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		if c.known[name] == at { // else another has come meanwhile
			c.forgetLocked(name)
		}
		return nil, true
	}
	at.Value.(*slot).verified = true
	return e, false
}

func (c *cache) read(key, name string, verify bool) (*entry, error) {
	f, err := os.OpenFile(filepath.Join(c.dir, name), os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	var foot footer
	if err == nil {
		foot, err = decodeFooter(f, info.Size())
	}
	if err == nil && foot.Key != key {
		err = dsec.Errorf(dsec.Corrupt, "read cache entry", name, "it is of %s", dsec.Quote(foot.Key))
	}
	if err == nil && verify {
		sum := sha256.New()
		if _, err = io.Copy(sum, io.NewSectionReader(f, 0, foot.Size)); err == nil && hex.EncodeToString(sum.Sum(nil)) != foot.SHA256 {
			err = dsec.Errorf(dsec.Corrupt, "read cache entry", name, "its bytes are others")
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return &entry{io.NewSectionReader(f, 0, foot.Size), f, foot, info.ModTime()}, nil
}

// touch says that upstream has just said so.
func (c *cache) touch(key string) {
	now := time.Now()
	_ = os.Chtimes(filepath.Join(c.dir, nameOf(key)), now, now)
}

// full is for how long a disk that was full is not tried again.
const full = time.Minute

// draft is an entry that is being written.
type draft struct {
	*os.File
	n int64 // bytes
}

// create begins an entry of about size bytes; nil: there is no room, and what is
// fetched is passed on without being kept.
func (c *cache) create(size int64) *draft {
	c.mu.Lock()
	blocked := c.drafts+size > c.max || time.Now().Before(c.blocked)
	c.mu.Unlock()
	if blocked {
		return nil
	}
	f, err := os.CreateTemp(c.dir, tempPrefix)
	if err != nil {
		c.block()
		return nil
	}
	return &draft{File: f}
}

func (c *cache) block() {
	c.mu.Lock()
	c.blocked = time.Now().Add(full)
	c.mu.Unlock()
}

// write adds to a draft, for which others make room.
func (c *cache) write(d *draft, b []byte) error {
	c.mu.Lock()
	d.n += int64(len(b))
	c.drafts += int64(len(b))
	c.evictLocked()
	over := c.drafts > c.max
	c.mu.Unlock()
	if over {
		return dsec.Errorf(dsec.NoSpace, "write to cache", c.dir, "more than %d bytes", c.max)
	}
	err := failpoint.Hit(context.Background(), "mirror cache write")
	if err == nil {
		_, err = d.Write(b)
	}
	if err != nil {
		c.block()
		return dsec.E(dsec.NoSpace, "write to cache", c.dir, err)
	}
	return nil
}

// discard ends a draft.
func (c *cache) discard(d *draft) {
	c.mu.Lock()
	c.drafts -= d.n
	c.mu.Unlock()
	_ = os.Remove(d.Name())
	_ = d.Close()
}

// commit makes an entry of a draft, which is closed.
func (c *cache) commit(d *draft, foot footer) error {
	b, err := foot.encode()
	if err == nil {
		err = c.write(d, b)
	}
	if err != nil {
		c.discard(d)
		return err
	}
	name := nameOf(foot.Key)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drafts -= d.n
	if err := os.Rename(d.Name(), filepath.Join(c.dir, name)); err != nil {
		_ = os.Remove(d.Name())
		_ = d.Close()
		return dsec.E(dsec.Internal, "commit cache entry", name, err)
	}
	_ = d.Close()
	if old := c.known[name]; old != nil {
		c.total -= old.Value.(*slot).size
		c.recent.Remove(old)
	}
	c.known[name] = c.recent.PushFront(&slot{name: name, size: d.n, verified: true})
	c.total += d.n
	c.evictLocked()
	return nil
}
