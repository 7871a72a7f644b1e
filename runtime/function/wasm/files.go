package wasm

import (
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"
)

// tree is the file system of a module: what came with the call, in memory, and nothing
// that can be written.
type tree map[string]*node

type node struct {
	name  string
	mode  fs.FileMode
	data  []byte
	names []string // of a directory, in order
}

func newTree(files []file) tree {
	t := tree{".": {name: ".", mode: fs.ModeDir | 0o555}}
	for _, f := range files {
		if !fs.ValidPath(f.path) || f.path == "." {
			continue // the host has seen to it
		}
		t.add(f.path, &node{name: path.Base(f.path), mode: fs.FileMode(f.mode) & 0o555, data: f.data})
	}
	for _, n := range t {
		slices.Sort(n.names)
	}
	return t
}

func (t tree) add(p string, n *node) {
	if old := t[p]; old != nil {
		if old.mode.IsDir() == n.mode.IsDir() {
			t[p] = n
		}
		return
	}
	dir := path.Dir(p)
	if t[dir] == nil {
		t.add(dir, &node{name: path.Base(dir), mode: fs.ModeDir | 0o555})
	}
	if parent := t[dir]; parent.mode.IsDir() {
		t[p] = n
		parent.names = append(parent.names, n.name)
	}
}

// Open implements fs.FS.
func (t tree) Open(name string) (fs.File, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid}
	}
	n := t[name]
	if n == nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	if n.mode.IsDir() {
		return &openDir{t: t, path: name, n: n}, nil
	}
	return &openFile{strings.NewReader(string(n.data)), n}, nil
}

// Name, Size, Mode, ModTime, IsDir, Sys, Type and Info make a node its own description.
func (n *node) Name() string               { return n.name }
func (n *node) Size() int64                { return int64(len(n.data)) }
func (n *node) Mode() fs.FileMode          { return n.mode }
func (n *node) ModTime() time.Time         { return time.Unix(0, 0) }
func (n *node) IsDir() bool                { return n.mode.IsDir() }
func (n *node) Sys() any                   { return nil }
func (n *node) Type() fs.FileMode          { return n.mode.Type() }
func (n *node) Info() (fs.FileInfo, error) { return n, nil }

type openFile struct {
	*strings.Reader
	n *node
}

func (f *openFile) Stat() (fs.FileInfo, error) { return f.n, nil }
func (f *openFile) Close() error               { return nil }

type openDir struct {
	t    tree
	path string
	n    *node
	next int
}

func (d *openDir) Stat() (fs.FileInfo, error) { return d.n, nil }
func (d *openDir) Close() error               { return nil }
func (d *openDir) Read([]byte) (int, error) {
	return 0, &fs.PathError{Op: "read", Path: d.path, Err: fs.ErrInvalid}
}

func (d *openDir) ReadDir(most int) (list []fs.DirEntry, err error) {
	for d.next < len(d.n.names) && (most <= 0 || len(list) < most) {
		list = append(list, d.t[path.Join(d.path, d.n.names[d.next])])
		d.next++
	}
	if most > 0 && len(list) == 0 {
		return nil, io.EOF
	}
	return list, nil
}
