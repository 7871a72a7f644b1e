package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// Kernel is an unpacked kernel package.
type Kernel struct {
	Image   string // vmlinuz
	Release string // as uname -r says it
	modules string // lib/modules/RELEASE
}

// metaPackage depends on Debian's newest build of the kernel.
const metaPackage = "linux-image-cloud-amd64"

var release = regexp.MustCompile(`linux-image-(6\.1\.[0-9]+-[0-9]+-cloud-amd64)`)

// Fetch returns the kernel from the cache directory, which apt fills once.
func Fetch(ctx context.Context, cache string) (Kernel, error) {
	if k, err := cached(cache); err == nil {
		return k, nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return Kernel{}, err
	}
	out, err := exec.CommandContext(ctx, "apt-cache", "depends", metaPackage).Output()
	if err != nil {
		return Kernel{}, fmt.Errorf("look for %s: %w", metaPackage, err)
	}
	m := release.FindStringSubmatch(string(out))
	if m == nil {
		return Kernel{}, fmt.Errorf("look for %s: it depends on no Linux 6.1; this is not Debian 12", metaPackage)
	}
	work, err := os.MkdirTemp(cache, "fetch-")
	if err != nil {
		return Kernel{}, err
	}
	defer func() { _ = os.RemoveAll(work) }()
	script := `apt-get download -q "$1" && dpkg-deb -x ./*.deb tree && depmod -b tree "$2"`
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", script, "sh", m[0], m[1])
	cmd.Dir = work
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if out, err := cmd.CombinedOutput(); err != nil {
		return Kernel{}, fmt.Errorf("fetch %s: %w: %s", m[0], err, strings.TrimSpace(string(out)))
	}
	// The name appears when all is there, so that two may fetch at once.
	if err := os.Rename(filepath.Join(work, "tree"), filepath.Join(cache, m[1])); err != nil && !errors.Is(err, os.ErrExist) {
		return Kernel{}, err
	}
	return cached(cache)
}

func cached(cache string) (Kernel, error) {
	images, err := filepath.Glob(filepath.Join(cache, "6.1.*", "boot", "vmlinuz-*"))
	if err != nil || len(images) == 0 {
		return Kernel{}, fmt.Errorf("find a kernel in %s: %w", cache, os.ErrNotExist)
	}
	image := images[len(images)-1]
	rel := strings.TrimPrefix(filepath.Base(image), "vmlinuz-")
	return Kernel{Image: image, Release: rel, modules: filepath.Join(filepath.Dir(filepath.Dir(image)), "lib", "modules", rel)}, nil
}

// closure returns the files of modules in loading order, needed ones first.
func (k Kernel) closure(names []string) ([]string, error) {
	b, err := os.ReadFile(filepath.Join(k.modules, "modules.dep"))
	if err != nil {
		return nil, err
	}
	needs := map[string][]string{} // file → files, in the order of loading
	byName := map[string]string{}
	for line := range strings.Lines(string(b)) {
		file, rest, ok := strings.Cut(strings.TrimSpace(line), ":")
		if !ok {
			continue
		}
		needs[file] = strings.Fields(rest)
		byName[strings.ReplaceAll(strings.TrimSuffix(filepath.Base(file), ".ko"), "-", "_")] = file
	}
	builtin, err := os.ReadFile(filepath.Join(k.modules, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	var order []string
	seen := map[string]bool{}
	for _, n := range names {
		file, ok := byName[strings.ReplaceAll(n, "-", "_")]
		if !ok {
			if strings.Contains(string(builtin), "/"+n+".ko") {
				continue
			}
			return nil, fmt.Errorf("kernel %s has no module %s", k.Release, n)
		}
		for i := len(needs[file]) - 1; i >= 0; i-- { // modules.dep lists the nearest first
			if f := needs[file][i]; !seen[f] {
				seen[f] = true
				order = append(order, f)
			}
		}
		if !seen[file] {
			seen[file] = true
			order = append(order, file)
		}
	}
	return order, nil
}
