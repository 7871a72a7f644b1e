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

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

//go:embed all:bin
var bin embed.FS

var errNotBuilt = errors.New("not embedded in this binary: build with make")

// Hold returns a sealed memfd with the dsec-hold of this architecture.
func Hold() (*os.File, error) {
	name := "dsec-hold-" + runtime.GOARCH
	b, err := read(name)
	if err != nil {
		return nil, err
	}
	f, err := linux.SealedFile("dsec-hold", b)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "open embedded binary", name, err)
	}
	return f, nil
}

// Guest is the dsec-guest of this architecture, which virtual machines begin with.
func Guest() ([]byte, error) { return read("dsec-guest-" + runtime.GOARCH) }

func read(name string) ([]byte, error) {
	b, err := fs.ReadFile(bin, "bin/"+name)
	if err != nil {
		return nil, dsec.E(dsec.Unsupported, "open embedded binary", name, errNotBuilt)
	}
	return b, nil
}
