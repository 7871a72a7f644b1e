package boot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/debian"
	"github.com/opendsec/dsec/internal/within"
)

// tree is an unpacked kernel in the cache.
type tree struct {
	cache string
	deb   string // digest of its package
	index index
}

func (t tree) path(name string) string { return filepath.Join(t.cache, "kernel", t.deb, name) }

// unpacked returns the kernel of a package, and unpacks it if that was not done
// or is damaged.
func unpacked(ctx context.Context, cache, deb string, l Lock) (tree, error) {
	t := tree{cache: cache, deb: l.Deb}
	if t.load() {
		return t, nil
	}
	if err := os.RemoveAll(t.path("")); err != nil {
		return tree{}, dsec.E(dsec.Internal, "remove damaged kernel", t.path(""), err)
	}
	work, err := os.MkdirTemp(cache, "tmp-")
	if err != nil {
		return tree{}, diskError("unpack kernel", l.Package, err)
	}
	defer func() { _ = os.RemoveAll(work) }()
	if err := os.Mkdir(filepath.Join(work, "modules"), 0o755); err != nil {
		return tree{}, diskError("unpack kernel", l.Package, err)
	}
	u := unpack{dir: work, index: index{Format: format, Modules: map[string]module{}}}
	f, err := os.Open(deb)
	if err != nil {
		return tree{}, dsec.E(dsec.Internal, "open", deb, err)
	}
	defer func() { _ = f.Close() }()
	if err := debian.EachFile(within.Reader(ctx, f), l.Package, debian.Limits{}, ours, u.file); err != nil {
		if e := ctx.Err(); e != nil {
			err = dsec.E(dsec.ClassOf(e), "unpack kernel", l.Package, e)
		}
		return tree{}, err
	}
	if err := u.finish(l.Package); err != nil {
		return tree{}, err
	}
	if err := os.MkdirAll(filepath.Join(cache, "kernel"), 0o755); err != nil {
		return tree{}, diskError("unpack kernel", l.Package, err)
	}
	if err := os.Rename(work, t.path("")); err != nil {
		return tree{}, dsec.E(dsec.Internal, "unpack kernel", l.Package, err)
	}
	t.index = u.index
	return t, nil
}

// load reports whether the kernel is there, whole. Modules are compared when
// they are read.
func (t *tree) load() bool {
	text, err := os.ReadFile(t.path("index.json"))
	if err != nil || decodeStrict(text, &t.index) != nil || t.index.Format != format {
		return false
	}
	sum, err := sumFile(t.path("vmlinux"))
	if err != nil || sum != t.index.Vmlinux {
		return false
	}
	for name := range t.index.Modules {
		if _, err := os.Stat(t.path("modules/" + name + ".ko")); err != nil {
			return false
		}
	}
	return true
}

// errDamaged is a file of an unpacked kernel that is not what was unpacked.
var errDamaged = errors.New("it is damaged")

// module reads one. After errDamaged the kernel is unpacked again.
func (t tree) module(name string) ([]byte, error) {
	file := t.path("modules/" + name + ".ko")
	b, err := os.ReadFile(file)
	if err == nil && fmt.Sprintf("%x", sha256.Sum256(b)) == t.index.Modules[name].SHA256 {
		return b, nil
	}
	return nil, dsec.E(dsec.Corrupt, "read module", file, errors.Join(errDamaged, err, os.Remove(t.path("index.json"))))
}

// ours are the files of a kernel package that are used.
func ours(name string) bool {
	if strings.HasPrefix(name, "boot/vmlinuz-") {
		return true
	}
	rest, ok := strings.CutPrefix(name, "lib/modules/")
	if !ok {
		rest, ok = strings.CutPrefix(name, "usr/lib/modules/") // where /usr has all
	}
	_, file, _ := strings.Cut(rest, "/")
	return ok && (file == "modules.builtin" || strings.HasSuffix(file, ".ko") || strings.HasSuffix(file, ".ko.xz"))
}

// unpack takes the files of a package as they come.
type unpack struct {
	dir       string
	index     index
	image     bool   // there was a vmlinuz
	forKernel string // the kernel that the modules are for
}

func (u *unpack) file(name string, size int64, r io.Reader) error {
	if strings.HasSuffix(name, ".xz") {
		var err error
		if r, err = debian.Unxz(r); err != nil {
			return dsec.E(dsec.ClassOf(err), "decompress", name, err)
		}
	}
	content, err := io.ReadAll(io.LimitReader(r, maxVmlinux+1))
	if err != nil {
		return dsec.E(dsec.Corrupt, "read", name, err)
	}
	if len(content) > maxVmlinux {
		return dsec.Errorf(dsec.Corrupt, "read", name, "more than %d bytes", maxVmlinux)
	}
	if release, ok := strings.CutPrefix(name, "boot/vmlinuz-"); ok {
		if u.image {
			return dsec.Errorf(dsec.Corrupt, "unpack kernel", name, "there are two in one package")
		}
		u.image, u.index.Release = true, release
		if content, err = Vmlinux(content); err != nil {
			return err
		}
		u.index.Vmlinux = fmt.Sprintf("%x", sha256.Sum256(content))
		return u.write("vmlinux", content)
	}
	if strings.HasSuffix(name, "modules.builtin") {
		u.index.Builtin = parseBuiltin(content)
		return nil
	}
	return u.module(name, content)
}

func (u *unpack) module(file string, content []byte) error {
	const op = "read module"
	own, release, depends, err := modinfo(content)
	if err != nil {
		return dsec.E(dsec.Corrupt, op, file, err)
	}
	name := moduleName(file)
	if strings.ReplaceAll(own, "-", "_") != name {
		return dsec.Errorf(dsec.Corrupt, op, file, "it says that its name is %s", dsec.Quote(own))
	}
	if _, twice := u.index.Modules[name]; twice {
		return dsec.Errorf(dsec.Corrupt, op, file, "there are two of this name")
	}
	if u.forKernel == "" {
		u.forKernel = release
	}
	if release != u.forKernel {
		return dsec.Errorf(dsec.Corrupt, op, file, "it is for kernel %s, others for %s", dsec.Quote(release), dsec.Quote(u.forKernel))
	}
	u.index.Modules[name] = module{SHA256: fmt.Sprintf("%x", sha256.Sum256(content)), Depends: depends}
	return u.write("modules/"+name+".ko", content)
}

func (u *unpack) write(name string, content []byte) error {
	name = filepath.Join(u.dir, name)
	if err := os.WriteFile(name, content, 0o444); err != nil {
		return diskError("write", name, err)
	}
	return nil
}

// finish writes the index, without which the rest does not count.
func (u *unpack) finish(object string) error {
	switch {
	case !u.image:
		return dsec.Errorf(dsec.Corrupt, "unpack kernel", object, "there is no boot/vmlinuz in it")
	case u.forKernel != "" && u.forKernel != u.index.Release:
		return dsec.Errorf(dsec.Corrupt, "unpack kernel", object, "its modules are for kernel %s, not for %s", dsec.Quote(u.forKernel), dsec.Quote(u.index.Release))
	}
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetIndent("", " ")
	if err := e.Encode(u.index); err != nil {
		return dsec.E(dsec.Internal, "unpack kernel", object, err)
	}
	return u.write("index.json", text.Bytes())
}
