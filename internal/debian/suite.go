package debian

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/sizes"
)

// Config is where to ask, and whom to believe.
type Config struct {
	Sources      []Source
	Keyring      string // a file of public keys
	Cache        Cache
	Arch         string           // as Debian names it: amd64
	AllowExpired bool             // take a Release after its Valid-Until
	Client       *http.Client     // nil: one with the proxy of the environment
	Now          func() time.Time // nil: time.Now
	Pause        time.Duration    // before a mirror is asked again; 0: a second
}

// Suite is a release of Debian as the machine's sources have it now.
type Suite struct {
	cfg   Config
	get   fetcher
	parts []part
}

// part is one suite of one archive, verified.
type part struct {
	Source
	rel *release
}

// Package is one package as a signed list names it.
type Package struct {
	Name, Version string
	Depends       string
	SHA256        string
	Size          int64
	url           string
}

// Open verifies the Release of every suite that the sources have for the
// codename. One that is away, or not as it has to be, is an error: without the
// security updates the rest would look complete.
func Open(ctx context.Context, codename string, cfg Config) (*Suite, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Client == nil {
		cfg.Client = http.DefaultClient
	}
	if cfg.Pause == 0 {
		cfg.Pause = time.Second
	}
	keys, err := readKeyring(cfg.Keyring)
	if err != nil {
		return nil, err
	}
	s := &Suite{cfg: cfg, get: fetcher{cfg.Client, cfg.Pause, longStall}}
	for _, src := range cfg.Sources {
		same := func(p part) bool { return p.URI == src.URI && p.Suite == src.Suite }
		if !src.serves(codename) || slices.ContainsFunc(s.parts, same) {
			continue
		}
		if src.others(cfg.Keyring) {
			slog.Warn("a source of apt is not asked: it is signed by others", "url", src.URI, "suite", src.Suite, "in", src.From, "keyring", cfg.Keyring)
			continue
		}
		url := src.URI + "/dists/" + src.Suite + "/InRelease"
		text, err := s.read(ctx, url, maxRelease)
		if err != nil {
			return nil, err
		}
		now := cfg.Now()
		if text, err = verifyRelease(text, keys, url, now); err != nil {
			return nil, err
		}
		rel, err := parseRelease(text, url)
		if err != nil {
			return nil, err
		}
		if err := rel.judge(src.Suite, url, now, cfg.AllowExpired); err != nil {
			return nil, err
		}
		if err := cfg.Cache.notOlder(src.URI+" "+src.Suite, url, rel.date); err != nil {
			return nil, err
		}
		s.parts = append(s.parts, part{src, rel})
	}
	if len(s.parts) == 0 {
		return nil, dsec.Errorf(dsec.NotFound, "find suite", codename, "no source of apt has it, with a component main, by http, for the keyring %s", cfg.Keyring)
	}
	return s, nil
}

// read returns a file that no list promises.
func (s *Suite) read(ctx context.Context, url string, limit int64) ([]byte, error) {
	f, err := s.cfg.Cache.temp("files")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.Remove(f.Name()); _ = f.Close() }()
	n, err := s.get.fetch(ctx, url, f, limit)
	if err != nil {
		return nil, err
	}
	text := make([]byte, n)
	if _, err := f.ReadAt(text, 0); err != nil && err != io.EOF {
		return nil, dsec.E(dsec.Internal, "read", f.Name(), err)
	}
	return text, nil
}

// Find returns every package of this name, the newest first. None is no error.
func (s *Suite) Find(ctx context.Context, name string) ([]Package, error) {
	var all []Package
	for _, p := range s.parts {
		found, err := s.list(ctx, p, name)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	slices.SortStableFunc(all, func(a, b Package) int { return Compare(b.Version, a.Version) })
	return all, nil
}

func (s *Suite) list(ctx context.Context, p part, name string) (found []Package, err error) {
	file, object, suffix, err := s.index(ctx, p)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "open", file, err)
	}
	defer func() { _ = f.Close() }()
	r, done, err := decompress(f, suffix)
	if err != nil {
		return nil, refuse("decompress", object, "%w", err)
	}
	defer done()
	limited := &capped{r, maxPackages, refuse("decompress", object, "more than %d bytes", int64(maxPackages))}
	head := []byte("Package: " + name + "\n")
	err = eachStanza(limited, object, func(text []byte) error {
		// Only what is looked for is taken apart: there are 60 000 others.
		if !bytes.HasPrefix(text, head) && !bytes.Contains(text, append([]byte{'\n'}, head...)) {
			return ctx.Err()
		}
		pkg, err := parsePackage(text, object)
		if err == nil && pkg.Name == name {
			pkg.url = p.URI + "/" + pkg.url
			found = append(found, pkg)
		}
		return err
	})
	if err != nil && dsec.ClassOf(err) == dsec.Internal {
		err = refuse("decompress", object, "%w", err)
	}
	return found, err
}

