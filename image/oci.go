package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/opendsec/dsec"
)

// Caps on what an image may ask us to hold or follow.
const (
	maxManifest   = 4 << 20
	maxConfigFile = 8 << 20
	maxLayers     = 1024
	maxNesting    = 4 // indexes in indexes
)

// contentStore is where the parts of an OCI image are: a registry, a directory
// or an archive. What it returns is not verified; resolver verifies.
type contentStore interface {
	// blob opens what the descriptor names; manifest says which kind it is.
	blob(ctx context.Context, d v1.Descriptor, manifest bool) (io.ReadCloser, error)
}

// resolver follows a descriptor to one image for one platform.
type resolver struct {
	store contentStore
	opts  Options
}

func (r resolver) fromManifest(ctx context.Context, raw []byte, kind types.MediaType, depth int) (*opened, error) {
	if depth > maxNesting {
		return nil, errors.New("index: nested too deep")
	}
	m, err := v1.ParseManifest(bytes.NewReader(raw))
	if err == nil && !kind.IsIndex() && !m.MediaType.IsIndex() {
		return r.fromImage(ctx, m)
	}
	if err != nil && !kind.IsIndex() {
		return nil, fmt.Errorf("manifest: %w", err)
	}
	ix, err := v1.ParseIndexManifest(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("index: %w", err)
	}
	return r.fromIndex(ctx, ix.Manifests, depth)
}

// fromIndex takes the first image for the platform, looking into nested
// indexes where they come. An entry that names no platform is taken if its
// own config says the right one.
func (r resolver) fromIndex(ctx context.Context, ds []v1.Descriptor, depth int) (*opened, error) {
	want, err := r.platform()
	if err != nil {
		return nil, err
	}
	var last error
	for _, d := range choices(ds, want) {
		raw, err := r.read(ctx, d, maxManifest, true)
		if err != nil {
			return nil, err
		}
		img, err := r.fromManifest(ctx, raw, d.MediaType, depth+1)
		if !errors.Is(err, errPlatform) {
			return img, err
		}
		last = err
	}
	if last != nil {
		return nil, last
	}
	return nil, fmt.Errorf("%w: none of %d entries is for %s", errPlatform, len(ds), want)
}

var errPlatform = errors.New("wrong platform")

func (r resolver) platform() (v1.Platform, error) {
	if r.opts.Platform == "" {
		return v1.Platform{OS: "linux", Architecture: runtime.GOARCH}, nil
	}
	p, err := v1.ParsePlatform(r.opts.Platform)
	if err != nil {
		return v1.Platform{}, err
	}
	return *p, nil
}

// choices orders the entries worth following: those that name the platform,
// then indexes, then those that name none. Attestations are no images.
func choices(ds []v1.Descriptor, want v1.Platform) []v1.Descriptor {
	var exact, indexes, unnamed []v1.Descriptor
	for _, d := range ds {
		switch p := d.Platform; {
		case d.Annotations["vnd.docker.reference.type"] == "attestation-manifest":
		case p != nil && (p.OS != "" || p.Architecture != ""):
			if p.OS == want.OS && p.Architecture == want.Architecture && (want.Variant == "" || p.Variant == "" || p.Variant == want.Variant) {
				exact = append(exact, d)
			}
		case d.MediaType.IsIndex():
			indexes = append(indexes, d)
		default:
			unnamed = append(unnamed, d)
		}
	}
	return append(append(exact, indexes...), unnamed...)
}

func (r resolver) fromImage(ctx context.Context, m *v1.Manifest) (*opened, error) {
	if m.SchemaVersion != 2 {
		return nil, fmt.Errorf("manifest: schema %d, want 2", m.SchemaVersion)
	}
	if len(m.Layers) > maxLayers {
		return nil, fmt.Errorf("manifest: %d layers, at most %d", len(m.Layers), maxLayers)
	}
	raw, err := r.read(ctx, m.Config, maxConfigFile, false)
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	config, err := r.config(raw)
	if err != nil {
		return nil, err
	}
	out := &opened{config: config}
	diffIDs := diffIDsOf(raw, len(m.Layers))
	var total int64
	for i, d := range m.Layers {
		if err := checkLayer(d); err != nil {
			return nil, err
		}
		if total += d.Size; total > r.opts.MaxBytes {
			return nil, fmt.Errorf("manifest: layers of more than %d bytes", r.opts.MaxBytes)
		}
		out.layers = append(out.layers, r.layer(d, diffIDs[i]))
		out.blobs = append(out.blobs, Blob{Digest: d.Digest.String(), DiffID: diffIDs[i], Size: d.Size})
	}
	return out, nil
}

