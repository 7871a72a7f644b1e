package runtimetest

import (
	"bytes"
	"path"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
)

const maxLinks = 40 // followed in one path

// inode is a file, directory or symbolic link.
type inode struct {
	kind     files.Kind
	mode     uint32
	uid, gid uint32
	mtime    time.Time
	data     []byte
	target   string
	children map[string]*inode // of a directory
	links    uint64
	upper    bool // not as the base had it
}

func (n *inode) isDir() bool { return n.kind == files.Dir }

// memFS is the file system of one sandbox.
type memFS struct {
	limit int64 // bytes of files; 0: none

	mu      sync.Mutex
	root    *inode
	bytes   int64           // in files that are not of the base
	removed map[string]bool // paths of the base that are gone
	hidden  map[string]*inode
}

// user is who a command or a file call is done as.
type user struct {
	name     string
	uid, gid uint32
	home     string
}

const baseCommands = ": cat chmod echo env false head id kill ls mkdir nc nproc printf pwd rm seq setsid sh sleep tail test touch true wc yes"

// newMemFS makes the base that every fake sandbox has, whatever its layers.
func newMemFS(limit int64) *memFS {
	fs := &memFS{limit: limit, removed: map[string]bool{}}
	fs.root = fs.dir(0o755, 0)
	for _, d := range []struct {
		path string
		mode uint32
		uid  uint32
	}{{"/bin", 0o755, 0}, {"/etc", 0o755, 0}, {"/home", 0o755, 0}, {"/home/user", 0o755, 1000}, {"/root", 0o700, 0},
		{"/tmp", 0o1777, 0}, {"/usr", 0o755, 0}, {"/dev", 0o755, 0}} {
		parent, name := path.Split(d.path)
		n, _ := fs.walk(user{}, path.Clean(parent), true, maxLinks)
		n.children[name] = fs.dir(d.mode, d.uid)
	}
	for name := range strings.FieldsSeq(baseCommands) {
		fs.root.children["bin"].children[name] = fs.file("fake "+name, 0o755)
	}
	etc := fs.root.children["etc"].children
	etc["passwd"] = fs.file("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n", 0o644)
	etc["group"] = fs.file("root:x:0:\nuser:x:1000:\n", 0o644)
	fs.root.children["dev"].children["null"] = &inode{kind: files.Other, mode: 0o666, links: 1, mtime: time.Now()}
	fs.root.children["dev"].children["zero"] = &inode{kind: files.Other, mode: 0o666, links: 1, mtime: time.Now()}
	return fs
}

func (fs *memFS) dir(mode, uid uint32) *inode {
	return &inode{kind: files.Dir, mode: mode, uid: uid, gid: uid, mtime: time.Now(), children: map[string]*inode{}, links: 2}
}

func (fs *memFS) file(text string, mode uint32) *inode {
	return &inode{kind: files.File, mode: mode, data: []byte(text), mtime: time.Now(), links: 1}
}

func (fs *memFS) used() int64 {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return fs.bytes
}

// may checks r (4), w (2) or x (1).
func (u user) may(n *inode, bit uint32) bool {
	switch {
	case u.uid == 0:
		return bit != 1 || n.isDir() || n.mode&0o111 != 0
	case u.uid == n.uid:
		return n.mode>>6&bit != 0
	case u.gid == n.gid:
		return n.mode>>3&bit != 0
	}
	return n.mode&bit != 0
}

// walk resolves a path below the root. The lock is held.
func (fs *memFS) walk(u user, p string, follow bool, budget int) (*inode, error) {
	n := fs.root
	at := "/"
	parts := strings.Split(strings.Trim(p, "/"), "/")
	for i, name := range parts {
		if name == "" || name == "." {
			continue
		}
		if !n.isDir() {
			return nil, dsec.E(dsec.NotADirectory, "resolve", p, nil)
		}
		if !u.may(n, 1) {
			return nil, dsec.E(dsec.PermissionDenied, "resolve", p, nil)
		}
		if name == ".." {
			at = path.Dir(at)
			n, _ = fs.walk(user{}, at, true, budget)
			continue
		}
		next := n.children[name]
		if next == nil {
			return nil, dsec.E(dsec.FileNotFound, "resolve", p, nil)
		}
		if next.kind == files.Symlink && (follow || i < len(parts)-1) {
			if budget == 0 {
				return nil, dsec.Errorf(dsec.Invalid, "resolve", p, "too many links")
			}
			target := next.target
			if !path.IsAbs(target) {
				target = path.Join(at, target)
			}
			rest := path.Join(append([]string{target}, parts[i+1:]...)...)
			return fs.walk(u, rest, follow, budget-1)
		}
		n, at = next, path.Join(at, name)
	}
	return n, nil
}

// parentOf resolves the directory of p.
func (fs *memFS) parentOf(u user, p string) (dir *inode, name string, err error) {
	p = path.Clean("/" + p)
	if p == "/" {
		return nil, "", dsec.Errorf(dsec.Invalid, "resolve", p, "the root")
	}
	dir, err = fs.walk(u, path.Dir(p), true, maxLinks)
	if err == nil && !dir.isDir() {
		err = dsec.E(dsec.NotADirectory, "resolve", path.Dir(p), nil)
	}
	return dir, path.Base(p), err
}

func (fs *memFS) lookup(u user, p string, follow bool) (*inode, error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return fs.walk(u, p, follow, maxLinks)
}

