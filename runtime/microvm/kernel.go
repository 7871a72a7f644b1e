package microvm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// Modules are what the kernel of a guest needs beyond what is built into it.
var Modules = []string{"virtio_pci", "virtio_console", "virtio_blk", "virtio_net", "virtio_balloon", "virtio_pmem", "nd_pmem", "erofs", "overlay", "ext4"}

// FileOf is a file as it is now.
func FileOf(ctx context.Context, path string) (vmm.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return vmm.File{}, dsec.E(dsec.Internal, "open", path, err)
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, within.Reader(ctx, f)); err != nil {
		return vmm.File{}, dsec.E(dsec.ClassOf(err), "read", path, err)
	}
	return vmm.File{Path: path, SHA256: hex.EncodeToString(h.Sum(nil))}, nil
}
