package container

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/tree"
)

// shelf keeps what phases hide, on the disk of the sandbox beside what it sees. Each
// hidden path has a directory there, named by a digest of it; that it is there, whole,
// says that the path is hidden. See docs/formats/phases.md.
type shelf struct {
	root  *os.File // of the sandbox, without what is mounted on it
	upper *os.File // what of it is on the disk
	dir   *os.File // the shelf
	uid   int      // who directories that were missing belong to
	// pristine opens the layers as they are without the disk.
	pristine func(ctx context.Context) (root *os.File, done func(), err error)
}

const (
	shelfName  = "hidden" // on the disk
	shelfTree  = "tree"   // what was at the path; none: nothing was
	shelfNote  = "note"   // shelved
	shelfTemp  = ".new"
	shelfGone  = ".old"
	maxNote    = 16 << 20 // bytes
	noteFormat = 1
)

// shelved is the note of a hidden path.
type shelved struct {
	Format   int      `json:"format"`
	Path     string   `json:"path"`
	Pristine bool     `json:"pristine,omitempty"` // it is in the layers as it was
	Links    []linked `json:"links,omitempty"`
}

// linked is a hidden file that has names elsewhere, which are hidden too. They are
// bytes: who made them may not know of UTF-8.
type linked struct {
	Name   []byte   `json:"name"`   // below the directory that the path is in
	Others [][]byte `json:"others"` // below the root
}

// linksOf puts the answer of tree.Names into an order.
func linksOf(names map[string][]string) (out []linked) {
	for _, name := range slices.Sorted(maps.Keys(names)) {
		l := linked{Name: []byte(name)}
		for _, o := range names[name] {
			l.Others = append(l.Others, []byte(o))
		}
		out = append(out, l)
	}
	return out
}

func shelfKey(p string) string {
	sum := sha256.Sum256([]byte(p))
	return hex.EncodeToString(sum[:16])
}

// openShelf opens the shelf of a disk, made if there is none.
func openShelf(disk *os.File) (*os.File, error) {
	if err := unix.Mkdirat(int(disk.Fd()), shelfName, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, diskError("make shelf on", disk.Name(), err)
	}
	return linux.OpenBeneath(disk, shelfName, unix.O_RDONLY|unix.O_DIRECTORY)
}

// settle hides exactly what is asked for of the paths that any phase hides. Doing it
// again changes nothing but what has come to be at a hidden path, which goes.
func (s *shelf) settle(ctx context.Context, hide, all []string) error {
	if err := s.sweep(); err != nil {
		return err
	}
	for _, p := range all { // a directory comes before what is in it
		if slices.Contains(hide, p) {
			continue
		}
		if err := s.reveal(ctx, p); err != nil {
			return shelfError("reveal", p, err)
		}
	}
	for _, p := range hide {
		if err := s.hide(ctx, p); err != nil {
			return shelfError("hide", p, err)
		}
	}
	return nil
}

func shelfError(op, p string, err error) error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return dsec.E(e.Class, op, dsec.Quote(p), err)
	}
	return diskError(op, dsec.Quote(p), err)
}

