package iam

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"strconv"
	"syscall"
	"unsafe"

	"github.com/opendsec/dsec"
)

// Peer is who is at the other end of a unix socket, as the kernel tells.
type Peer struct {
	UID    uint32
	Groups []uint32 // primary first
}

// Local says which local callers are admins of the default project, beside
// root and the uid this process has.
type Local struct {
	Group int // gid of group dsec; -1: there is none
}

// Identify returns the principal of a local caller, Unauthenticated if it is
// nobody special: it may still show a key.
func (l Local) Identify(p Peer) (Principal, error) {
	ok := p.UID == 0 || int(p.UID) == os.Getuid()
	for _, g := range p.Groups {
		ok = ok || (l.Group >= 0 && int(g) == l.Group)
	}
	name := "uid:" + strconv.Itoa(int(p.UID))
	if !ok {
		return Principal{}, dsec.Errorf(dsec.Unauthenticated, "authenticate", name, "is not root, the owner or in group dsec")
	}
	return Principal{Name: name, Project: DefaultProject, Role: Admin}, nil
}

const soPeerGroups = 59 // SO_PEERGROUPS

// PeerOf asks the kernel who opened the other end.
func PeerOf(c *net.UnixConn) (Peer, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return Peer{}, dsec.E(dsec.Internal, "identify peer", "", err)
	}
	var p Peer
	var inner error
	err = raw.Control(func(fd uintptr) {
		cred, err := syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
		if err != nil {
			inner = err
			return
		}
		p.UID, p.Groups = cred.Uid, []uint32{cred.Gid}
		groups, err := peerGroups(int(fd))
		inner = err
		p.Groups = append(p.Groups, groups...)
	})
	if err = errors.Join(err, inner); err != nil {
		return Peer{}, dsec.E(dsec.Internal, "identify peer", "", err)
	}
	return p, nil
}

func peerGroups(fd int) ([]uint32, error) {
	buf := make([]byte, 4*64)
	for {
		n := uint32(len(buf))
		_, _, e := syscall.Syscall6(syscall.SYS_GETSOCKOPT, uintptr(fd), syscall.SOL_SOCKET, soPeerGroups,
			uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&n)), 0)
		switch {
		case e == syscall.ERANGE && int(n) > len(buf):
			buf = make([]byte, n)
			continue
		case e != 0:
			return nil, os.NewSyscallError("getsockopt SO_PEERGROUPS", e)
		}
		var out []uint32
		for i := 0; i+4 <= int(n); i += 4 {
			out = append(out, binary.NativeEndian.Uint32(buf[i:]))
		}
		return out, nil
	}
}
