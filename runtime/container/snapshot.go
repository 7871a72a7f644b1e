package container

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
)

// Names of whiteouts in a layer tar.
const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
	overlayXattr   = "trusted.overlay."
)

// ours are the files that setup writes: they describe the sandbox, not its content.
var ours = []string{"etc/hosts", "etc/hostname", "etc/resolv.conf"}

// Snapshot writes what a stopped or paused sandbox changed as a layer tar.
func (r *Runtime) Snapshot(ctx context.Context, id dsec.SandboxID, w runtime.TarSink) error {
	const op = "snapshot sandbox"
	sb, err := r.acquire(ctx, op, id)
	if err != nil {
		return err
	}
	defer sb.unlock()
	if p := sb.getPhase(); p != stopped && !(p == running && sb.isPaused()) {
		return dsec.Errorf(dsec.IllegalState, op, string(id), "it is neither stopped nor paused")
	}
	if err := r.closeDiskShell(ctx, sb); err != nil { // its mount is of the same upper
		return r.wrap(op, id, err)
	}
	dir, err := r.disks.Open(ctx, string(id))
	if err != nil {
		return r.wrap(op, id, err)
	}
	defer dir.Close()
	upper, err := linux.OpenBeneath(dir, rootfs.Upper, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return dsec.E(dsec.Internal, op, string(id), err)
	}
	defer upper.Close()
	t := &diffTar{ctx: ctx, tw: tar.NewWriter(w), base: sb.record().UID, links: map[[2]uint64]string{}}
	merged, done, err := r.merged(ctx, sb, dir)
	if err != nil {
		return r.wrap(op, id, err)
	}
	defer done()
	t.merged = merged
	if err := t.walk(upper, ""); err != nil {
		return dsec.E(classOfWalk(err), op, string(id), err)
	}
	if err := t.tw.Close(); err != nil {
		return dsec.E(dsec.ClassOf(err), op, string(id), err)
	}
	return nil
}

func classOfWalk(err error) dsec.Class {
	if c := dsec.ClassOf(err); c != dsec.Internal {
		return c
	}
	return dsec.Internal
}

// merged returns the root as the sandbox sees it: the one that is mounted, or
// one made for the occasion.
func (r *Runtime) merged(ctx context.Context, sb *sandbox, dir *os.File) (*os.File, func(), error) {
	sb.mu.Lock()
	root := sb.root
	sb.mu.Unlock()
	if root != nil {
		return root, func() {}, nil
	}
	if sb.getPhase() == running { // adopted: only the hold can reach in
		return nil, func() {}, nil
	}
	user := string(sb.id) + ".snapshot"
	rec := sb.record()
	if err := r.mounts.Use(ctx, user, rec.Request.Layers.Layers); err != nil {
		return nil, nil, err
	}
	err := rootfs.PrepareDir(dir, int(rec.UID), int(rec.UID))
	if err == nil {
		root, err = r.mounts.Stack(rootfs.Root{User: user, Layers: digests(rec.Request.Layers), Dir: dir})
	}
	if err != nil {
		r.mounts.Unuse(user)
		return nil, nil, err
	}
	return root, func() { root.Close(); r.mounts.Unuse(user) }, nil
}

// diffTar turns an upper directory into a layer tar.
type diffTar struct {
	ctx    context.Context
	tw     *tar.Writer
	base   uint32   // host uid of the sandbox's root
	merged *os.File // nil: a renamed lower directory cannot be followed
	links  map[[2]uint64]string
}

