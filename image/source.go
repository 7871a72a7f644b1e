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
	blobs   []Blob // of an OCI image: what the layers are read from
	config  *Config
	closers []func() error
}

func (o *opened) close() {
	for _, c := range o.closers {
		_ = c() // read-only files: nothing to lose
	}
}

// Kind says where a source is, and so what it takes to read it.
type Kind string

const (
	KindRegistry  Kind = "registry"  // needs the network and perhaps credentials
	KindFile      Kind = "file"      // one file: a root file system tar or an image archive
	KindLayout    Kind = "layout"    // a directory that holds an OCI image layout
	KindDirectory Kind = "directory" // a tree to take as it is
)

// Location is a source whose name was understood.
type Location struct {
	Source  string `json:"source"` // as it was given
	Kind    Kind   `json:"kind"`
	Path    string `json:"path"`              // of what is on this machine; else the reference
	Tag     string `json:"tag,omitempty"`     // one image among several
	Archive bool   `json:"archive,omitempty"` // a file is an image, whatever it looks like
	Tar     bool   `json:"tar,omitempty"`     // a file is a root file system, whatever it looks like
	// Whiteouts: in such a tar, names that start with .wh. have the meaning
	// that OCI gives them.
	Whiteouts bool `json:"whiteouts,omitempty"`
}

// Locate finds out what a source is. A scheme says it: "docker://REF",
// "oci:PATH[:TAG]", "docker-archive:PATH[:TAG]", "tar:PATH", "dir:PATH".
// Without one, what exists as a path is looked at, and anything else is a
// reference to a registry.
func Locate(source string) (Location, error) {
	l := Location{Source: source, Kind: KindRegistry, Path: source}
	if ref, ok := strings.CutPrefix(source, "docker://"); ok {
		l.Path = ref
		return l, nil
	}
	if file, ok := strings.CutPrefix(source, "dir:"); ok {
		l.Kind, l.Path = KindDirectory, file
		return l, nil
	}
	if file, ok := strings.CutPrefix(source, "tar:"); ok {
		l.Kind, l.Path, l.Tar = KindFile, file, true
		return l, nil
	}
	for _, scheme := range []string{"oci:", "docker-archive:"} {
		if rest, ok := strings.CutPrefix(source, scheme); ok {
			l.Path, l.Tag = splitTag(rest)
			l.Archive = true
			return l.look()
		}
	}
	if _, err := os.Stat(source); err == nil || strings.HasPrefix(source, "/") || strings.HasPrefix(source, ".") {
		return l.look()
	}
	return l, nil
}

// look tells a layout from a tree, and a directory from a file.
func (l Location) look() (Location, error) {
	st, err := os.Stat(l.Path)
	if err != nil {
		return l, classify("find source", l.Source, err)
	}
	_, noLayout := os.Stat(filepath.Join(l.Path, "oci-layout"))
	switch {
	case !st.IsDir():
		l.Kind = KindFile
	case l.Archive || noLayout == nil:
		l.Kind = KindLayout
	default:
		l.Kind = KindDirectory
	}
	return l, nil
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

// open makes a located source ready to be read. What the caller has opened
// already is used, not opened again.
func open(ctx context.Context, l Location, files Files, opts Options) (*opened, error) {
	switch l.Kind {
	case KindRegistry:
		return openRegistry(ctx, l.Path, opts)
	case KindDirectory:
		return openDir(l.Path)
	case KindLayout:
		if files.Layout != nil {
			return openLayout(ctx, dirArchive{files.Layout}, l.Tag, opts)
		}
		root, err := os.OpenRoot(l.Path)
		if err != nil {
			return nil, err
		}
		return closing(root.Close)(openLayout(ctx, dirArchive{root}, l.Tag, opts))
	}
	if files.Input != nil {
		return openStream(ctx, l, files.Input, files.Scratch, opts)
	}
	f, err := os.Open(l.Path)
	if err != nil {
		return nil, err
	}
	return closing(f.Close)(openStream(ctx, l, f, files.Scratch, opts))
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
func openStream(ctx context.Context, l Location, f, scratch *os.File, opts Options) (*opened, error) {
	plain := tarLayer{oci: l.Whiteouts, open: func(context.Context) (io.ReadCloser, error) { return decompress(f, opts.MaxRatio) }}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return &opened{layers: []layerSource{plain}}, nil
	}
	image := l.Archive
	if !image && !l.Tar {
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
		return openLayout(ctx, files, l.Tag, opts)
	}
	return openSaved(files, l.Tag, opts)
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
