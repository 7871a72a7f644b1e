package image

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/klauspost/readahead"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/within"
)

// Puller fetches images layer by layer. What a registry says to one of its
// requests (wait, and for how long) holds for all of them, whatever image they
// are for. It is safe for concurrent use.
type Puller struct {
	mu    sync.Mutex
	gates map[string]*gate             // by registry
	ways  map[string]http.RoundTripper // by registry, repository and user
}

// NewPuller returns a Puller.
func NewPuller() *Puller {
	return &Puller{gates: map[string]*gate{}, ways: map[string]http.RoundTripper{}}
}

// Blob is what an OCI layer is read from.
type Blob struct {
	Digest string `json:"digest"`            // of what is fetched
	DiffID string `json:"diff_id,omitempty"` // of the plain tar, as the image claims; Finish compares
	Size   int64  `json:"size"`              // of what is fetched, bytes
}

// Remote is an image in a registry that has been resolved, with nothing of its
// layers fetched.
type Remote struct {
	Name   string // with the registry that has it
	Config *Config
	Layers []Blob

	puller *Puller
	ref    name.Reference
	opts   Options
}

// Resolve finds the image of a reference for the platform of the options. The
// registry's mirrors are asked first.
func (p *Puller) Resolve(ctx context.Context, source string, opts Options) (*Remote, error) {
	const op = "pull"
	if err := opts.fill(); err != nil {
		return nil, classify(op, source, err)
	}
	ref, err := parseReference(strings.TrimPrefix(source, "docker://"), opts)
	if err != nil {
		return nil, dsec.Errorf(dsec.Invalid, "parse reference", dsec.Quote(source), "%w", err)
	}
	var errs []error
	for _, c := range candidates(ref, opts) {
		r := &Remote{Name: c.Name(), puller: p, ref: c, opts: opts}
		err := patiently(ctx, func() error { return r.resolve(ctx) })
		if err == nil {
			return r, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", c.Context().RegistryStr(), err))
	}
	// The registry that was named has the last word.
	last := classify(op, ref.Name(), errs[len(errs)-1])
	return nil, dsec.E(dsec.ClassOf(last), op, ref.Name(), errors.Join(errs...))
}

func (r *Remote) resolve(ctx context.Context) error {
	way, err := r.way(ctx)
	if err != nil {
		return registryError(r.Name, err)
	}
	store := repository{ref: r.ref, opts: r.opts, way: way}
	img, err := store.open(ctx)
	if err != nil {
		return registryError(r.Name, err)
	}
	r.Config, r.Layers = img.config, img.blobs
	return nil
}

// way is the authorised way to the repository.
func (r *Remote) way(ctx context.Context) (http.RoundTripper, error) {
	repo := r.ref.Context()
	cred := r.opts.Credentials[repo.RegistryStr()]
	key := repo.Name() + "\n" + cred.Username + "\n" + cred.Password + "\n" + cred.Token
	r.puller.mu.Lock()
	way, gate := r.puller.ways[key], r.puller.gates[repo.RegistryStr()]
	if gate == nil {
		gate = newGate(remote.DefaultTransport)
		r.puller.gates[repo.RegistryStr()] = gate
	}
	r.puller.mu.Unlock()
	if way != nil {
		return way, nil
	}
	way, err := transport.NewWithContext(ctx, repo.Registry, authOf(cred), gate, []string{repo.Scope(transport.PullScope)})
	if err != nil {
		return nil, err
	}
	r.puller.mu.Lock()
	defer r.puller.mu.Unlock()
	if len(r.puller.ways) > maxWays {
		clear(r.puller.ways)
	}
	r.puller.ways[key] = way
	return way, nil
}

// maxWays bounds the tokens that are kept.
const maxWays = 1024

func authOf(c Credentials) authn.Authenticator {
	if c == (Credentials{}) {
		return authn.Anonymous
	}
	return authn.FromConfig(authn.AuthConfig{Username: c.Username, Password: c.Password, IdentityToken: c.Token})
}

// Open streams the blob of a layer. The stream ends in io.EOF only if the whole
// had its digest and size; Corrupt otherwise. What partial has of the blob is
// not fetched again, and what is fetched is added to it; nil keeps nothing. A
// connection that breaks is taken up where it broke.
func (r *Remote) Open(ctx context.Context, b Blob, partial *os.File) (io.ReadCloser, error) {
	want, err := v1.NewHash(b.Digest)
	if err != nil {
		return nil, dsec.E(dsec.Invalid, "fetch", dsec.Quote(b.Digest), err)
	}
	f := &fetching{ctx: ctx, remote: r, blob: b, partial: partial}
	if partial != nil {
		st, err := partial.Stat()
		if err != nil {
			return nil, classify("fetch", b.Digest, err)
		}
		f.have = min(st.Size(), b.Size)
	}
	return readCloser{verify(f, want, b.Size), f}, nil
}

// fetching is a blob on its way, from the partial file and then from the
// registry.
type fetching struct {
	ctx     context.Context
	remote  *Remote
	blob    Blob
	partial *os.File
	have    int64 // of partial, from the beginning
	off     int64 // of the next byte to return
	body    io.ReadCloser
	failed  int // times in a row without a byte
}

// maxFailures is how often a download is taken up again without progress.
const maxFailures = 5

func (f *fetching) Read(p []byte) (int, error) {
	if f.off >= f.blob.Size {
		return 0, io.EOF
	}
	if f.off < f.have {
		n, err := f.partial.ReadAt(p[:min(int64(len(p)), f.have-f.off)], f.off)
		f.off += int64(n)
		if n > 0 {
			err = nil
		}
		return n, err
	}
	for {
		n, err := f.fetch(p)
		if n > 0 {
			f.failed = 0
			if f.partial != nil {
				if _, err := f.partial.WriteAt(p[:n], f.off); err != nil {
					return 0, classify("keep", f.blob.Digest, err)
				}
			}
			f.off += int64(n)
			return n, nil
		}
		if err == nil {
			continue
		}
		if f.failed++; f.failed > maxFailures || f.ctx.Err() != nil || !passing(err) {
			return 0, registryError(f.remote.Name, err)
		}
		if err := within.Sleep(f.ctx, time.Second<<f.failed/2); err != nil {
			return 0, err
		}
	}
}

// passing tells whether what went wrong may not go wrong again.
func passing(err error) bool {
	return errors.Is(err, io.ErrUnexpectedEOF) || dsec.ClassOf(registryError("", err)) == dsec.Unavailable
}

// fetch reads from the connection, which it makes if there is none.
func (f *fetching) fetch(p []byte) (int, error) {
	if f.body == nil {
		if err := f.connect(); err != nil {
			return 0, err
		}
	}
	n, err := f.body.Read(p[:min(int64(len(p)), f.blob.Size-f.off)])
	if err != nil {
		f.body.Close()
		f.body = nil
		if err == io.EOF && f.off+int64(n) < f.blob.Size {
			err = io.ErrUnexpectedEOF
		}
	}
	return n, err
}

func (f *fetching) connect() error {
	way, err := f.remote.way(f.ctx)
	if err != nil {
		return err
	}
	repo := f.remote.ref.Context()
	url := fmt.Sprintf("%s://%s/v2/%s/blobs/%s", repo.Scheme(), repo.RegistryStr(), repo.RepositoryStr(), f.blob.Digest)
	req, err := http.NewRequestWithContext(f.ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	if f.off > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", f.off, f.blob.Size-1))
	}
	resp, err := (&http.Client{Transport: way}).Do(req)
	if err != nil {
		return err
	}
	if err := transport.CheckError(resp, http.StatusOK, http.StatusPartialContent); err != nil {
		resp.Body.Close()
		return err
	}
	if f.off > 0 && resp.StatusCode == http.StatusOK { // a registry that knows no ranges
		if _, err := io.CopyN(io.Discard, resp.Body, f.off); err != nil {
			resp.Body.Close()
			return err
		}
	}
	f.body = resp.Body
	return nil
}

func (f *fetching) Close() error {
	if f.body == nil {
		return nil
	}
	return f.body.Close()
}

// Plain is a layer as a plain tar, on its way. Fetching, decompressing and what
// the caller does go on side by side.
type Plain struct {
	io.Reader
	under  io.ReadCloser // the blob, ahead
	plain  io.ReadCloser // what it is decompressed by
	ahead  io.ReadCloser
	hash   hash.Hash
	want   string // digest of the plain tar; "": not known
	cancel context.CancelFunc
}

// How far each stage of a Plain runs ahead of the next.
const (
	aheadBuffers = 4
	aheadSize    = 256 << 10 // bytes
)

// OpenPlain is Open with what it gives decompressed. fetched, if not nil, is
// told of the bytes of the blob that came, those of partial among them, by a
// goroutine of its own. An end of the stream says that all was verified, if it
// is read to io.EOF.
func (r *Remote) OpenPlain(ctx context.Context, b Blob, partial *os.File, fetched func(n int)) (*Plain, error) {
	ctx, cancel := context.WithCancel(ctx)
	p := &Plain{hash: newHash(), want: b.DiffID, cancel: cancel}
	f, err := r.Open(ctx, b, partial)
	if err != nil {
		cancel()
		return nil, err
	}
	p.under, err = readahead.NewReadCloserSize(told{f, fetched}, aheadBuffers, aheadSize)
	if err == nil {
		p.plain, err = decompress(p.under, r.opts.MaxRatio)
	}
	if err == nil {
		p.ahead, err = readahead.NewReaderSize(p.plain, aheadBuffers, aheadSize)
	}
	if err != nil {
		return nil, classify("fetch", b.Digest, errors.Join(err, p.Close()))
	}
	p.Reader = io.TeeReader(p.ahead, p.hash)
	return p, nil
}

// Finish reads what follows the end of the compressed stream, so that the whole
// blob is verified, and returns the digest of the plain content: Corrupt if the
// image claims another one.
func (p *Plain) Finish() (diffID string, err error) {
	if _, err := io.Copy(io.Discard, p); err != nil {
		return "", err
	}
	// Its WriteTo says that a stream which has ended has.
	if _, err := io.Copy(io.Discard, struct{ io.Reader }{p.under}); err != nil {
		return "", err
	}
	diffID = "sha256:" + hex.EncodeToString(p.hash.Sum(nil))
	if p.want != "" && diffID != p.want {
		return "", dsec.Errorf(dsec.Corrupt, "read layer", p.want, "plain content has digest %s", diffID)
	}
	return diffID, nil
}

// Close ends the download.
func (p *Plain) Close() error {
	p.cancel() // a read that waits ends, and with it the stage
	var errs []error
	for _, c := range []io.Closer{p.ahead, p.plain, p.under} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// told tells how much was read.
type told struct {
	io.ReadCloser
	fn func(n int)
}

func (t told) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if t.fn != nil && n > 0 {
		t.fn(n)
	}
	return n, err
}