// lookPath finds a program.
func (fs *memFS) lookPath(name, search, cwd string, u user) (string, error) {
	candidates := []string{name}
	if !strings.Contains(name, "/") {
		candidates = nil
		for dir := range strings.SplitSeq(search, ":") {
			candidates = append(candidates, path.Join(dir, name))
		}
	}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for _, c := range candidates {
		if !path.IsAbs(c) {
			c = path.Join(cwd, c)
		}
		n, err := fs.walk(u, c, true, maxLinks)
		if err != nil {
			continue
		}
		if n.isDir() || !u.may(n, 1) {
			return "", dsec.E(dsec.PermissionDenied, "exec", name, nil)
		}
		return c, nil
	}
	return "", dsec.Errorf(dsec.FileNotFound, "exec", name, "no such program")
}

// user resolves a name or "uid[:gid]" in the sandbox's own /etc/passwd.
func (fs *memFS) user(name string) (user, error) {
	if name == "" {
		name = "0"
	}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	var text []byte
	if n, err := fs.walk(user{}, "/etc/passwd", true, maxLinks); err == nil {
		text = n.data
	}
	id, group, _ := strings.Cut(name, ":")
	uid, nerr := strconv.ParseUint(id, 10, 32)
	u := user{name: id, uid: uint32(uid), gid: uint32(uid), home: "/"}
	found := nerr == nil
	for line := range bytes.Lines(text) {
		f := strings.Split(strings.TrimSpace(string(line)), ":")
		if len(f) < 7 || f[0] != id && (nerr != nil || f[2] != id) {
			continue
		}
		ui, _ := strconv.ParseUint(f[2], 10, 32)
		gi, _ := strconv.ParseUint(f[3], 10, 32)
		u, found = user{name: f[0], uid: uint32(ui), gid: uint32(gi), home: f[5]}, true
		break
	}
	if gid, err := strconv.ParseUint(group, 10, 32); err == nil {
		u.gid = uint32(gid)
	}
	if !found {
		return u, dsec.Errorf(dsec.Invalid, "find user", dsec.Quote(name), "no such user")
	}
	return u, nil
}

// put stores a file at p. The lock is held.
func (fs *memFS) put(u user, p string, data []byte, appendTo bool, mode *uint32) (*inode, error) {
	dir, name, err := fs.parentOf(u, p)
	if err != nil {
		return nil, err
	}
	old := dir.children[name]
	if old != nil && old.kind == files.Symlink {
		if old, err = fs.walk(u, p, true, maxLinks); err != nil {
			return nil, err
		}
	}
	switch {
	case old != nil && old.isDir():
		return nil, dsec.E(dsec.IsADirectory, "write file", p, nil)
	case old != nil && !u.may(old, 2), old == nil && !u.may(dir, 2):
		return nil, dsec.E(dsec.PermissionDenied, "write file", p, nil)
	}
	if old != nil && old.kind == files.Other {
		return old, nil
	}
	before := int64(0)
	if old != nil {
		if appendTo {
			data = append(old.data, data...) // readers of the old slice do not see more of it
		}
		if old.upper {
			before = int64(len(old.data))
		}
	}
	if grown := int64(len(data)) - before; fs.limit > 0 && grown > 0 && fs.bytes+grown > fs.limit {
		return nil, dsec.E(dsec.NoSpace, "write file", p, nil)
	}
	fs.bytes += int64(len(data)) - before
	n := old
	if n == nil {
		n = &inode{kind: files.File, mode: 0o644, uid: u.uid, gid: u.gid, links: 1}
		dir.children[name] = n
	}
	n.data, n.mtime, n.upper = data, time.Now(), true
	if mode != nil {
		n.mode = *mode
	}
	return n, nil
}

func (fs *memFS) mkdir(u user, p string, mode uint32, parents bool) error {
	p = path.Clean("/" + p)
	if p == "/" {
		if parents {
			return nil
		}
		return dsec.E(dsec.FileExists, "make directory", p, nil)
	}
	if n, err := fs.walk(u, p, true, maxLinks); err == nil {
		if parents && n.isDir() {
			return nil
		}
		return dsec.E(dsec.FileExists, "make directory", p, nil)
	}
	if parents {
		if err := fs.mkdir(u, path.Dir(p), 0o755, true); err != nil {
			return err
		}
	}
	dir, name, err := fs.parentOf(u, p)
	if err != nil {
		return err
	}
	if !u.may(dir, 2) {
		return dsec.E(dsec.PermissionDenied, "make directory", p, nil)
	}
	n := fs.dir(mode, u.uid)
	n.gid, n.upper = u.gid, true
	dir.children[name] = n
	return nil
}

func (fs *memFS) remove(u user, p string, recursive bool) error {
	dir, name, err := fs.parentOf(u, p)
	if err != nil {
		return err
	}
	n := dir.children[name]
	switch {
	case n == nil:
		return dsec.E(dsec.FileNotFound, "remove", p, nil)
	case !u.may(dir, 2):
		return dsec.E(dsec.PermissionDenied, "remove", p, nil)
	case n.isDir() && !recursive:
		return dsec.E(dsec.IsADirectory, "remove", p, nil)
	}
	fs.forget(path.Clean("/"+p), n)
	delete(dir.children, name)
	return nil
}

// forget accounts for the removal of a tree.
func (fs *memFS) forget(p string, n *inode) {
	if !n.upper {
		fs.removed[p] = true
	} else {
		fs.bytes -= int64(len(n.data))
	}
	for name, c := range n.children {
		fs.forget(path.Join(p, name), c)
	}
}

func sortedNames(n *inode) []string {
	names := make([]string, 0, len(n.children))
	for name := range n.children {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}
