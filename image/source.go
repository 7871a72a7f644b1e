package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
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

// open finds out what a source is. A scheme says it ("docker://", "oci:",
// "docker-archive:", "tar:", "dir:"); without one, what exists as a path is
// looked into, and anything else is a reference to a registry.
func open(ctx context.Context, source string, opts Options) (*opened, error) {
	for scheme, fn := range map[string]func(context.Context, string, Options) (*opened, error){
		"dir:": openDir, "tar:": openTar,
	} {
		if rest, ok := strings.CutPrefix(source, scheme); ok {
			return fn(ctx, rest, opts)
		}
	}
	st, err := os.Stat(source)
	if err != nil {
		return nil, err
	}
	if st.IsDir() {
		return openDir(ctx, source, opts)
	}
	return openTar(ctx, source, opts)
}

func openDir(_ context.Context, path string, _ Options) (*opened, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !st.IsDir() {
		return nil, dsec.Errorf(dsec.Invalid, "open source", path, "not a directory")
	}
	return &opened{layers: []layerSource{dirLayer{root: path}}}, nil
}

func openTar(_ context.Context, path string, opts Options) (*opened, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	l := tarLayer{open: func(context.Context) (io.ReadCloser, error) {
		if _, err := f.Seek(0, io.SeekStart); err != nil && !errors.Is(err, os.ErrInvalid) {
			return nil, fmt.Errorf("rewind: %w", err)
		}
		return decompress(f, opts.MaxRatio)
	}}
	return &opened{layers: []layerSource{l}, closers: []func() error{f.Close}}, nil
}
