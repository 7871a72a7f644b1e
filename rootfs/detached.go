package rootfs

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// detached combines mounts that are in no mount namespace, by descriptor.
type detached struct{}

// Detached is the plan of Linux 6.15 and newer.
func Detached() Plan { return detached{} }

func (detached) Name() string                 { return "detached descriptors" }
func (detached) Admit(string, *os.File) error { return nil }
func (detached) Retire(string) error          { return nil }
func (detached) Close() error                 { return nil }

func (detached) Clone(mount, userns *os.File) (*os.File, error) {
	return cloneMapped(mount, userns)
}

func cloneMapped(mount, userns *os.File) (*os.File, error) {
	c, err := linux.Clone(mount, false)
	if err != nil || userns == nil {
		return c, err
	}
	if err := linux.IDMap(c, userns); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (detached) Overlay(o Overlay) (*os.File, error) {
	fs := overlayFS(o.View)
	defer fs.Discard()
	// A detached mount ends with its descriptor: all stay open until overlayfs has its own copies.
	var open []*os.File
	defer func() {
		for _, f := range open {
			f.Close()
		}
	}()
	give := func(key string, f *os.File, err error) error {
		if err == nil {
			open = append(open, f)
			fs.FD(key, f)
		}
		return err
	}
	if o.View {
		f, err := linux.OpenBeneath(o.Dir, Upper, unix.O_PATH|unix.O_DIRECTORY)
		if err := give("lowerdir+", f, err); err != nil {
			return nil, err
		}
	}
	for i := len(o.Lowers) - 1; i >= 0; i-- { // the first lowerdir+ is the top
		c, err := cloneMapped(o.Lowers[i], o.UserNS)
		if err := give("lowerdir+", c, err); err != nil {
			return nil, err
		}
	}
	if o.View {
		return fs.Mount(overlayAttrs | unix.MOUNT_ATTR_RDONLY)
	}
	for _, d := range []struct{ key, name string }{{"upperdir", Upper}, {"workdir", workName}} {
		f, err := linux.OpenBeneath(o.Dir, d.name, unix.O_PATH|unix.O_DIRECTORY)
		if err := give(d.key, f, err); err != nil {
			return nil, err
		}
	}
	return fs.Mount(overlayAttrs)
}

// overlayAttrs: a device node of a layer opens nothing, whatever the user
// namespace; /dev is a mount of its own.
const overlayAttrs = unix.MOUNT_ATTR_NODEV

// overlayFS begins an overlay with the options every root has. A uuid of its
// own would be one more attribute to write, for file handles nobody takes. A view
// has no upper, to which some of them would belong.
func overlayFS(view bool) *linux.FS {
	fs := linux.NewFS("overlay").String("xino", "on").String("index", "off").String("metacopy", "off")
	if view {
		return fs.String("redirect_dir", "follow")
	}
	return fs.String("redirect_dir", "on").String("uuid", "off").Flag("volatile")
}