func parsePackage(text []byte, object string) (Package, error) {
	f, err := parseStanza(text, object)
	if err != nil {
		return Package{}, err
	}
	pkg := Package{Name: f["package"], Version: f["version"], Depends: f["depends"], url: f["filename"]}
	want, err := parsePromise(f["sha256"], f["size"])
	if err != nil || pkg.Name == "" || pkg.Version == "" || !localPath(pkg.url) || want.size > maxDeb {
		return Package{}, refuse("parse", object, "package %s: its version, file, size or digest is missing or wrong", dsec.Quote(pkg.Name))
	}
	pkg.SHA256, pkg.Size = want.sum, want.size
	return pkg, nil
}

// index returns the cached list of packages of a part, in the smallest form
// that the mirror has.
func (s *Suite) index(ctx context.Context, p part) (file, object, suffix string, err error) {
	base := "main/binary-" + s.cfg.Arch + "/Packages"
	root := p.URI + "/dists/" + p.Suite + "/"
	var missing []error
	for _, suffix := range []string{".xz", ".gz", ""} {
		want, ok := p.rel.files[base+suffix]
		if !ok {
			continue
		}
		urls := []string{root + base + suffix}
		if p.rel.byHash { // the same for as long as this Release counts
			urls = slices.Insert(urls, 0, root+"main/binary-"+s.cfg.Arch+"/by-hash/SHA256/"+want.sum)
		}
		if want.size > maxIndex {
			return "", "", "", refuse("check", urls[0], "it has %d bytes, at most %d", want.size, maxIndex)
		}
		for _, url := range urls {
			file, err := s.cached(ctx, url, want)
			if err == nil {
				return file, url, suffix, nil
			}
			if dsec.ClassOf(err) != dsec.NotFound {
				return "", "", "", err
			}
			missing = append(missing, err)
		}
	}
	if missing == nil {
		return "", "", "", dsec.Errorf(dsec.NotFound, "find", root+base, "its Release names no list for this architecture")
	}
	return "", "", "", errors.Join(missing...)
}

// Fetch returns the package's file in the cache. Its content is what the signed
// list promised.
func (s *Suite) Fetch(ctx context.Context, p Package) (string, error) {
	return s.cached(ctx, p.url, promise{p.SHA256, p.Size})
}

func (s *Suite) cached(ctx context.Context, url string, want promise) (string, error) {
	name, err := s.cfg.Cache.Path(want.sum)
	if dsec.ClassOf(err) != dsec.NotFound {
		return name, err
	}
	start := time.Now()
	slog.Debug("fetching", "url", url, "size", sizes.Text(want.size))
	for again := false; ; again = true {
		broke := false
		name, err = s.cfg.Cache.fill(ctx, want, url, func(ctx context.Context, f *os.File) error {
			n, err := s.get.fetch(ctx, url, f, want.size)
			broke = err == nil && n > 0
			return err
		})
		// What was put together of pieces, or came through a cache on the way, may be
		// two states of one file: asked for once more from its beginning.
		if again || !broke || dsec.ClassOf(err) != dsec.Corrupt {
			break
		}
		slog.Warn("fetching again", "url", url, "error", err)
	}
	if err == nil {
		slog.Info("fetched", "url", url, "in", time.Since(start).Round(time.Millisecond))
	}
	return name, err
}

// Dependency returns the packages that a Depends field begins with one of:
// their names start with the prefix.
func (p Package) Dependency(prefix string) (name string, ok bool) {
	for d := range strings.SplitSeq(p.Depends, ",") {
		name, _, _ := strings.Cut(strings.TrimSpace(d), " ")
		if strings.HasPrefix(name, prefix) && !strings.Contains(d, "|") {
			return name, true
		}
	}
	return "", false
}