// sweep removes what earlier work left that broke off.
func (s *shelf) sweep() error {
	names, err := s.names()
	if err != nil {
		return err
	}
	for _, n := range names {
		if ext := path.Ext(n); ext == shelfTemp || ext == shelfGone {
			if err := tree.Remove(tree.Place{Dir: s.dir, Name: n}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *shelf) names() ([]string, error) {
	d, err := linux.OpenBeneath(s.dir, ".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}

// hide moves what is at a path, links on the way followed inside the root, to the
// shelf, with the other names of its files.
func (s *shelf) hide(ctx context.Context, p string) error {
	key := shelfKey(p)
	note, err := s.note(key)
	if err != nil {
		return err
	}
	dir, err := linux.OpenOnMount(s.root, path.Dir(p), unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		dir, err = nil, nil
	}
	if err != nil {
		return err
	}
	at := tree.Place{Dir: dir, Name: path.Base(p)}
	if dir != nil {
		defer dir.Close()
	}
	if note == nil {
		if note, err = s.put(key, p, at); err != nil {
			return err
		}
	}
	if err := failpoint.Hit(ctx, "container.phase.shelved"); err != nil {
		return err
	}
	if dir != nil {
		if err := tree.Remove(at); err != nil {
			return err
		}
	}
	for _, l := range note.Links {
		for _, o := range l.Others {
			if err := s.removeFile(string(o)); err != nil {
				return err
			}
		}
	}
	return nil
}

// removeFile removes another name of a hidden file.
func (s *shelf) removeFile(name string) error {
	dir, err := strictly(s.root, path.Dir(name), unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil // not a name any more
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	return tree.Remove(tree.Place{Dir: dir, Name: path.Base(name)})
}

// put copies what is at a place to the shelf; it is there when the name says so.
func (s *shelf) put(key, p string, at tree.Place) (*shelved, error) {
	n := &shelved{Format: noteFormat, Path: p}
	temp, err := s.begin(key)
	if err != nil {
		return nil, err
	}
	defer temp.Close()
	if at.Dir != nil {
		names, err := s.otherNames(at)
		if err != nil {
			return nil, err
		}
		n.Links = linksOf(names)
		err = tree.Copy(at, tree.Place{Dir: temp, Name: shelfTree})
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, err
		}
	}
	return n, s.end(key, temp, n)
}

// otherNames are those of files at and below a place. Names on the disk are compared
// there: overlayfs may show two of one file with two numbers.
func (s *shelf) otherNames(at tree.Place) (map[string][]string, error) {
	others, err := tree.Names(s.root, at)
	if err != nil || s.upper == nil {
		return others, err
	}
	where, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", at.Dir.Fd())) // without links, from the root of the mount
	if err != nil {
		return nil, err
	}
	dir, err := strictly(s.upper, where, unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return others, nil // none of it is on the disk
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	more, err := tree.Names(s.upper, tree.Place{Dir: dir, Name: at.Name})
	for first, names := range more {
		if others == nil {
			others = map[string][]string{}
		}
		for _, n := range names {
			if !slices.Contains(others[first], n) {
				others[first] = append(others[first], n)
			}
		}
	}
	return others, err
}

func (s *shelf) begin(key string) (*os.File, error) {
	if err := tree.Remove(tree.Place{Dir: s.dir, Name: key + shelfTemp}); err != nil {
		return nil, err
	}
	if err := unix.Mkdirat(int(s.dir.Fd()), key+shelfTemp, 0o700); err != nil {
		return nil, os.NewSyscallError("mkdir", err)
	}
	return linux.OpenBeneath(s.dir, key+shelfTemp, unix.O_RDONLY|unix.O_DIRECTORY)
}

func (s *shelf) end(key string, temp *os.File, n *shelved) error {
	b, err := json.Marshal(n)
	if err == nil && len(b) > maxNote { // which nobody would read again
		err = dsec.Errorf(dsec.ResourceExhausted, "note hidden path", dsec.Quote(n.Path), "its files have so many other names that the note has %d bytes, at most %d", len(b), maxNote)
	}
	if err != nil {
		return err
	}
	fd, err := unix.Openat(int(temp.Fd()), shelfNote, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return os.NewSyscallError("create note", err)
	}
	f := os.NewFile(uintptr(fd), shelfNote)
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.NewSyscallError("rename", unix.Renameat(int(s.dir.Fd()), key+shelfTemp, int(s.dir.Fd()), key))
}

// note reads that of a hidden path; nil: it is not hidden.
func (s *shelf) note(key string) (*shelved, error) {
	f, err := linux.OpenBeneath(s.dir, key+"/"+shelfNote, unix.O_RDONLY)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxNote+1))
	if err != nil {
		return nil, err
	}
	return decodeNote(b)
}

func decodeNote(b []byte) (*shelved, error) {
	n := &shelved{}
	if len(b) > maxNote {
		return nil, dsec.Errorf(dsec.Corrupt, "read note of hidden path", "", "more than %d bytes", maxNote)
	}
	if err := json.Unmarshal(b, n); err != nil {
		return nil, dsec.E(dsec.Corrupt, "read note of hidden path", "", err)
	}
	if n.Format != noteFormat {
		return nil, dsec.Errorf(dsec.Unsupported, "read note of hidden path", "", "format %d, this program reads %d", n.Format, noteFormat)
	}
	if !path.IsAbs(n.Path) {
		return nil, dsec.Errorf(dsec.Corrupt, "read note of hidden path", "", "%s is not absolute", dsec.Quote(n.Path))
	}
	return n, nil
}

// reveal puts what a path hid back, in place of whatever has come to be there.
func (s *shelf) reveal(ctx context.Context, p string) error {
	key := shelfKey(p)
	note, err := s.note(key)
	if err != nil || note == nil {
		return err
	}
	from, done, err := s.source(ctx, key, note)
	if err != nil {
		return err
	}
	defer done()
	_, err = from.Lstat()
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	if err == nil {
		err = s.restore(ctx, p, from, note)
	} else { // nothing was there, and nothing is
		err = s.removeFile(p)
	}
	if err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, "container.phase.revealed"); err != nil {
		return err
	}
	d := int(s.dir.Fd())
	if err := unix.Renameat(d, key, d, key+shelfGone); err != nil {
		return os.NewSyscallError("rename", err)
	}
	return tree.Remove(tree.Place{Dir: s.dir, Name: key + shelfGone})
}

// source is where the hidden files are.
func (s *shelf) source(ctx context.Context, key string, note *shelved) (at tree.Place, done func(), err error) {
	if !note.Pristine {
		d, err := linux.OpenBeneath(s.dir, key, unix.O_RDONLY|unix.O_DIRECTORY)
		return tree.Place{Dir: d, Name: shelfTree}, func() { d.Close() }, err
	}
	root, leave, err := s.pristine(ctx)
	if err != nil {
		return at, func() {}, err
	}
	dir, err := strictly(root, path.Dir(note.Path), unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return tree.Place{Dir: root, Name: shelfKey(note.Path)}, leave, nil // which is not there either
	}
	if err != nil {
		leave()
		return at, func() {}, err
	}
	return tree.Place{Dir: dir, Name: path.Base(note.Path)}, func() { dir.Close(); leave() }, nil
}

func (s *shelf) restore(ctx context.Context, p string, from tree.Place, note *shelved) error {
	dir, err := s.directories(path.Dir(p))
	if err != nil {
		return err
	}
	defer dir.Close()
	to := tree.Place{Dir: dir, Name: path.Base(p)}
	if err := tree.Remove(to); err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, "container.phase.restoring"); err != nil {
		return err
	}
	if err := tree.Copy(from, to); err != nil {
		return err
	}
	for _, l := range note.Links {
		for _, o := range l.Others {
			if err := s.relink(dir, rebase(string(l.Name), to.Name), string(o)); err != nil {
				return err
			}
		}
	}
	return nil
}

// rebase gives a path that begins at one name the other.
func rebase(at, name string) string {
	for i := range at {
		if at[i] == '/' {
			return name + at[i:]
		}
	}
	return name
}

// relink gives a restored file its other name back, where nothing has come to be.
func (s *shelf) relink(dir *os.File, file, other string) error {
	to, err := strictly(s.root, path.Dir(other), unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return err
	}
	defer to.Close()
	err = unix.Linkat(int(dir.Fd()), file, int(to.Fd()), path.Base(other), 0)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return os.NewSyscallError("link", err)
}

// directories opens a directory each part of which is one: what is there instead gives
// way, and what is missing is made.
func (s *shelf) directories(p string) (*os.File, error) {
	dir, err := strictly(s.root, "/", unix.O_RDONLY|unix.O_DIRECTORY)
	for _, name := range splitPath(p) {
		if err != nil {
			return nil, err
		}
		next, nerr := linux.OpenBeneath(dir, name, unix.O_RDONLY|unix.O_DIRECTORY)
		if errors.Is(nerr, unix.ENOENT) || errors.Is(nerr, unix.ENOTDIR) || errors.Is(nerr, unix.ELOOP) {
			next, nerr = s.directory(dir, name)
		}
		dir.Close()
		dir, err = next, nerr
	}
	return dir, err
}

func (s *shelf) directory(dir *os.File, name string) (*os.File, error) {
	if err := tree.Remove(tree.Place{Dir: dir, Name: name}); err != nil {
		return nil, err
	}
	if err := unix.Mkdirat(int(dir.Fd()), name, 0o755); err != nil {
		return nil, os.NewSyscallError("mkdir", err)
	}
	d, err := linux.OpenBeneath(dir, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	if err := d.Chown(s.uid, s.uid); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

func splitPath(p string) (out []string) {
	for _, a := range ancestors([]string{p}) {
		if p != "/" {
			out = append(out, path.Base(a))
		}
	}
	return out
}
