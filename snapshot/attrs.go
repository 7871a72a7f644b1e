package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/linux"
)

// overlaid is what overlayfs noted on a directory of an upper.
type overlaid struct{ opaque, redirect bool }

func (o *overlaid) note(key string, value []byte) {
	switch key {
	case opaqueXattr:
		o.opaque = string(value) == "y"
	case redirectXattr:
		o.redirect = len(value) > 0
	}
}

// describe fills in owner, time and attributes.
func (p *packer) describe(n *erofs.Inode, f *os.File, st *unix.Stat_t, name string) (over overlaid, err error) {
	n.UID, n.GID = p.src.inside(st.Uid), p.src.inside(st.Gid)
	n.Mtime, n.Nsec = st.Mtim.Sec, uint32(st.Mtim.Nsec)
	err = eachXattr(f, func(key string, value []byte) error {
		over.note(key, value)
		if value = p.src.attribute(key, value); value == nil {
			return nil
		}
		if p.attrs -= int64(len(key) + len(value)); p.attrs < 0 {
			return bad("attributes of more than %d bytes in all", int64(maxAttrs))
		}
		p.scrub.text(strings.TrimPrefix(name, "/"), "attribute "+key, string(value))
		if err := n.SetXattr(key, value); err != nil {
			return bad("%w", err)
		}
		return nil
	})
	if err != nil {
		return over, fmt.Errorf("%s: %w", name, err)
	}
	return over, nil
}

// inside translates an id.
func (s *Source) inside(id uint32) uint32 {
	const nobody = 65534
	switch {
	case id >= s.Base && id-s.Base < s.IDs:
		return id - s.Base
	case id < s.IDs:
		return id
	}
	return nobody
}

// attribute is the value that an attribute has in the layer, nil if none.
func (s *Source) attribute(key string, value []byte) []byte {
	switch {
	case isOverlays(key), !erofs.KnownXattr(key), key == "security.selinux": // a label of this machine's policy
		return nil
	case key == "security.capability":
		return s.capability(value)
	case key == "system.posix_acl_access", key == "system.posix_acl_default":
		return s.acl(value)
	}
	return value
}

// capability takes the root they are for off file capabilities: in a layer
// they are for whoever is root. Those for another are nobody's.
func (s *Source) capability(v []byte) []byte {
	const v3size, revision, rootID = 24, 3, 20 // bytes: whole, of the revision number, of the root's id
	if len(v) != v3size || v[revision] != 3 {
		return v
	}
	if id := binary.LittleEndian.Uint32(v[rootID:]); id != s.Base && id != 0 {
		return nil
	}
	out := append([]byte(nil), v[:rootID]...)
	out[revision] = 2
	return out
}

// acl translates the ids of the users and groups an ACL names.
func (s *Source) acl(v []byte) []byte {
	const head, size, user, group = 4, 8, 2, 8 // bytes of the header and an entry; tags
	out := append([]byte(nil), v...)
	for e := head; e+size <= len(out); e += size {
		if tag := binary.LittleEndian.Uint16(out[e:]); tag == user || tag == group {
			id := binary.LittleEndian.Uint32(out[e+4:])
			binary.LittleEndian.PutUint32(out[e+4:], s.inside(id))
		}
	}
	return out
}

// eachXattr reads the attributes of what is open, one after the other. One that
// goes away meanwhile was not there.
func eachXattr(f *os.File, fn func(key string, value []byte) error) error {
	list, get := fdXattrs(f)
	names, err := linux.Growing(list)
	if errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.EPERM) {
		return nil
	}
	if err != nil || len(names) == 0 {
		return err
	}
	for key := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		value, err := linux.Growing(func(b []byte) (int, error) { return get(key, b) })
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return fmt.Errorf("attribute %.64q: %w", key, err)
		}
		if err := fn(key, value); err != nil {
			return err
		}
	}
	return nil
}

// fdXattrs returns how to read attributes. What is open only to be described
// refuses the direct way.
func fdXattrs(f *os.File) (list func([]byte) (int, error), get func(string, []byte) (int, error)) {
	fd := int(f.Fd())
	list = func(b []byte) (int, error) {
		n, err := unix.Flistxattr(fd, b)
		if errors.Is(err, unix.EBADF) {
			return unix.Listxattr(fmt.Sprintf("/proc/self/fd/%d", fd), b)
		}
		return n, err
	}
	get = func(key string, b []byte) (int, error) {
		n, err := unix.Fgetxattr(fd, key, b)
		if errors.Is(err, unix.EBADF) {
			return unix.Getxattr(fmt.Sprintf("/proc/self/fd/%d", fd), key, b)
		}
		return n, err
	}
	return list, get
}
