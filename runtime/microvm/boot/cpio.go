package boot

import (
	"bufio"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
)

// Archive writes a cpio of the kind "newc", which the kernel unpacks as its
// first root file system. Everything in it belongs to root and is of the
// beginning of 1970, and inodes are numbered as they come, so that the same
// calls write the same bytes. Two archives one behind the other are one to the
// kernel, the second over the first.
type Archive struct {
	w     *bufio.Writer
	at    int64
	inode int
	names map[string]bool // path → it is a directory
	err   error
}

// Kinds of files in a mode.
const (
	kindDir  = 0o040000
	kindFile = 0o100000
	kindChar = 0o020000
)

// maxMember is the largest file of an archive; its size has eight hex digits.
const maxMember = 1<<32 - 1

// NewArchive begins an archive.
func NewArchive(w io.Writer) *Archive {
	return &Archive{w: bufio.NewWriterSize(w, 1<<18), names: map[string]bool{}}
}

// Dir makes a directory and those above it, if they are not there.
func (a *Archive) Dir(name string) {
	if name == "." || name == "/" || a.names[name] || a.err != nil {
		return
	}
	a.Dir(path.Dir(name))
	a.entry(name, kindDir|0o755, 0, [2]uint32{}, nil)
}

// File makes a file of exactly size bytes, and the directories above it.
func (a *Archive) File(name string, mode uint32, size int64, content io.Reader) {
	a.Dir(path.Dir(name))
	a.entry(name, kindFile|mode&0o7777, size, [2]uint32{}, content)
}

// Text makes a file of a text.
func (a *Archive) Text(name, content string, mode uint32) {
	a.File(name, mode, int64(len(content)), strings.NewReader(content))
}

// Device makes a character device.
func (a *Archive) Device(name string, mode, major, minor uint32) {
	a.Dir(path.Dir(name))
	a.entry(name, kindChar|mode&0o7777, 0, [2]uint32{major, minor}, nil)
}

// Close ends the archive, and returns the first error of all calls.
func (a *Archive) Close() error {
	if a.err == nil {
		a.inode = -1 // the end mark has the inode 0
		a.write("TRAILER!!!", 0, 0, [2]uint32{}, nil)
	}
	if a.err == nil {
		if err := a.w.Flush(); err != nil {
			a.err = diskError("write archive", "end", err)
		}
	}
	return a.err
}

// entry refuses names that the kernel would place elsewhere, or that are there.
func (a *Archive) entry(name string, mode uint32, size int64, dev [2]uint32, content io.Reader) {
	const op = "write archive"
	if a.err != nil {
		return
	}
	_, twice := a.names[name]
	switch {
	case name == "" || name[0] == '/' || path.Clean(name) != name || name == "." || name == ".." || strings.HasPrefix(name, "../") ||
		strings.Contains(name, "\x00") || len(name) > 4000 || name == "TRAILER!!!":
		a.err = dsec.Errorf(dsec.Invalid, op, dsec.Quote(name), "it is no path in an archive")
	case twice:
		a.err = dsec.Errorf(dsec.Invalid, op, dsec.Quote(name), "it is there twice")
	case size < 0 || size > maxMember:
		a.err = dsec.Errorf(dsec.Invalid, op, dsec.Quote(name), "it has %d bytes, at most %d", size, int64(maxMember))
	default:
		for above := path.Dir(name); above != "."; above = path.Dir(above) {
			if !a.names[above] {
				a.err = dsec.Errorf(dsec.Invalid, op, dsec.Quote(name), "%s is no directory", dsec.Quote(above))
				return
			}
		}
		a.names[name] = mode&0o170000 == kindDir
		a.write(name, mode, size, dev, content)
	}
}

func (a *Archive) write(name string, mode uint32, size int64, dev [2]uint32, content io.Reader) {
	a.inode++
	n, err := fmt.Fprintf(a.w, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.inode, mode, 0, 0, 1, 0, size, 0, 0, dev[0], dev[1], len(name)+1, 0, name)
	a.at += int64(n)
	if err == nil {
		err = a.pad()
	}
	if err == nil && content != nil {
		var m int64
		m, err = io.CopyN(a.w, content, size)
		a.at += m
		if err == nil {
			err = a.pad()
		}
	}
	if err != nil {
		a.err = diskError("write archive", name, err)
	}
}

func (a *Archive) pad() error {
	n := -a.at & 3
	a.at += n
	_, err := a.w.Write(make([]byte, n))
	return err
}

// Directories that every initramfs has, to be mounted on.
var emptyDirs = []string{"dev", "mnt", "proc", "root", "run", "sys", "tmp"}

// writeInitramfs writes the layout of docs/formats/boot.md. Modules are in the
// order of loading, files in that of their names.
func writeInitramfs(w io.Writer, files, modules []File) error {
	a := NewArchive(w)
	for _, d := range emptyDirs {
		a.Dir(d)
	}
	a.Device("dev/console", 0o600, 5, 1) // init's streams, before it mounts /dev
	var list strings.Builder
	for _, m := range modules {
		name := "modules/" + m.Name + ".ko"
		a.Text(name, string(m.Content), 0o644)
		list.WriteString(name + "\n")
	}
	a.Text("modules.order", list.String(), 0o644)
	files = slices.Clone(files)
	slices.SortStableFunc(files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	for _, f := range files {
		a.Text(f.Name, string(f.Content), f.Mode)
	}
	return a.Close()
}
