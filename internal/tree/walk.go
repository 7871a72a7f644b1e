package tree

import (
	"errors"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

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
	if depth == maxDepth {
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
	err := Walk(p, func(_ Place, at string, st *unix.Stat_t) error {
		if st.Mode&unix.S_IFMT == unix.S_IFDIR || st.Nlink < 2 {
			return nil
		}
		f := fileOf(st)
		if count[f]++; count[f] == 1 {
			first[f], links[f] = at, uint64(st.Nlink)
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
		}
		return nil
	})
	return others, err
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
	err := Walk(p, func(_ Place, at string, st *unix.Stat_t) error {
		if st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink > 1 {
			all[fileOf(st)] = append(all[fileOf(st)], name{at, uint64(st.Nlink)})
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
		first := Place{}
		for i, n := range names {
			dir, err := openAt(Place{p.Dir, path.Dir(n.at)}, unix.O_RDONLY|unix.O_DIRECTORY)
			if err != nil {
				return err
			}
			defer dir.Close()
			at := Place{dir, path.Base(n.at)}
			if err := replace(at, first, i == 0); err != nil {
				return err
			}
			if i == 0 {
				first = at
			}
		}
	}
	return nil
}

// partName cannot be a name that is in use for long: what has it is replaced.
const partName = ".dsec-part"

// replace puts a copy of at, or with first a link to that, in its place.
func replace(at, first Place, alone bool) error {
	to := Place{at.Dir, partName}
	if err := Remove(to); err != nil {
		return err
	}
	var err error
	if alone {
		err = Copy(at, to)
	} else {
		err = wrap("link", at.Name, unix.Linkat(first.fd(), first.Name, to.fd(), to.Name, 0))
	}
	if err != nil {
		return err
	}
	return wrap("rename", at.Name, unix.Renameat(to.fd(), to.Name, at.fd(), at.Name))
}
