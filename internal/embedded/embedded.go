// Package embedded holds the binaries that dsec carries inside itself. They
// are built by make (internal/hold/native/build.sh) before dsec is; a dsec that
// was built without them says so when it needs one.
package embedded

import (
	"embed"
	"errors"
	"io/fs"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

//go:embed all:bin
var bin embed.FS

var errNotBuilt = errors.New("not embedded in this binary: build with make")

// Hold returns a sealed memfd with the dsec-hold of this architecture.
func Hold() (*os.File, error) {
	name := "dsec-hold-" + runtime.GOARCH
	b, err := fs.ReadFile(bin, "bin/"+name)
	if err != nil {
		return nil, dsec.E(dsec.Unsupported, "open embedded binary", name, errNotBuilt)
	}
	fd, err := unix.MemfdCreate("dsec-hold", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "open embedded binary", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err = f.Write(b); err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		_ = f.Close()
		return nil, dsec.E(dsec.Internal, "open embedded binary", name, err)
	}
	return f, nil
}
