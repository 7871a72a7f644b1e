package vm

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/opendsec/dsec/runtime/microvm/boot"
)

// Kernel makes what guests are booted from, in a cache directory.
type Kernel struct {
	Release string // as uname -r says it
	cache   string

	mirror *mirror
}

// Fetch returns the kernel that this version of dsec pins, or the newest there
// is; what is not in the cache comes through apt. The caller closes it.
func Fetch(ctx context.Context, cache string) (*Kernel, error) {
	lock, err := boot.Default()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, err
	}
	// A directory of one process: two of apt cannot share one.
	dir, err := os.MkdirTemp(cache, "apt-")
	if err != nil {
		return nil, err
	}
	k := &Kernel{cache: cache}
	if k.mirror, err = startMirror(ctx, dir, lock.Codename); err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	built, err := k.build(ctx, nil)
	if err != nil {
		k.Close()
		return nil, err
	}
	k.Release = built.Release
	return k, nil
}

// Close ends the way through apt. Guests can be booted all the same.
func (k *Kernel) Close() {
	k.mirror.Close()
	_ = os.RemoveAll(k.mirror.dir)
}

// build makes the part of the initramfs that is the same for all jobs with the
// same modules.
func (k *Kernel) build(ctx context.Context, modules []string) (boot.Kernel, error) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return boot.Kernel{}, fmt.Errorf("make initramfs: %w (package busybox-static)", err)
	}
	content, err := os.ReadFile(busybox)
	if err != nil {
		return boot.Kernel{}, err
	}
	return boot.Build(ctx, boot.Config{Cache: k.cache, Apt: k.mirror.Sources(),
		Modules: append([]string{"virtio_pci", "virtio_blk"}, modules...),
		Init:    []byte(initScript),
		Files: []boot.File{
			{Name: "bin/busybox", Mode: 0o755, Content: content},
			{Name: "etc/passwd", Mode: 0o644, Content: []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")},
			{Name: "etc/group", Mode: 0o644, Content: []byte("root:x:0:\nnogroup:x:65534:\n")},
		}})
}

// initrd writes the initramfs of a job: what all have, and over it the job's.
func (k *Kernel) initrd(ctx context.Context, dir string, j Job) (image, initrd string, err error) {
	built, err := k.build(ctx, j.Modules)
	if err != nil {
		return "", "", err
	}
	base, err := os.Open(built.Initramfs)
	if err != nil {
		return "", "", err
	}
	defer func() { _ = base.Close() }()
	initrd = filepath.Join(dir, "initrd")
	f, err := os.Create(initrd)
	if err != nil {
		return "", "", err
	}
	defer func() { _ = f.Close() }()
	if _, err := f.ReadFrom(base); err != nil {
		return "", "", err
	}
	return built.Image, initrd, writeJob(f, j)
}
