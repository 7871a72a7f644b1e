package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/opendsec/dsec"
)

// opened is a source that has been looked at.
type opened struct {
	layers  []layerSource
	config  *Config
	closers []func() error
}

func (o *opened) close() {
	for _, c := range o.closers {
		_ = c() // read-only files: nothing to lose
	}
}

// open finds out what a source is. A scheme says it: "docker://REF",
// "oci:PATH[:TAG]", "docker-archive:PATH[:TAG]", "tar:PATH", "dir:PATH".
// Without one, what exists as a path is looked into, and anything else is a
// reference to a registry.
func open(ctx context.Context, source string, files Files, opts Options) (*opened, error) {
	scratch := files.Scratch
	if files.Input != nil {
		return openStream(ctx, files.Input, asked{}, scratch, opts)
	}
	if ref, ok := strings.CutPrefix(source, "docker://"); ok {
		return openRegistry(ctx, ref, opts)
	}
	if file, ok := strings.CutPrefix(source, "dir:"); ok {
		return openDir(file)
	}
	if file, ok := strings.CutPrefix(source, "tar:"); ok {
		return openFile(ctx, file, asked{tar: true}, scratch, opts)
	}
	for _, scheme := range []string{"oci:", "docker-archive:"} {
		if rest, ok := strings.CutPrefix(source, scheme); ok {
			file, tag := splitTag(rest)
			return openPath(ctx, file, asked{tag: tag, archive: true}, scratch, opts)
		}
	}
	if _, err := os.Stat(source); err == nil {
		return openPath(ctx, source, asked{}, scratch, opts)
	} else if strings.HasPrefix(source, "/") || strings.HasPrefix(source, ".") {
		return nil, err
	}
	return openRegistry(ctx, source, opts)
}

// asked is what the name of a source says about its content.
type asked struct {
	tag     string // of one image among several
	archive bool   // it is an image
	tar     bool   // it is a root file system
}

// splitTag cuts a tag off a path, unless the whole is a path that exists.
func splitTag(s string) (file, tag string) {
	if _, err := os.Stat(s); err == nil {
		return s, ""
	}
	if i := strings.IndexByte(s, ':'); i > 0 {
		return s[:i], s[i+1:]
	}
	return s, ""
}

// openPath tells a layout from a root file system, and an archive from a tar,
// by what is in it.
func openPath(ctx context.Context, file string, a asked, scratch *os.File, opts Options) (*opened, error) {
	st, err := os.Stat(file)
	if err != nil {
		return nil, err
	}
	if !st.IsDir() {
		return openFile(ctx, file, a, scratch, opts)
	}
	if _, err := os.Stat(filepath.Join(file, "oci-layout")); err != nil && !a.archive {
		return openDir(file)
	}
	root, err := os.OpenRoot(file)
	if err != nil {
		return nil, err
	}
	return closing(root.Close)(openLayout(ctx, dirArchive{root}, a.tag, opts))
}

func openDir(file string) (*opened, error) {
	st, err := os.Stat(file)
	if err != nil {
		return nil, err
	}
	if !st.IsDir() {
		return nil, dsec.Errorf(dsec.Invalid, "open source", file, "not a directory")
	}
	return &opened{layers: []layerSource{dirLayer{root: file}}}, nil
}

func openFile(ctx context.Context, file string, a asked, scratch *os.File, opts Options) (*opened, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	return closing(f.Close)(openStream(ctx, f, a, scratch, opts))
}

// closing adds what to close to a source, or closes it if there is none.
func closing(c func() error) func(*opened, error) (*opened, error) {
	return func(o *opened, err error) (*opened, error) {
		if err != nil {
			return nil, errors.Join(err, c())
		}
		o.closers = append(o.closers, c)
		return o, nil
	}
}

// openStream looks at the first member of a tar: an image archive starts with
// what no root file system has. A pipe can only be a root file system.
func openStream(ctx context.Context, f *os.File, a asked, scratch *os.File, opts Options) (*opened, error) {
	plain := tarLayer{open: func(context.Context) (io.ReadCloser, error) { return decompress(f, opts.MaxRatio) }}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return &opened{layers: []layerSource{plain}}, nil
	}
	image := a.archive
	if !image && !a.tar {
		var err error
		if image, err = isImageArchive(f, opts); err != nil {
			return nil, err
		}
	}
	if !image {
		plain.open = func(context.Context) (io.ReadCloser, error) {
			if _, err := f.Seek(0, io.SeekStart); err != nil {
				return nil, err
			}
			return decompress(f, opts.MaxRatio)
		}
		return &opened{layers: []layerSource{plain}}, nil
	}
	seekable, err := unpackArchive(f, scratch, opts)
	if err != nil {
		return nil, err
	}
	files, err := indexTar(seekable, seekable)
	if err != nil {
		return nil, err
	}
	if files.has("index.json") && files.has("oci-layout") {
		return openLayout(ctx, files, a.tag, opts)
	}
	return openSaved(files, a.tag, opts)
}

// isImageArchive reports whether the tar has the files of an image archive at
// its top and only those.
func isImageArchive(f *os.File, opts Options) (bool, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return false, err
	}
	r, err := decompress(f, opts.MaxRatio)
	if err != nil {
		return false, err
	}
	defer r.Close()
	tr := tar.NewReader(r)
	marks := 0
	for {
		h, err := tr.Next()
		if err != nil { // what is wrong with it is told when it is read
			return marks > 0, nil
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		switch top, rest, _ := strings.Cut(name, "/"); {
		case name == "oci-layout" || name == "manifest.json" || name == "index.json":
			marks++
		case name == "", name == "repositories", top == "blobs":
		case isHex(top), rest == "" && savedName(name):
		default:
			return false, nil
		}
	}
}

// savedName knows the names that docker save and its kin give to configs and layers.
func savedName(name string) bool {
	name = strings.TrimPrefix(name, "sha256:")
	for _, ext := range []string{".json", ".tar", ".tar.gz"} {
		name = strings.TrimSuffix(name, ext)
	}
	return isHex(name)
}

func isHex(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// unpackArchive makes an archive seekable in its plain form.
func unpackArchive(f, scratch *os.File, opts Options) (*os.File, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	head := make([]byte, 512)
	if _, err := io.ReadFull(f, head); err != nil {
		return nil, err
	}
	if string(head[257:262]) == "ustar" {
		return f, nil
	}
	if scratch == nil {
		return nil, errors.New("a compressed image archive: decompress it first")
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	r, err := decompress(f, opts.MaxRatio)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	n, err := io.Copy(scratch, io.LimitReader(r, opts.MaxBytes+1))
	if err == nil && n > opts.MaxBytes {
		err = fmt.Errorf("archive: more than %d bytes", opts.MaxBytes)
	}
	return scratch, err
}
