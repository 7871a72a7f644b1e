package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"io/fs"
	"net"
	"os"
	"syscall"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/iam"
)

// ListenUnix makes the socket of local callers: of the group, mode 0660, or
// 0600 without one (gid -1). A socket nobody listens on is replaced.
func ListenUnix(path string, gid int) (net.Listener, error) {
	bad := func(err error) (net.Listener, error) { return nil, dsec.E(dsec.Unavailable, "listen", path, err) }
	if c, err := net.Dial("unix", path); err == nil {
		_ = c.Close()
		return bad(syscall.EADDRINUSE)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return bad(err)
	}
	old := syscall.Umask(0o177)
	l, err := net.Listen("unix", path)
	syscall.Umask(old)
	if err != nil {
		return bad(err)
	}
	if gid >= 0 {
		err = os.Chown(path, -1, gid)
		if err == nil {
			err = os.Chmod(path, 0o660)
		}
		if err != nil {
			_ = l.Close()
			return bad(err)
		}
	}
	return l, nil
}

// ListenTCP listens on an address; without a certificate only on a loopback
// one.
func ListenTCP(address, cert, key string) (net.Listener, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, dsec.E(dsec.Invalid, "listen", address, err)
	}
	var conf *tls.Config
	if cert != "" || key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, dsec.E(dsec.Invalid, "load certificate", cert, err)
		}
		conf = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}}
	}
	if ip := net.ParseIP(host); conf == nil && (ip == nil || !ip.IsLoopback()) {
		return nil, dsec.Errorf(dsec.Invalid, "listen", address, "an address that others reach needs TLS: give a certificate, or listen on 127.0.0.1")
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, dsec.E(dsec.Unavailable, "listen", address, err)
	}
	if conf != nil {
		l = tls.NewListener(l, conf)
	}
	return l, nil
}

type peerKey struct{}

// withPeer remembers who opened a connection to the unix socket.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	p, err := iam.PeerOf(u)
	if err != nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, p)
}
