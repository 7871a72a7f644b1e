package worker

import (
	"archive/tar"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image"
)

// openToAll reports whether any user may read every file of a layout: some
// tools write blobs that only their owner can.
func openToAll(layout *os.Root) (bool, error) {
	open := true
	err := fs.WalkDir(layout.FS(), ".", func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err == nil && d.Type().IsRegular() && st.Mode().Perm()&0o004 == 0 {
			open = false
			return fs.SkipAll
		}
		return err
	})
	return open, err
}

// packed turns a layout that the worker's user could not read into one archive
// that it is handed: an unlinked file in dir.
func packed(layout *os.Root, dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &os.PathError{Op: "create", Path: dir, Err: err}
	}
	f := os.NewFile(uintptr(fd), "layout")
	w := tar.NewWriter(f)
	err = fs.WalkDir(layout.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		return pack(w, layout, name)
	})
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func pack(w *tar.Writer, layout *os.Root, name string) error {
	in, err := layout.Open(name)
	if err != nil {
		return err
	}
	defer in.Close()
	st, err := in.Stat()
	if err != nil {
		return err
	}
	if err := w.WriteHeader(&tar.Header{Name: name, Size: st.Size(), Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	_, err = io.CopyN(w, in, st.Size())
	return err
}

// readable replaces a layout that the worker could not read.
func readable(loc image.Location, files image.Files) (image.Location, image.Files, error) {
	if loc.Kind != image.KindLayout || os.Geteuid() != 0 {
		return loc, files, nil
	}
	layout, err := os.OpenRoot(loc.Path)
	if err != nil {
		return loc, files, err
	}
	defer layout.Close()
	if open, err := openToAll(layout); open || err != nil {
		return loc, files, err
	}
	f, err := packed(layout, scratchDir(files))
	if err != nil {
		return loc, files, err
	}
	loc.Kind, loc.Archive, files.Input = image.KindFile, true, f
	return loc, files, nil
}
