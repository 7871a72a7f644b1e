package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/opendsec/dsec"
)

// How long one request may wait because a registry asks it to.
const (
	maxRetryAfter = 2 * time.Minute
	maxWaits      = 5
)

// Credentials for a registry, as docker's config holds them.
type Credentials struct {
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
	Token    string `json:"token,omitempty"` // an identity token, instead of a password
}

// FindCredentials looks a reference's registry and its mirrors up in the
// caller's docker config ($DOCKER_CONFIG or ~/.docker): the process that
// converts is another user and has none. A source that is no reference has no
// credentials.
func FindCredentials(source string, opts Options) map[string]Credentials {
	ref, err := parseReference(strings.TrimPrefix(source, "docker://"), opts)
	if err != nil {
		return nil
	}
	found := map[string]Credentials{}
	for _, c := range candidates(ref, opts) {
		a, err := authn.DefaultKeychain.Resolve(c.Context())
		if err != nil || a == authn.Anonymous {
			continue
		}
		cfg, err := a.Authorization()
		if err != nil {
			continue
		}
		found[c.Context().RegistryStr()] = Credentials{Username: cfg.Username, Password: cfg.Password, Token: cfg.IdentityToken}
	}
	return found
}

func parseReference(ref string, opts Options) (name.Reference, error) {
	var o []name.Option
	if opts.Insecure {
		o = append(o, name.Insecure)
	}
	return name.ParseReference(ref, o...)
}

// candidates lists where to ask for ref: the mirrors of its registry, then
// itself.
func candidates(ref name.Reference, opts Options) []name.Reference {
	var out []name.Reference
	for _, host := range append(opts.Mirrors[ref.Context().RegistryStr()], opts.Mirrors["*"]...) {
		sep := ":"
		if _, ok := ref.(name.Digest); ok {
			sep = "@"
		}
		if m, err := parseReference(host+"/"+ref.Context().RepositoryStr()+sep+ref.Identifier(), opts); err == nil {
			out = append(out, m)
		}
	}
	return append(out, ref)
}

func openRegistry(ctx context.Context, source string, opts Options) (*opened, error) {
	ref, err := parseReference(source, opts)
	if err != nil {
		return nil, dsec.Errorf(dsec.Invalid, "parse reference", dsec.Quote(source), "neither a path nor a reference: %w", err)
	}
	var errs []error
	for _, c := range candidates(ref, opts) {
		r := repository{ref: c, opts: opts}
		img, err := r.open(ctx)
		if err == nil {
			return img, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", c.Context().RegistryStr(), registryError(c.Name(), err)))
	}
	// The registry that was named has the last word.
	last := classify("pull", ref.Name(), errs[len(errs)-1])
	return nil, dsec.E(dsec.ClassOf(last), "pull", ref.Name(), errors.Join(errs...))
}

// repository is one repository of one registry as a contentStore.
type repository struct {
	ref  name.Reference
	opts Options
	way  http.RoundTripper // nil: one of its own
}

func (r repository) open(ctx context.Context) (*opened, error) {
	// Get asks for both families of media types in one request.
	d, err := remote.Get(r.ref, r.options(ctx)...)
	if err != nil {
		return nil, err
	}
	return resolver{store: r, opts: r.opts}.fromManifest(ctx, d.Manifest, d.MediaType, 0)
}

func (r repository) options(ctx context.Context) []remote.Option {
	way := r.way
	if way == nil {
		way = newGate(remote.DefaultTransport)
	}
	return []remote.Option{remote.WithContext(ctx), remote.WithAuth(authOf(r.opts.Credentials[r.ref.Context().RegistryStr()])),
		remote.WithTransport(way), remote.WithUserAgent("dsec")}
}

func (r repository) blob(ctx context.Context, d v1.Descriptor, manifest bool) (io.ReadCloser, error) {
	ref := r.ref.Context().Digest(d.Digest.String())
	if manifest {
		m, err := remote.Get(ref, r.options(ctx)...)
		if err != nil {
			return nil, registryError(ref.Name(), err)
		}
		return io.NopCloser(strings.NewReader(string(m.Manifest))), nil
	}
	l, err := remote.Layer(ref, r.options(ctx)...)
	if err != nil {
		return nil, registryError(ref.Name(), err)
	}
	f, err := l.Compressed()
	if err != nil {
		return nil, registryError(ref.Name(), err)
	}
	return unavailable{f, ref.Name()}, nil
}

// unavailable marks a broken download as something to try again.
type unavailable struct {
	io.ReadCloser
	object string
}

func (u unavailable) Read(p []byte) (int, error) {
	n, err := u.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = registryError(u.object, err)
	}
	return n, err
}

// registryError gives an error of a registry, or of the way to it, its class;
// others it leaves alone.
func registryError(object string, err error) error {
	if _, ok := errors.AsType[*dsec.Error](err); ok {
		return err
	}
	const op = "fetch"
	if te, ok := errors.AsType[*transport.Error](err); ok {
		class := dsec.Unavailable
		switch te.StatusCode {
		case http.StatusNotFound:
			class = dsec.NotFound
		case http.StatusUnauthorized, http.StatusForbidden:
			class = dsec.PermissionDenied // hubs answer so for what does not exist, too
		case http.StatusTooManyRequests:
			class = dsec.ResourceExhausted
		}
		return dsec.E(class, op, object, err)
	}
	_, isNet := errors.AsType[*net.OpError](err)
	_, isURL := errors.AsType[*url.Error](err)
	switch {
	case errors.Is(err, context.Canceled):
		return dsec.E(dsec.Canceled, op, object, err)
	case errors.Is(err, context.DeadlineExceeded):
		return dsec.E(dsec.Timeout, op, object, err)
	case isNet, isURL, errors.Is(err, io.ErrUnexpectedEOF):
		return dsec.E(dsec.Unavailable, op, object, err)
	}
	return err
}

func retryAfter(h string, now time.Time) (time.Duration, bool) {
	if s, err := strconv.Atoi(h); err == nil && s >= 0 {
		return time.Duration(s) * time.Second, true
	}
	if t, err := http.ParseTime(h); err == nil {
		return max(0, t.Sub(now)), true
	}
	return 0, false
}

// ReferenceName is the whole name of what a reference to a registry means, the
// same for all ways to write it. Invalid if it is no reference.
func ReferenceName(source string, opts Options) (string, error) {
	ref, err := parseReference(strings.TrimPrefix(source, "docker://"), opts)
	if err != nil {
		return "", dsec.Errorf(dsec.Invalid, "parse reference", dsec.Quote(source), "%w", err)
	}
	return ref.Name(), nil
}

// IsPinned reports whether a reference names its image by digest, so that it
// never means another.
func IsPinned(source string) bool {
	_, err := name.NewDigest(strings.TrimPrefix(source, "docker://"))
	return err == nil
}
