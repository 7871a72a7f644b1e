package watch

import (
	"encoding/binary"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/procinfo"
	"github.com/opendsec/dsec/rootfs"
)

const nameEvents = unix.FAN_CREATE | unix.FAN_DELETE | unix.FAN_MOVED_TO | unix.FAN_MOVED_FROM | unix.FAN_ONDIR

// written: a file that was open for writing is closed.
func (w *Witness) written(e event) {
	st, err := statx(e.fd)
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return
	}
	w.mu.Lock()
	x := w.mount[st.Mnt_id]
	own := x != nil
	if !own {
		x = w.device[unix.Mkdev(st.Dev_major, st.Dev_minor)]
	}
	w.mu.Unlock()
	if x == nil {
		return
	}
	link, err := procinfo.Link(e.fd)
	if err != nil {
		return
	}
	name := procinfo.Inside(link, x.prefix)
	switch {
	case own && x.list.Match(name):
		w.tell(x, e.pid, name, dsec.WriteChanged)
	case !own && (x.list.Match(name) || x.list.MatchName(path.Base(name))):
		w.tell(x, e.pid, name, dsec.WriteChanged+", by another mount")
	}
	if st.Nlink > 1 { // it may have a watched name as well
		x.look.want()
	}
}

// named: a name in the upper of a sandbox came, or went.
func (w *Witness) named(e event) {
	handle, name, ok := decodeName(e.info)
	if !ok {
		return
	}
	onDir := e.mask&unix.FAN_ONDIR != 0
	if onDir && e.mask&(unix.FAN_MOVED_TO|unix.FAN_MOVED_FROM) != 0 {
		w.dirs.clear()
	}
	if onDir && e.mask&^uint64(unix.FAN_ONDIR) == unix.FAN_CREATE {
		return // empty
	}
	id, dir, ok := w.place(handle)
	if !ok {
		return
	}
	w.mu.Lock()
	x := w.by[id]
	w.mu.Unlock()
	if x == nil {
		return
	}
	target := path.Join(dir, name)
	if onDir {
		w.moved(x, e, target)
		return
	}
	if x.list.Match(target) {
		if what := w.outcome(x, target, e.mask); what != "" {
			w.tell(x, e.pid, target, what)
		}
	}
}

// decodeName reads the record of a directory's handle and a name in it.
func decodeName(b []byte) (handle unix.FileHandle, name string, ok bool) {
	const fixed = 20 // header, file system, size and kind of the handle
	for len(b) >= 4 {
		size := int(binary.NativeEndian.Uint16(b[2:]))
		if size < 4 || size > len(b) {
			return handle, "", false
		}
		if b[0] != unix.FAN_EVENT_INFO_TYPE_DFID_NAME || size < fixed {
			b = b[size:]
			continue
		}
		n := int(binary.NativeEndian.Uint32(b[12:]))
		if n < 0 || n > size-fixed {
			return handle, "", false
		}
		name, _, _ = strings.Cut(string(b[fixed+n:size]), "\x00")
		return unix.NewFileHandle(int32(binary.NativeEndian.Uint32(b[16:])), b[fixed:fixed+n]), name, name != ""
	}
	return handle, "", false
}

// place says which sandbox's directory a handle is, inside of it.
func (w *Witness) place(h unix.FileHandle) (id dsec.SandboxID, dir string, ok bool) {
	key := string(h.Bytes())
	if p, ok := w.dirs.get(key); ok {
		return p.id, p.dir, p.id != ""
	}
	fd, err := unix.OpenByHandleAt(int(w.cfg.Pool.Fd()), h, unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return "", "", false // removed since
	}
	link, err := procinfo.Link(fd)
	_ = unix.Close(fd) // only named
	if err != nil || strings.HasSuffix(link, " (deleted)") {
		return "", "", false
	}
	var p place
	rest, _ := strings.CutPrefix(link, w.pool+"/")
	if name, below, found := strings.Cut(rest, "/"); found && (below == rootfs.Upper || strings.HasPrefix(below, rootfs.Upper+"/")) {
		p = place{dsec.SandboxID(name), "/" + strings.TrimPrefix(strings.TrimPrefix(below, rootfs.Upper), "/")}
	}
	w.dirs.put(key, p)
	return p.id, p.dir, p.id != ""
}

// upper is the path of something on the disk of a sandbox; only for calls that
// follow no link at its end.
func (w *Witness) upper(x *subject, target string) string {
	return "/proc/self/fd/" + strconv.Itoa(int(w.cfg.Pool.Fd())) + "/" + string(x.id) + "/" + rootfs.Upper + target
}

// moved: a directory was renamed or removed. One of a layer that is copied up is put in
// place by a rename too; then it has the mark of neither a renamed nor a new one.
func (w *Witness) moved(x *subject, e event, target string) {
	at := w.upper(x, target)
	what := dsec.WriteRemoved
	if e.mask&(unix.FAN_MOVED_TO|unix.FAN_CREATE) != 0 {
		if _, err := os.Lstat(at); err == nil {
			if !hasMark(at, "redirect") && !hasMark(at, "opaque") && hasMark(at, "origin") {
				return
			}
			what = dsec.WriteMoved
		}
	}
	x.look.want()
	if x.list.MatchBelow(target) {
		w.tell(x, e.pid, target, what)
	}
}

// outcome says what became of a name: events of one name are told together, so the
// disk decides. A removed file of a layer is a device there.
func (w *Witness) outcome(x *subject, target string, mask uint64) string {
	var st unix.Stat_t
	at := w.upper(x, target)
	err := unix.Lstat(at, &st)
	switch {
	case err != nil, st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0:
		return dsec.WriteRemoved
	case mask&(unix.FAN_CREATE|unix.FAN_MOVED_TO) == 0:
		return "" // removed, and there again: which another event tells
	case mask&unix.FAN_MOVED_TO != 0:
		return dsec.WriteMoved
	case hasMark(at, "origin"):
		return dsec.WriteOpened
	}
	return dsec.WriteMade
}

// hasMark reports whether overlayfs left that attribute.
func hasMark(at, name string) bool {
	_, err := unix.Lgetxattr(at, "trusted.overlay."+name, nil)
	return err == nil
}

// place is a directory; id is "" of one that is no sandbox's.
type place struct {
	id  dsec.SandboxID
	dir string
}

const mostDirs = 8192

// dirCache has the places of handles until a directory is renamed. Only the reader of names uses it.
type dirCache struct{ known map[string]place }

func (c *dirCache) get(key string) (place, bool) { p, ok := c.known[key]; return p, ok }
func (c *dirCache) clear()                       { clear(c.known) }

func (c *dirCache) put(key string, p place) {
	if c.known == nil {
		c.known = map[string]place{}
	}
	if len(c.known) >= mostDirs {
		clear(c.known)
	}
	c.known[key] = p
}
