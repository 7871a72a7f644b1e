package store

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/klauspost/compress/gzip"
	"golang.org/x/sync/errgroup"
)

// BenchmarkNeverSeenImage compares making an image known with pulling its layers
// side by side and unpacking them one after the other, as tools for containers
// do, from a registry on loopback.
func BenchmarkNeverSeenImage(b *testing.B) {
	reg := newRegistry(b)
	var layers [][]byte
	for l := range 4 {
		members := []string{fmt.Sprintf("l%d/", l)}
		for i := range 1500 {
			members = append(members, fmt.Sprintf("l%d/f%d=%s", l, i, bytes.Repeat([]byte(noise(1000+i%900)), 8)))
		}
		layers = append(layers, tarOf(b, append(members, fmt.Sprintf("l%d/large=%s", l, noise(12<<20)))...))
	}
	ref, _ := reg.push(b, "bench:1", layers...)
	var ours, theirs time.Duration
	for b.Loop() {
		begun := time.Now()
		s := openStore(b, b.TempDir(), Options{})
		if _, err := s.Ensure(context.Background(), ref, EnsureOptions{}, nil); err != nil {
			b.Fatal(err)
		}
		ours += time.Since(begun)
		begun = time.Now()
		if err := pullAndUnpack(ref, b.TempDir()); err != nil {
			b.Fatal(err)
		}
		theirs += time.Since(begun)
	}
	b.ReportMetric(float64(ours.Milliseconds())/float64(b.N), "ms/ensure")
	b.ReportMetric(float64(theirs.Milliseconds())/float64(b.N), "ms/pull+unpack")
	b.ReportMetric(float64(ours)/float64(theirs), "ratio")
}

func pullAndUnpack(ref, dir string) error {
	r, err := name.ParseReference(ref)
	if err != nil {
		return err
	}
	img, err := remote.Image(r)
	if err != nil {
		return err
	}
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	var g errgroup.Group
	for i, l := range layers {
		g.Go(func() error { return download(l, filepath.Join(dir, fmt.Sprint("blob", i))) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for i, l := range layers {
		if err := unpackLayer(l, filepath.Join(dir, fmt.Sprint("blob", i)), filepath.Join(dir, "root")); err != nil {
			return err
		}
	}
	return nil
}

func download(l v1.Layer, to string) error {
	from, err := l.Compressed()
	if err != nil {
		return err
	}
	defer from.Close()
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	return errors.Join(err, f.Close())
}

func unpackLayer(_ v1.Layer, blob, root string) error {
	f, err := os.Open(blob)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gunzip(f)
	if err != nil {
		return err
	}
	tr := tar.NewReader(z)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		p := filepath.Join(root, h.Name)
		if h.Typeflag == tar.TypeDir {
			if err := os.MkdirAll(p, 0o755); err != nil {
				return err
			}
			continue
		}
		out, err := os.Create(p)
		if err != nil {
			return err
		}
		_, err = io.Copy(out, tr)
		if err = errors.Join(err, out.Close()); err != nil {
			return err
		}
	}
}

func gunzip(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }
