package image

import (
	"archive/tar"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/opendsec/dsec"
)

// archive is a set of named files: a directory, or a tar that was indexed.
type archive interface {
	open(name string) (io.ReadCloser, int64, error)
}

// openLayout reads an OCI image layout; tag, if any, picks one of its images.
func openLayout(ctx context.Context, a archive, tag string, opts Options) (*opened, error) {
	raw, err := readAll(a, "index.json", maxManifest)
	if err != nil {
		return nil, err
	}
	ix, err := v1.ParseIndexManifest(strings.NewReader(string(raw)))
	if err != nil {
		return nil, fmt.Errorf("index.json: %w", err)
	}
	ds := ix.Manifests
	if tag != "" {
		ds = nil
		for _, d := range ix.Manifests {
			if full := d.Annotations["org.opencontainers.image.ref.name"]; full == tag || d.Annotations["io.containerd.image.name"] == tag || strings.HasSuffix(full, ":"+tag) {
				ds = append(ds, d)
			}
		}
		if len(ds) == 0 {
			return nil, dsec.Errorf(dsec.NotFound, "open layout", dsec.Quote(tag), "no image of that tag")
		}
	}
	return resolver{store: layoutBlobs{a}, opts: opts}.fromIndex(ctx, ds, 0)
}

// layoutBlobs finds blobs by digest. The resolver has checked that the digest is
// one before it becomes a name.
type layoutBlobs struct{ archive }

func (l layoutBlobs) blob(_ context.Context, d v1.Descriptor, _ bool) (io.ReadCloser, error) {
	f, _, err := l.open(path.Join("blobs", d.Digest.Algorithm, d.Digest.Hex))
	return f, err
}

// savedImage is one entry of the manifest.json of docker save.
type savedImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// openSaved reads what docker save wrote.
func openSaved(a archive, tag string, opts Options) (*opened, error) {
	raw, err := readAll(a, "manifest.json", maxManifest)
	if err != nil {
		return nil, err
	}
	var all []savedImage
	if err := json.Unmarshal(raw, &all); err != nil {
		return nil, fmt.Errorf("manifest.json: %w", err)
	}
	img, err := pickSaved(all, tag)
	if err != nil {
		return nil, err
	}
	rawConfig, err := readAll(a, img.Config, maxConfigFile)
	if err != nil {
		return nil, err
	}
	r := resolver{opts: opts}
	out := &opened{}
	if out.config, err = r.config(rawConfig); err != nil {
		return nil, err
	}
	f, err := v1.ParseConfigFile(strings.NewReader(string(rawConfig)))
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	if len(f.RootFS.DiffIDs) != len(img.Layers) || len(img.Layers) > maxLayers {
		return nil, fmt.Errorf("manifest.json: %d layers, the config has %d", len(img.Layers), len(f.RootFS.DiffIDs))
	}
	for i, file := range img.Layers {
		out.layers = append(out.layers, savedLayer(a, file, f.RootFS.DiffIDs[i], opts))
	}
	return out, nil
}

func pickSaved(all []savedImage, tag string) (savedImage, error) {
	for _, img := range all {
		for _, t := range img.RepoTags {
			if tag == "" || t == tag {
				return img, nil
			}
		}
		if tag == "" && len(all) == 1 {
			return img, nil
		}
	}
	return savedImage{}, dsec.Errorf(dsec.NotFound, "open archive", dsec.Quote(tag), "none of %d images has that tag", len(all))
}

// savedLayer verifies the plain bytes: the config names layers by them.
func savedLayer(a archive, file string, diffID v1.Hash, opts Options) layerSource {
	return tarLayer{oci: true, open: func(context.Context) (io.ReadCloser, error) {
		if diffID.Algorithm != "sha256" {
			return nil, fmt.Errorf("digest %s: want sha256", dsec.Quote(diffID.String()))
		}
		f, _, err := a.open(file)
		if err != nil {
			return nil, err
		}
		plain, err := decompress(f, opts.MaxRatio)
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return both{readCloser{&anySize{verifier: verifier{r: plain, hash: newHash(), want: diffID}}, plain}, f}, nil
	}}
}

type readCloser struct {
	io.Reader
	io.Closer
}

func readAll(a archive, name string, limit int64) ([]byte, error) {
	f, size, err := a.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if size > limit {
		return nil, fmt.Errorf("%s: %d bytes, at most %d", dsec.Quote(name), size, limit)
	}
	return io.ReadAll(io.LimitReader(f, limit))
}

// dirArchive is a directory that nothing leads out of.
type dirArchive struct{ root *os.Root }

func (d dirArchive) open(name string) (io.ReadCloser, int64, error) {
	f, err := d.root.Open(name)
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s: not a regular file", dsec.Quote(name))
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, st.Size(), nil
}

// tarArchive is a plain tar whose members can be read in any order.
type tarArchive struct {
	f     io.ReaderAt
	files map[string]extent
	links map[string]string // old docker archives link equal layers
}

type extent struct{ off, size int64 }

// maxArchiveFiles bounds the index of an archive: an image has a few files for each layer.
const maxArchiveFiles = 64 << 10

func indexTar(f io.ReadSeeker, at io.ReaderAt) (*tarArchive, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	a := &tarArchive{f: at, files: map[string]extent{}, links: map[string]string{}}
	tr := tar.NewReader(f)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return a, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read tar: %w", err)
		}
		if len(a.files)+len(a.links) > maxArchiveFiles {
			return nil, fmt.Errorf("archive: more than %d files", maxArchiveFiles)
		}
		name := path.Clean("/" + h.Name)
		switch h.Typeflag {
		case tar.TypeReg:
			// The tar reader stands at the first byte of the member.
			off, err := f.Seek(0, io.SeekCurrent)
			if err != nil {
				return nil, err
			}
			a.files[name] = extent{off, h.Size}
		case tar.TypeSymlink:
			a.links[name] = path.Join(path.Dir(name), h.Linkname)
		case tar.TypeLink:
			a.links[name] = path.Clean("/" + h.Linkname)
		}
	}
}

func (a *tarArchive) has(name string) bool {
	_, ok := a.files[path.Clean("/"+name)]
	return ok
}

func (a *tarArchive) open(name string) (io.ReadCloser, int64, error) {
	p := path.Clean("/" + name)
	for range maxLinks {
		to, ok := a.links[p]
		if !ok {
			break
		}
		p = to
	}
	e, ok := a.files[p]
	if !ok {
		return nil, 0, fmt.Errorf("archive: %s: %w", dsec.Quote(name), fs.ErrNotExist)
	}
	return io.NopCloser(io.NewSectionReader(a.f, e.off, e.size)), e.size, nil
}

// anySize verifies a digest where the size is not known.
type anySize struct{ verifier }

func (a *anySize) Read(p []byte) (int, error) {
	n, err := a.r.Read(p)
	a.hash.Write(p[:n])
	if err == io.EOF && hex.EncodeToString(a.hash.Sum(nil)) != a.want.Hex {
		return n, a.corrupt("content has another digest")
	}
	return n, err
}
