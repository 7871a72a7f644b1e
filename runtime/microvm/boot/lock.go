package boot

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/debian"
)

// Lock names one kernel exactly (docs/formats/boot.md).
type Lock struct {
	Format   int    `json:"format"`
	Arch     string `json:"arch"`     // as Debian names it
	Codename string `json:"codename"` // of the release of Debian
	Newest   string `json:"newest"`   // the package that depends on the newest build
	Package  string `json:"package"`  // the build that is pinned
	Version  string `json:"version"`
	Deb      string `json:"deb"`     // SHA-256 of the package
	Vmlinux  string `json:"vmlinux"` // SHA-256 of the kernel, uncompressed
}

//go:embed kernel.lock.json
var defaultLock []byte

// Default is the kernel that this version of dsec was tested with.
func Default() (Lock, error) { return ParseLock(defaultLock) }

// ParseLock reads a lock file.
func ParseLock(text []byte) (Lock, error) {
	var l Lock
	if err := decodeStrict(text, &l); err != nil {
		return Lock{}, dsec.E(dsec.Invalid, "parse", "lock file of the kernel", err)
	}
	return l, l.check()
}

var plainName = regexp.MustCompile(`^[a-z0-9][a-z0-9.+-]{0,127}$`)

func (l Lock) check() error {
	const op, object = "check", "lock file of the kernel"
	if l.Format != format {
		return dsec.Errorf(dsec.Unsupported, op, object, "format %d, this version of dsec knows %d", l.Format, format)
	}
	if l.Arch != "amd64" {
		return dsec.Errorf(dsec.Unsupported, op, object, "architecture %s: only amd64 is known", dsec.Quote(l.Arch))
	}
	for _, s := range []string{l.Codename, l.Newest, l.Package} {
		if !plainName.MatchString(s) {
			return dsec.Errorf(dsec.Invalid, op, object, "%s is no name", dsec.Quote(s))
		}
	}
	for _, s := range []string{l.Deb, l.Vmlinux} {
		if b, err := hex.DecodeString(s); err != nil || len(b) != 32 {
			return dsec.Errorf(dsec.Invalid, op, object, "%s is no SHA-256", dsec.Quote(s))
		}
	}
	return nil
}

// pkg returns the .deb of the pinned kernel, or of the newest if that is gone,
// and a lock that names it; its Vmlinux is not known yet if it is another.
func (cfg Config) pkg(ctx context.Context) (deb string, took Lock, err error) {
	cache := debian.Cache{Dir: cfg.Cache}
	pinned := cfg.Lock
	if deb, err := cache.Path(pinned.Deb); dsec.ClassOf(err) != dsec.NotFound {
		return deb, pinned, err
	}
	suite, err := cfg.suite(ctx, cache)
	if err != nil {
		return cfg.earlier(cache, err)
	}
	found, err := suite.Find(ctx, pinned.Package)
	if err != nil {
		return cfg.earlier(cache, err)
	}
	for _, p := range found {
		if p.Version != pinned.Version {
			continue
		}
		if p.SHA256 != pinned.Deb {
			return "", Lock{}, dsec.Errorf(dsec.Corrupt, "check kernel", p.Name+" "+p.Version,
				"the signed suite says its digest is %s; the lock file says %s", p.SHA256, pinned.Deb)
		}
		deb, err = suite.Fetch(ctx, p)
		if dsec.ClassOf(err) != dsec.NotFound {
			return deb, pinned, err
		}
		break // the mirror has removed it already
	}
	return cfg.newest(ctx, suite)
}

func (cfg Config) suite(ctx context.Context, cache debian.Cache) (*debian.Suite, error) {
	apt, keyring := defaultApt, defaultKeyring
	if cfg.Apt != "" {
		apt = cfg.Apt
	}
	if cfg.Keyring != "" {
		keyring = cfg.Keyring
	}
	sources, err := debian.ReadSources(apt)
	if err != nil {
		return nil, err
	}
	return debian.Open(ctx, cfg.Lock.Codename, debian.Config{Sources: sources, Keyring: keyring, Cache: cache,
		Arch: cfg.Lock.Arch, AllowExpired: cfg.AllowExpired, Pause: cfg.Pause})
}

// newest takes what the package of the newest build depends on.
func (cfg Config) newest(ctx context.Context, suite *debian.Suite) (deb string, took Lock, err error) {
	const op = "find the newest kernel"
	pinned := cfg.Lock
	metas, err := suite.Find(ctx, pinned.Newest)
	if err != nil {
		return "", Lock{}, err
	}
	if len(metas) == 0 {
		return "", Lock{}, dsec.Errorf(dsec.NotFound, op, pinned.Newest, "no suite of %s has it", pinned.Codename)
	}
	name, ok := metas[0].Dependency("linux-image-")
	if !ok {
		return "", Lock{}, dsec.Errorf(dsec.NotFound, op, pinned.Newest, "version %s depends on no kernel", metas[0].Version)
	}
	found, err := suite.Find(ctx, name)
	if err != nil {
		return "", Lock{}, err
	}
	if len(found) == 0 {
		return "", Lock{}, dsec.Errorf(dsec.NotFound, op, name, "no suite of %s has it", pinned.Codename)
	}
	p := found[0]
	slog.Warn("the pinned kernel is gone from the mirror: the newest is taken", "pinned", pinned.Package+" "+pinned.Version,
		"taken", p.Name+" "+p.Version)
	if deb, err = suite.Fetch(ctx, p); err != nil {
		return "", Lock{}, err
	}
	took = pinned
	took.Package, took.Version, took.Deb, took.Vmlinux = p.Name, p.Version, p.SHA256, ""
	return deb, took, nil
}

// remember keeps what was taken for a pinned kernel that was gone.
func (cfg Config) remember(took Lock) error {
	text, err := json.MarshalIndent(took, "", "  ")
	if err != nil {
		return dsec.E(dsec.Internal, "write", cfg.newestFile(), err)
	}
	text = append(text, '\n')
	if old, err := os.ReadFile(cfg.newestFile()); err == nil && bytes.Equal(old, text) {
		return nil
	}
	return writeFile(cfg.Cache, cfg.newestFile(), text)
}

func (cfg Config) newestFile() string {
	return filepath.Join(cfg.Cache, "newest-"+cfg.Lock.Codename+".json")
}

// earlier returns what was taken for the pinned kernel when the mirror could be
// reached the last time. Only a mirror that is away makes that enough.
func (cfg Config) earlier(cache debian.Cache, cause error) (string, Lock, error) {
	if dsec.ClassOf(cause) != dsec.Unavailable {
		return "", Lock{}, cause
	}
	text, err := os.ReadFile(cfg.newestFile())
	if err != nil {
		return "", Lock{}, cause
	}
	took, err := ParseLock(text)
	if err != nil || took.Newest != cfg.Lock.Newest {
		return "", Lock{}, cause
	}
	deb, err := cache.Path(took.Deb)
	if err != nil {
		return "", Lock{}, cause
	}
	slog.Warn("the pinned kernel is not in the cache and the mirror is away: what was taken for it before is taken again",
		"pinned", cfg.Lock.Package+" "+cfg.Lock.Version, "taken", took.Package+" "+took.Version, "error", cause)
	return deb, took, nil
}
