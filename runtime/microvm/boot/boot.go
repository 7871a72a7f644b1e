// Package boot makes what a virtual machine starts from: an uncompressed kernel
// of Debian's for PVH, and an initramfs with the modules it needs, an init and
// other files.
//
// Which kernel is pinned in a lock file (docs/formats/boot.md): package,
// version, the digest of its .deb and of the kernel in it. A pinned kernel is
// the same on every machine, byte for byte, and the same inputs make the same
// initramfs. Debian removes old versions. When the pinned one is neither in the
// cache nor in the machine's suites, the newest build of the same kernel in the
// signed suites is taken, with a warning, and Kernel.Pinned is false.
//
// Everything made is kept in a cache directory by the digest of its inputs, is
// made once however many processes ask, and is compared with its digest before
// it is handed out:
//
//	files/ dates/ tmp-*        of internal/debian
//	kernel/<.deb>/             vmlinux, modules/<name>.ko, index.json
//	initramfs/<inputs>.cpio    and .sum beside it, its SHA-256
//	newest-<codename>.json     the lock of what was taken for one that was gone
//	lock                       held with flock(2) by who makes something
//
// Nothing removes old kernels and lists of packages from the cache; the whole of
// it may be removed at any time that nobody builds or boots.
package boot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/debian"
	"github.com/opendsec/dsec/internal/linux"
)

// format is in the digest of inputs: the same inputs make other bytes when it
// changes.
const format = 1

// Where the machine says whom it trusts for packages.
const (
	defaultApt     = "/etc/apt"
	defaultKeyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
)

// Config is what to build.
type Config struct {
	Cache   string   // directory, made if it is not there
	Lock    Lock     // the zero value: the one of this version of dsec
	Modules []string // by name, loaded in this order, each after what it needs; built-in ones are left out
	Init    []byte   // the program /init
	Files   []File   // other files of the initramfs

	Apt          string        // configuration of apt; "": /etc/apt
	Keyring      string        // "": Debian's own, of package debian-archive-keyring
	AllowExpired bool          // take a suite after its Valid-Until, as of a mirror that was archived
	Pause        time.Duration // before a mirror is asked again; 0: a second
}

// File is a regular file of an initramfs.
type File struct {
	Name    string // from the root, without a slash at its beginning
	Mode    uint32 // permissions
	Content []byte
}

// Kernel is what was built.
type Kernel struct {
	Release string // as uname -r says it
	Lock    Lock   // what was taken; equal to that of the Config where Pinned
	Pinned  bool   // it is the kernel that the lock file names

	Image     string   // file: vmlinux
	Initramfs string   // file: the archive
	Modules   []string // their names, in the order of loading
}

// Build returns the files to boot from, and makes those that are not in the
// cache. It waits for other processes that build there. What was half made when
// it ends, or is killed, is never seen by the next.
func Build(ctx context.Context, cfg Config) (Kernel, error) {
	if cfg.Lock == (Lock{}) {
		var err error
		if cfg.Lock, err = Default(); err != nil {
			return Kernel{}, err
		}
	}
	if err := cfg.Lock.check(); err != nil {
		return Kernel{}, err
	}
	if err := os.MkdirAll(cfg.Cache, 0o755); err != nil {
		return Kernel{}, dsec.E(dsec.Internal, "make cache", cfg.Cache, err)
	}
	unlock, err := lockFile(ctx, filepath.Join(cfg.Cache, "lock"))
	if err != nil {
		return Kernel{}, err
	}
	defer unlock()
	if err := (debian.Cache{Dir: cfg.Cache}).Sweep(); err != nil {
		return Kernel{}, err
	}
	deb, took, err := cfg.pkg(ctx)
	if err != nil {
		return Kernel{}, err
	}
	k, err := cfg.make(ctx, deb, took)
	if errors.Is(err, errDamaged) {
		slog.Warn("a file of the kernel in the cache is damaged: it is unpacked again", "error", err)
		k, err = cfg.make(ctx, deb, took)
	}
	return k, err
}

