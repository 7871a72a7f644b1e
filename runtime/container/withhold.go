package container

import (
	"context"
	"errors"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/tree"
	"github.com/opendsec/dsec/rootfs"
)

// withhold takes what the first phase hides out of a root before there is one: the
// layers stay as they are, and a whiteout on the disk covers each name. Nothing of
// the hidden files is ever on the disk.
func (b *build) withhold(ctx context.Context) error {
	spec := &b.rec.Request.Spec
	if b.rec.Starts > 1 || len(spec.Phases) == 0 {
		return nil
	}
	hidden := spec.HiddenIn(0)
	if len(hidden) == 0 {
		return nil
	}
	dir, err := openShelf(b.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	covers, err := b.findHidden(&shelf{dir: dir}, hidden)
	if err != nil {
		return err
	}
	upper, err := openUpper(b.dir)
	if err != nil {
		return err
	}
	defer upper.Close()
	for _, c := range covers {
		if err := c.put(upper); err != nil {
			return shelfError("hide", c.path, err)
		}
	}
	return b.prepareDir() // the work of the root that was looked at is not the next one's
}

// cover is a name to be hidden in a directory that has these times.
type cover struct {
	path  string
	times []unix.Timespec
}

func (c cover) put(upper *os.File) error {
	dir, err := strictly(upper, path.Dir(c.path), unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer dir.Close()
	err = unix.Mknodat(int(dir.Fd()), path.Base(c.path), unix.S_IFCHR, 0) // what overlayfs takes for "nothing below"
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return os.NewSyscallError("mknod", err)
	}
	return os.NewSyscallError("set times", unix.UtimesNanoAt(int(dir.Fd()), ".", c.times, 0))
}

// findHidden looks for the paths in a root made for that, has the directories they
// are in copied to the disk as they are, and notes the paths on the shelf.
func (b *build) findHidden(s *shelf, hidden []string) (covers []cover, err error) {
	root, err := b.r.mounts.Stack(rootfs.Root{User: string(b.sb.ID), Layers: digests(b.rec.Request.Layers), UserNS: b.shell.UserNS, Dir: b.dir})
	if err != nil {
		return nil, err
	}
	defer root.Close()
	for _, p := range hidden {
		names, links, err := namesOf(root, p)
		if err != nil {
			return nil, shelfError("hide", p, err)
		}
		for _, n := range names {
			c, err := raise(root, n)
			if err != nil {
				return nil, shelfError("hide", n, err)
			}
			covers = append(covers, c)
		}
		temp, err := s.begin(shelfKey(p))
		if err != nil {
			return nil, shelfError("hide", p, err)
		}
		err = s.end(shelfKey(p), temp, &shelved{Format: noteFormat, Path: p, Pristine: true, Links: linksOf(links)})
		temp.Close()
		if err != nil {
			return nil, shelfError("hide", p, err)
		}
	}
	return covers, nil
}

// namesOf are the path, if something is there, and other names of its files.
func namesOf(root *os.File, p string) (names []string, links map[string][]string, err error) {
	dir, err := strictly(root, path.Dir(p), unix.O_RDONLY|unix.O_DIRECTORY)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return nil, nil, nil
	case errors.Is(err, unix.ELOOP):
		return nil, nil, dsec.Errorf(dsec.Invalid, "hide", dsec.Quote(p), "there is a symbolic link on the way in the layers; name the path it leads to")
	case err != nil:
		return nil, nil, err
	}
	defer dir.Close()
	at := tree.Place{Dir: dir, Name: path.Base(p)}
	if _, err := at.Lstat(); errors.Is(err, unix.ENOENT) {
		return nil, nil, nil
	}
	if links, err = tree.Names(root, at); err != nil {
		return nil, nil, err
	}
	names = []string{p}
	for _, others := range links {
		for _, o := range others {
			names = append(names, "/"+o)
		}
	}
	return names, links, nil
}

// raise has overlayfs copy the directory of a name to the upper, which any change of
// it does, also one to what it is.
func raise(root *os.File, name string) (cover, error) {
	dir, err := strictly(root, path.Dir(name), unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return cover{}, err
	}
	defer dir.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return cover{}, os.NewSyscallError("stat", err)
	}
	if err := unix.Fchmod(int(dir.Fd()), st.Mode&0o7777); err != nil {
		return cover{}, os.NewSyscallError("chmod", err)
	}
	return cover{name, []unix.Timespec{st.Atim, st.Mtim}}, nil
}

