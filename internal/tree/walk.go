package tree

import (
	"errors"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

// spare is how much deeper Remove goes, for a copy that lies in a directory of its maker's.
const spare = 8

// Remove removes what is there, whatever it is; nothing is no error.
func Remove(p Place) error { return remove(p, 0) }

func remove(p Place, depth int) error {
	st, err := p.Lstat()
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return wrap("unlink", p.Name, unix.Unlinkat(p.fd(), p.Name, 0))
	}
	if depth == maxDepth+spare {
		return wrap("remove", p.Name, unix.ELOOP)
	}
	dir, err := openDir(p)
	if err != nil {
		return err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := remove(Place{dir, n}, depth+1); err != nil {
			return below(p.Name, err)
		}
	}
	return wrap("rmdir", p.Name, unix.Unlinkat(p.fd(), p.Name, unix.AT_REMOVEDIR))
}

// Walk calls fn with everything at and below p, directories before what is in them,
// with its path below p.Dir. Directories that are mounts of their own are told and
// not entered.
func Walk(p Place, fn func(p Place, path string, st *unix.Stat_t) error) error {
	return walk(p, p.Name, fn, 0)
}

func walk(p Place, at string, fn func(Place, string, *unix.Stat_t) error, depth int) error {
	st, err := p.Lstat()
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	err = fn(p, at, &st)
	if err == errSkip {
		return nil
	}
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return err
	}
	if depth == maxDepth {
		return wrap("walk", at, unix.ELOOP)
	}
	dir, err := openDir(p)
	if errors.Is(err, unix.EXDEV) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := walk(Place{dir, n}, path.Join(at, n), fn, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// Names tells which files at and below p have names elsewhere in root: the first
// name below p, as a path below p.Dir, to the others, as paths below root, in which
// p is. The whole root is searched if there is any such file, and else nothing is.
func Names(root *os.File, p Place) (map[string][]string, error) {
	first, count := map[file]string{}, map[file]uint64{}
	links := map[file]uint64{}
	var size names
	err := Walk(p, func(_ Place, at string, st *unix.Stat_t) error {
		if st.Mode&unix.S_IFMT == unix.S_IFDIR || st.Nlink < 2 {
			return nil
		}
		f := fileOf(st)
		if count[f]++; count[f] == 1 {
			first[f], links[f] = at, uint64(st.Nlink)
			return size.add(at)
		}
		return nil
	})
	for f, n := range count {
		if n >= links[f] { // all of them are here
			delete(first, f)
		}
	}
	if err != nil || len(first) == 0 {
		return nil, err
	}
	var mine unix.Stat_t
	if err := unix.Fstat(p.fd(), &mine); err != nil {
		return nil, wrap("stat", ".", err)
	}
	others := map[string][]string{}
	err = Walk(Place{root, "."}, func(q Place, at string, st *unix.Stat_t) error {
		var in unix.Stat_t
		if q.Name == p.Name && unix.Fstat(q.fd(), &in) == nil && fileOf(&in) == fileOf(&mine) {
			return errSkip
		}
		if name, ok := first[fileOf(st)]; ok && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			others[name] = append(others[name], at)
			return size.add(at)
		}
		return nil
	})
	return others, err
}

// names counts what paths that are kept take of memory: who made them decides how
// many there are, and how long.
type names int

const (
	maxNames  = 32 << 20 // bytes
	aroundOne = 64       // of each name
)

func (n *names) add(at string) error {
	if *n += names(len(at) + aroundOne); *n > maxNames {
		return wrap("keep the names of", at[:min(len(at), 64)], unix.EMLINK)
	}
	return nil
}

// errSkip has Walk not enter what it was called with.
var errSkip = errors.New("not entered")

// Part gives files at and below p that have names elsewhere a file of their own,
// with the same content; names below p that were one file stay one.
func Part(p Place) error {
	type name struct {
		at    string
		links uint64
	}
	all := map[file][]name{}
	var size names
	err := Walk(p, func(_ Place, at string, st *unix.Stat_t) error {
		if st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink > 1 {
			all[fileOf(st)] = append(all[fileOf(st)], name{at, uint64(st.Nlink)})
			return size.add(at)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, names := range all {
		if uint64(len(names)) >= names[0].links {
			continue
		}
		for i, n := range names {
			if err := replace(p.Dir, n.at, names[0].at, i == 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// partName cannot be a name that is in use for long: what has it is replaced.
const partName = ".dsec-part"

// replace puts a copy of at, or else a link to first, in its place. Both are paths
// below dir.
func replace(dir *os.File, at, first string, alone bool) error {
	here, err := openBelow(dir, path.Dir(at))
	if err != nil {
		return err
	}
	defer here.Close()
	old, to := Place{here, path.Base(at)}, Place{here, partName}
	if err := Remove(to); err != nil {
		return err
	}
	if alone {
		err = Copy(old, to)
	} else {
		c := &copier{to: dir}
		err = c.link(first, to)
	}
	if err != nil {
		return err
	}
	return wrap("rename", old.Name, unix.Renameat(to.fd(), to.Name, old.fd(), old.Name))
}