// diffIDsOf reads the digests of the plain layers; empty where a config says
// nothing that can be used.
func diffIDsOf(rawConfig []byte, n int) []string {
	out := make([]string, n)
	f, err := v1.ParseConfigFile(bytes.NewReader(rawConfig))
	if err != nil || len(f.RootFS.DiffIDs) != n {
		return out
	}
	for i, d := range f.RootFS.DiffIDs {
		if d.Algorithm == "sha256" {
			out[i] = d.String()
		}
	}
	return out
}

func (r resolver) config(raw []byte) (*Config, error) {
	f, err := v1.ParseConfigFile(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	want, err := r.platform()
	if err != nil {
		return nil, err
	}
	if f.Architecture != "" && f.Architecture != want.Architecture || f.OS != "" && f.OS != want.OS {
		return nil, fmt.Errorf("%w: the image is for %s/%s, not %s", errPlatform, f.OS, f.Architecture, want)
	}
	return configFrom(f)
}

// configFrom keeps what running needs.
func configFrom(f *v1.ConfigFile) (*Config, error) {
	c := &Config{User: f.Config.User, Workdir: f.Config.WorkingDir, Entrypoint: f.Config.Entrypoint, Cmd: f.Config.Cmd,
		Arch: f.Architecture, StopSignal: f.Config.StopSignal}
	size := len(c.User) + len(c.Workdir) + len(c.StopSignal)
	for _, kv := range f.Config.Env {
		if strings.Contains(kv, "=") {
			c.Env = append(c.Env, kv)
		}
	}
	for _, list := range [][]string{c.Env, c.Entrypoint, c.Cmd, {c.User, c.Workdir}} {
		for _, s := range list {
			if strings.ContainsRune(s, 0) {
				return nil, errors.New("config: a zero byte in a string")
			}
			size += len(s)
		}
	}
	if size > dsec.MaxEnvBytes {
		return nil, fmt.Errorf("config: %d bytes of settings, at most %d", size, dsec.MaxEnvBytes)
	}
	return c, nil
}

// checkLayer refuses what is no file system, and what would have us fetch from
// an address that the image chose.
func checkLayer(d v1.Descriptor) error {
	if len(d.URLs) > 0 || !d.MediaType.IsDistributable() {
		return fmt.Errorf("layer %s: kept elsewhere than the image", d.Digest)
	}
	if d.MediaType != "" && !strings.Contains(string(d.MediaType), "tar") && !d.MediaType.IsLayer() {
		return fmt.Errorf("layer %s: of type %s", d.Digest, dsec.Quote(string(d.MediaType)))
	}
	return checkDescriptor(d)
}

func checkDescriptor(d v1.Descriptor) error {
	if d.Digest.Algorithm != "sha256" {
		return fmt.Errorf("digest %s: want sha256", dsec.Quote(d.Digest.String()))
	}
	if d.Size < 0 {
		return fmt.Errorf("%s: size %d", d.Digest, d.Size)
	}
	return nil
}

// read returns a whole verified blob of at most limit bytes.
func (r resolver) read(ctx context.Context, d v1.Descriptor, limit int64, manifest bool) ([]byte, error) {
	if err := checkDescriptor(d); err != nil {
		return nil, err
	}
	if d.Size > limit {
		return nil, fmt.Errorf("%s: %d bytes, at most %d", d.Digest, d.Size, limit)
	}
	f, err := r.store.blob(ctx, d, manifest)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(verify(f, d.Digest, d.Size))
	return b, errors.Join(err, f.Close())
}

// both closes the reader of plain bytes and what it reads from.
type both struct {
	io.ReadCloser
	under io.Closer
}

func (b both) Close() error { return errors.Join(b.ReadCloser.Close(), b.under.Close()) }
