package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/opendsec/dsec/image/erofs"
)

// Archive says how to write one.
type Archive struct {
	Name    string // of the image in it
	Scratch string // directory for a layer at a time: its size comes before it
}

// WriteArchive writes layers that stand on one another, the lowest first, as an
// OCI image archive, which Docker reads too: a tar with an OCI layer for each.
func WriteArchive(ctx context.Context, layers []*erofs.Image, config *Config, a Archive, w io.Writer) error {
	x := archiver{ctx: ctx, w: tar.NewWriter(w), scratch: a.Scratch}
	if err := x.image(layers, config, a.Name); err != nil {
		return classify("export image", a.Name, err)
	}
	return nil
}

type archiver struct {
	ctx     context.Context
	w       *tar.Writer
	scratch string
	written map[v1.Hash]bool // two layers may be equal as tars
}

func (x *archiver) image(layers []*erofs.Image, config *Config, name string) error {
	x.written = map[v1.Hash]bool{}
	if err := x.file("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	cf := configFile(config)
	saved := savedImage{RepoTags: []string{name}}
	for i, im := range layers {
		d, err := x.layer(im)
		if err != nil {
			return fmt.Errorf("layer %d: %w", i, err)
		}
		m.Layers = append(m.Layers, d)
		cf.RootFS.DiffIDs = append(cf.RootFS.DiffIDs, d.Digest) // not compressed
		saved.Layers = append(saved.Layers, blobName(d.Digest))
	}
	var err error
	if m.Config, err = x.document(types.OCIConfigJSON, cf); err != nil {
		return err
	}
	saved.Config = blobName(m.Config.Digest)
	top, err := x.document(types.OCIManifestSchema1, m)
	if err != nil {
		return err
	}
	top.Annotations = map[string]string{"org.opencontainers.image.ref.name": name}
	top.Platform = &v1.Platform{OS: cf.OS, Architecture: cf.Architecture}
	for _, f := range []struct { // in one order: an export twice is the same
		name string
		v    any
	}{{"index.json", v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{top}}}, {"manifest.json", []savedImage{saved}}} {
		b, err := json.Marshal(f.v)
		if err == nil {
			err = x.file(f.name, b)
		}
		if err != nil {
			return err
		}
	}
	return x.w.Close()
}

func configFile(c *Config) v1.ConfigFile {
	arch, _ := resolver{}.platform() // that of this program has no error
	cf := v1.ConfigFile{OS: "linux", Architecture: arch.Architecture, RootFS: v1.RootFS{Type: "layers"}}
	if c != nil {
		cf.Config = v1.Config{Env: c.Env, User: c.User, WorkingDir: c.Workdir, Entrypoint: c.Entrypoint, Cmd: c.Cmd, StopSignal: c.StopSignal}
		if c.Arch != "" {
			cf.Architecture = c.Arch
		}
	}
	return cf
}

func blobName(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }

func (x *archiver) file(name string, b []byte) error {
	if err := x.w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(b))}); err != nil {
		return err
	}
	_, err := x.w.Write(b)
	return err
}

func (x *archiver) document(kind types.MediaType, v any) (v1.Descriptor, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return v1.Descriptor{}, err
	}
	h, n, err := v1.SHA256(bytes.NewReader(b))
	if err == nil {
		err = x.file(blobName(h), b)
	}
	return v1.Descriptor{MediaType: kind, Digest: h, Size: n}, err
}

// layer writes one layer to the scratch directory, and from there.
func (x *archiver) layer(im *erofs.Image) (v1.Descriptor, error) {
	f, err := os.CreateTemp(x.scratch, "layer-*.tar")
	if err != nil {
		return v1.Descriptor{}, err
	}
	defer f.Close()
	if err := os.Remove(f.Name()); err != nil { // its name is not needed
		return v1.Descriptor{}, err
	}
	sum := sha256.New()
	if err := WriteTar(x.ctx, im, io.MultiWriter(f, sum), true); err != nil {
		return v1.Descriptor{}, err
	}
	d := v1.Descriptor{MediaType: types.OCIUncompressedLayer, Digest: v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum.Sum(nil))}}
	if d.Size, err = f.Seek(0, io.SeekStart); err == nil {
		var st os.FileInfo
		if st, err = f.Stat(); err == nil {
			d.Size = st.Size()
		}
	}
	if err != nil || x.written[d.Digest] {
		return d, err
	}
	x.written[d.Digest] = true
	if err := x.w.WriteHeader(&tar.Header{Name: blobName(d.Digest), Typeflag: tar.TypeReg, Mode: 0o644, Size: d.Size}); err != nil {
		return d, err
	}
	_, err = io.Copy(x.w, f)
	return d, err
}

// HasRedirects tells whether a layer has a directory that was renamed and whose
// contents are below its old name, which only overlayfs understands.
func HasRedirects(layers []*erofs.Image) (bool, error) {
	found := false
	for _, im := range layers {
		err := im.Walk(func(name string, n *erofs.Node) error {
			if found || n.Mode&erofs.TypeMask != erofs.TypeDir {
				return nil
			}
			xs, err := n.Xattrs()
			for _, a := range xs {
				found = found || a.Name == redirectTrusted || a.Name == redirectUser
			}
			return err
		})
		if err != nil {
			return false, classify("read layer", "", err)
		}
	}
	return found, nil
}