// settle brings the files of a root that nobody has entered to where the phase wants
// them; at creation withhold has.
func (b *build) settle(ctx context.Context) error {
	if b.rec.phase() < 0 {
		return nil
	}
	if b.rec.Starts == 1 {
		return b.pinUsers()
	}
	s, err := b.r.openShelfOf(b.rec, b.dir, b.root, b.shell.UserNS)
	if err != nil {
		return err
	}
	defer s.close()
	return s.settle(ctx, b.rec.Request.Spec.HiddenIn(b.rec.phase()), everHidden(&b.rec.Request.Spec))
}

// everHidden are all paths that some phase hides, a directory before what is in it.
func everHidden(s *dsec.Spec) (all []string) {
	for i := range s.Phases {
		for _, p := range s.HiddenIn(i) {
			if !slices.Contains(all, p) {
				all = append(all, p)
			}
		}
	}
	slices.Sort(all)
	return all
}

func (r *Runtime) openShelfOf(rec *record, disk, root, userns *os.File) (*shelf, error) {
	dir, err := openShelf(disk)
	if err != nil {
		return nil, err
	}
	upper, err := openUpper(disk)
	if err != nil {
		dir.Close()
		return nil, err
	}
	return &shelf{root: root, upper: upper, dir: dir, uid: int(rec.UID), pristine: func(ctx context.Context) (*os.File, func(), error) {
		return r.pristine(rec, dir, userns)
	}}, nil
}

func (s *shelf) close() {
	s.dir.Close()
	s.upper.Close()
}

// pristineName is a disk of nothing, for a look at the layers.
const pristineName = "pristine" + shelfTemp

// pristine stacks the layers of a sandbox on an empty disk.
func (r *Runtime) pristine(rec *record, shelf, userns *os.File) (root *os.File, done func(), err error) {
	at := tree.Place{Dir: shelf, Name: pristineName}
	if err := tree.Remove(at); err != nil {
		return nil, nil, err
	}
	if err := unix.Mkdirat(int(shelf.Fd()), pristineName, 0o700); err != nil {
		return nil, nil, os.NewSyscallError("mkdir", err)
	}
	dir, err := linux.OpenBeneath(shelf, pristineName, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, nil, err
	}
	if err = rootfs.PrepareDir(dir, int(rec.UID), int(rec.UID)); err == nil {
		root, err = r.mounts.Stack(rootfs.Root{User: string(rec.Request.ID), Layers: digests(rec.Request.Layers), UserNS: userns, Dir: dir})
	}
	if err != nil {
		dir.Close()
		return nil, nil, err
	}
	return root, func() {
		root.Close()
		dir.Close()
		_ = tree.Remove(at) // else with the next settling
	}, nil
}

// moveFiles brings the files of a running sandbox, in which nothing runs, to where the
// i-th phase wants them.
func (r *Runtime) moveFiles(ctx context.Context, sb *sandbox, i int) error {
	spec := &sb.record().Request.Spec
	if err := r.unbind(ctx, sb); err != nil {
		return err
	}
	if err := r.keepRoot(ctx, sb); err != nil {
		return err
	}
	if all := everHidden(spec); len(all) > 0 {
		if err := r.settleRunning(ctx, sb, spec.HiddenIn(i), all); err != nil {
			return err
		}
	}
	return r.rebind(ctx, sb, spec.Phases[i].ReadOnly)
}

func (r *Runtime) settleRunning(ctx context.Context, sb *sandbox, hide, all []string) error {
	ns, err := r.hold.Namespaces(ctx, string(sb.ID))
	if err != nil {
		return err
	}
	defer ns.Close()
	disk, err := r.disks.Open(ctx, string(sb.ID))
	if err != nil {
		return err
	}
	defer disk.Close()
	sb.Mu.Lock()
	root := sb.root
	sb.Mu.Unlock()
	s, err := r.openShelfOf(sb.record(), disk, root, ns.UserNS)
	if err != nil {
		return err
	}
	defer s.close()
	return s.settle(ctx, hide, all)
}
