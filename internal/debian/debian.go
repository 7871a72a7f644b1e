// Package debian reads packages of a Debian archive as apt does, trusting
// nothing but a keyring: where to ask is taken from the machine's own apt
// sources, and what came is believed only along one chain.
//
//	keyring → InRelease (OpenPGP) → Packages (SHA-256) → .deb (SHA-256)
//
// A Suite is a release by its codename, with its updates and its security
// updates: all suites the machine has for it. Nothing of a file is handed out
// before all of it has been compared with its digest. Everything is bounded in
// size, and what is decompressed too. A mirror can therefore withhold packages,
// and for as long as Valid-Until allows show an old state of a suite that this
// cache has not seen a newer one of; it can do nothing else.
//
// Errors are of the classes of dsec:
//
//	invalid            sources, a keyring or a name that can never work
//	not_found          no such suite on this machine, no such package, no such file on the mirror
//	permission_denied  a signature that is missing, wrong, or of somebody else
//	corrupt            a digest, a size or a format that is not what was promised; an expired or older Release
//	unavailable        the mirror is away, and stayed away over all tries
//	unsupported        a compression that is not read here
//	no_space           the disk of the cache
//
// Files that were fetched are in a Cache, by digest. Several processes may use
// one directory if they do it under one lock; a Cache takes none.
package debian

import (
	"errors"
	"io"
	"syscall"

	"github.com/opendsec/dsec"
)

// The largest of each that is taken, in bytes.
const (
	maxSources  = 1 << 20
	maxRelease  = 8 << 20
	maxIndex    = 128 << 20 // as it is sent
	maxPackages = 1 << 30   // decompressed
	maxStanza   = 1 << 20
	maxDeb      = 1 << 30
)

// refuse is an error about bytes that are not what they have to be.
func refuse(op, object, format string, args ...any) error {
	return dsec.Errorf(dsec.Corrupt, op, object, format, args...)
}

// diskError gives what a write said its class.
func diskError(op, object string, err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return dsec.E(dsec.NoSpace, op, object, err)
	}
	return dsec.E(dsec.Internal, op, object, err)
}

// capped reads at most left bytes; there being more is an error, not an end.
type capped struct {
	r    io.Reader
	left int64
	over error
}

func (c *capped) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if int64(len(p)) > c.left+1 {
		p = p[:c.left+1]
	}
	n, err := c.r.Read(p)
	if int64(n) > c.left {
		return int(c.left), c.over
	}
	c.left -= int64(n)
	return n, err
}