// walk writes the entries of an upper directory.
func (t *diffTar) walk(dir *os.File, name string) error {
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return err
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	for _, e := range entries {
		if err := t.ctx.Err(); err != nil {
			return err
		}
		p := path.Join(name, e.Name())
		if slices.Contains(ours, p) {
			continue
		}
		if err := t.entry(dir, e.Name(), p); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	return nil
}

func (t *diffTar) entry(dir *os.File, base, p string) error {
	f, st, err := openEntry(dir, base)
	if err != nil {
		return err
	}
	defer f.Close()
	if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 {
		return t.tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: path.Join(path.Dir(p), whiteoutPrefix+base), Mode: 0o600})
	}
	xattrs, err := readXattrs(f)
	if err != nil {
		return err
	}
	redirected := xattrs[overlayXattr+"redirect"] != ""
	opaque := xattrs[overlayXattr+"opaque"] == "y"
	if err := t.write(dir, f, st, p, xattrs); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil
	}
	if opaque || redirected {
		if err := t.tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: path.Join(p, opaqueName), Mode: 0o600}); err != nil {
			return err
		}
	}
	if !redirected {
		sub, err := linux.OpenBeneath(dir, base, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		defer sub.Close()
		return t.walk(sub, p)
	}
	// A lower directory under a new name: its content is in the layers, so the tar
	// gets all of it as the sandbox sees it.
	if t.merged == nil {
		return dsec.Errorf(dsec.IllegalState, "follow renamed directory", p, "stop the sandbox first")
	}
	sub, err := linux.OpenBeneath(t.merged, p, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer sub.Close()
	return t.walk(sub, p)
}

// openEntry opens anything without side effects; only regular files can be read.
func openEntry(dir *os.File, base string) (*os.File, *unix.Stat_t, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, nil, err
	}
	flags := unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		flags = unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC | unix.O_NONBLOCK
	}
	fd, err := unix.Openat(int(dir.Fd()), base, flags, 0)
	if err != nil {
		return nil, nil, err
	}
	f := os.NewFile(uintptr(fd), base)
	if err := unix.Fstat(fd, &st); err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, &st, nil
}

var tarTypes = map[uint32]byte{unix.S_IFREG: tar.TypeReg, unix.S_IFDIR: tar.TypeDir, unix.S_IFLNK: tar.TypeSymlink,
	unix.S_IFIFO: tar.TypeFifo, unix.S_IFCHR: tar.TypeChar, unix.S_IFBLK: tar.TypeBlock}

// write writes one entry that is no whiteout.
func (t *diffTar) write(dir, f *os.File, st *unix.Stat_t, p string, xattrs map[string]string) error {
	kind, ok := tarTypes[st.Mode&unix.S_IFMT]
	if !ok {
		return nil // a socket means nothing without its process
	}
	h := &tar.Header{Typeflag: kind, Name: p, Mode: int64(st.Mode & 0o7777), Uid: t.inside(st.Uid), Gid: t.inside(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX, PAXRecords: map[string]string{}}
	for k, v := range xattrs {
		if !strings.HasPrefix(k, overlayXattr) {
			h.PAXRecords["SCHILY.xattr."+k] = t.xattr(k, v)
		}
	}
	switch kind {
	case tar.TypeDir:
		h.Name += "/"
	case tar.TypeSymlink:
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(int(dir.Fd()), path.Base(p), buf)
		if err != nil {
			return err
		}
		h.Linkname = string(buf[:n])
	case tar.TypeChar, tar.TypeBlock:
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	case tar.TypeReg:
		h.Size = st.Size
	}
	if st.Nlink > 1 && kind != tar.TypeDir {
		key := [2]uint64{st.Dev, st.Ino}
		if first, seen := t.links[key]; seen {
			h.Typeflag, h.Linkname, h.Size, h.PAXRecords = tar.TypeLink, first, 0, nil
			return t.tw.WriteHeader(h)
		}
		t.links[key] = p
	}
	if err := t.tw.WriteHeader(h); err != nil || kind != tar.TypeReg {
		return err
	}
	n, err := io.Copy(t.tw, io.LimitReader(f, st.Size))
	if err == nil && n < st.Size {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// inside translates an id. In the upper ids are the machine's; in a merged
// view made without a user namespace those of layers are already the sandbox's.
func (t *diffTar) inside(id uint32) int {
	if id >= t.base && id < t.base+idCount {
		return int(id - t.base)
	}
	if id < idCount {
		return int(id)
	}
	return 65534
}

// xattr translates file capabilities that name the root they are for back to
// the form without (version 2): in a layer they are for whoever is root.
func (t *diffTar) xattr(name, value string) string {
	const v3size, revision, rootID = 24, 3, 20 // bytes: whole, of the revision number, of the root's id
	if name != "security.capability" || len(value) != v3size || value[revision] != 3 {
		return value
	}
	return value[:revision] + "\x02" + value[revision+1:rootID]
}

func readXattrs(f *os.File) (map[string]string, error) {
	p := fmt.Sprintf("/proc/self/fd/%d", f.Fd()) // works for O_PATH too
	buf := make([]byte, 64<<10)
	n, err := unix.Listxattr(p, buf)
	if errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.EPERM) || n == 0 && err == nil {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	val := make([]byte, 64<<10)
	for name := range strings.SplitSeq(strings.TrimRight(string(buf[:n]), "\x00"), "\x00") {
		m, err := unix.Getxattr(p, name, val)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return nil, err
		}
		out[name] = string(val[:m])
	}
	return out, nil
}