// make makes what Build returns from a package.
func (cfg Config) make(ctx context.Context, deb string, took Lock) (Kernel, error) {
	t, err := unpacked(ctx, cfg.Cache, deb, took)
	if err != nil {
		return Kernel{}, err
	}
	if took.Vmlinux != "" && took.Vmlinux != t.index.Vmlinux {
		return Kernel{}, dsec.Errorf(dsec.Corrupt, "check kernel", took.Package,
			"the kernel in it has the digest %s; the lock file says %s", t.index.Vmlinux, took.Vmlinux)
	}
	took.Vmlinux = t.index.Vmlinux
	k := Kernel{Release: t.index.Release, Lock: took, Pinned: took.Deb == cfg.Lock.Deb, Image: t.path("vmlinux")}
	if !k.Pinned {
		if err := cfg.remember(took); err != nil {
			return Kernel{}, err
		}
	}
	if k.Modules, err = t.index.order(cfg.Modules); err != nil {
		return Kernel{}, err
	}
	k.Initramfs, err = cfg.initramfs(t, k.Modules)
	return k, err
}

// lockFile waits for a lock until the context ends.
func lockFile(ctx context.Context, name string) (unlock func(), err error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "lock", name, err)
	}
	if err := linux.FlockContext(ctx, f); err != nil {
		return nil, dsec.E(dsec.ClassOf(err), "lock", name, err)
	}
	return func() { _ = f.Close() }, nil
}

// initramfs returns the archive of these inputs.
func (cfg Config) initramfs(t tree, modules []string) (string, error) {
	const op = "make initramfs"
	files := append([]File{{Name: "init", Mode: 0o755, Content: cfg.Init}}, cfg.Files...)
	h := sha256.New()
	fmt.Fprintf(h, "dsec initramfs %d\n%s\n", format, t.deb)
	for _, m := range modules {
		fmt.Fprintf(h, "module %s %s\n", m, t.index.Modules[m].SHA256)
	}
	for _, f := range files {
		fmt.Fprintf(h, "file %q %o %x\n", f.Name, f.Mode, sha256.Sum256(f.Content))
	}
	dir := filepath.Join(t.cache, "initramfs")
	name := filepath.Join(dir, hex.EncodeToString(h.Sum(nil))+".cpio")
	if sum, err := os.ReadFile(name + ".sum"); err == nil {
		if got, err := sumFile(name); err == nil && got == string(bytes.TrimSpace(sum)) {
			return name, nil
		}
	}
	var ko []File
	for _, m := range modules {
		content, err := t.module(m)
		if err != nil {
			return "", err
		}
		ko = append(ko, File{Name: m, Content: content})
	}
	var out bytes.Buffer
	if err := writeInitramfs(&out, files, ko); err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", dsec.E(dsec.Internal, op, dir, err)
	}
	sum := sha256.Sum256(out.Bytes())
	// The digest is there last: without it the archive counts as damaged.
	if err := writeFile(t.cache, name, out.Bytes()); err != nil {
		return "", err
	}
	return name, writeFile(t.cache, name+".sum", fmt.Appendf(nil, "%x\n", sum))
}

// writeFile makes a file that is there whole or not at all.
func writeFile(cache, name string, content []byte) error {
	f, err := os.CreateTemp(cache, "tmp-")
	if err != nil {
		return diskError("write", name, err)
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = f.Write(content)
	if err := errors.Join(err, f.Chmod(0o444), f.Sync(), f.Close()); err != nil {
		return diskError("write", name, err)
	}
	if err := os.Rename(f.Name(), name); err != nil {
		return diskError("write", name, err)
	}
	return nil
}

func diskError(op, object string, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return dsec.E(dsec.NoSpace, op, object, err)
	}
	return dsec.E(dsec.Internal, op, object, err)
}

func sumFile(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func decodeStrict(text []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("something follows it")
	}
	return nil
}
