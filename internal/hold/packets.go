package hold

import (
	"net"
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// packets is our end of a SEQPACKET pair whose other end is the C program. It
// does what net.UnixConn does in a third of the system calls.
type packets struct {
	f  *os.File
	rc syscall.RawConn
}

func (p *packets) Close() error { return p.f.Close() }

func (p *packets) setReadDeadline(t time.Time) { _ = p.f.SetReadDeadline(t) }

// send sends one message; the files stay the caller's.
func (p *packets) send(b []byte, files []*os.File) error {
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = fdOf(f)
		}
		oob = unix.UnixRights(fds...)
	}
	var serr error
	err := p.rc.Write(func(fd uintptr) bool {
		serr = noEINTR(func() error { return unix.Sendmsg(int(fd), b, oob, nil, unix.MSG_NOSIGNAL) })
		return serr != unix.EAGAIN
	})
	runtime.KeepAlive(files)
	if err != nil {
		return err
	}
	return serr
}

// answer reads one answer. An end of file is net.ErrClosed.
func (p *packets) answer() (answer, []*os.File, error) {
	var b [64]byte
	oob := make([]byte, unix.CmsgSpace(4*4))
	var n, oobn int
	var rerr error
	err := p.rc.Read(func(fd uintptr) bool {
		rerr = noEINTR(func() (err error) {
			n, oobn, _, _, err = unix.Recvmsg(int(fd), b[:], oob, unix.MSG_CMSG_CLOEXEC)
			return err
		})
		return rerr != unix.EAGAIN
	})
	if err == nil {
		err = rerr
	}
	if err != nil {
		return answer{}, nil, err
	}
	if n == 0 {
		return answer{}, nil, net.ErrClosed
	}
	return parseAnswer(b[:n], oob[:oobn])
}

// packetPair makes a pair of which theirs is for the C program.
func packetPair() (ours *packets, theirs *os.File, err error) {
	a, b, err := rawPair()
	if err != nil {
		return nil, nil, err
	}
	theirs = os.NewFile(uintptr(b), "pair")
	if err := unix.SetNonblock(a, true); err != nil {
		_, _ = unix.Close(a), theirs.Close()
		return nil, nil, dsec.E(dsec.Internal, "make socket pair", "", err)
	}
	if ours, err = newPackets(os.NewFile(uintptr(a), "pair")); err != nil {
		_ = theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

// newPackets takes over f, which does not block.
func newPackets(f *os.File) (*packets, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return nil, dsec.E(dsec.Internal, "make socket pair", "", err)
	}
	return &packets{f: f, rc: rc}, nil
}

// seqpacketPair makes a connected pair of sockets.
func seqpacketPair() (a, b *os.File, err error) {
	x, y, err := rawPair()
	if err != nil {
		return nil, nil, err
	}
	return os.NewFile(uintptr(x), "pair"), os.NewFile(uintptr(y), "pair"), nil
}

func rawPair() (a, b int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, 0, dsec.E(dsec.Internal, "make socket pair", "", err)
	}
	return fds[0], fds[1], nil
}

// unixConn takes over f.
func unixConn(f *os.File) (*net.UnixConn, error) {
	defer func() { _ = f.Close() }()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "use socket", "", err)
	}
	return c.(*net.UnixConn), nil
}
