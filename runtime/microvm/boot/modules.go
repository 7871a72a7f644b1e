package boot

import (
	"bytes"
	"debug/elf"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
)

// index is what is known of an unpacked kernel.
type index struct {
	Format  int               `json:"format"`
	Release string            `json:"release"`
	Vmlinux string            `json:"vmlinux"` // SHA-256
	Builtin []string          `json:"builtin"` // names of modules that are in the kernel itself
	Modules map[string]module `json:"modules"` // by name, with underscores
}

type module struct {
	SHA256  string   `json:"sha256"`
	Depends []string `json:"depends,omitempty"`
}

// moduleName is how the kernel calls what is in a file.
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// order returns the modules to load for these, each after those it needs, and
// once. It depends on nothing but its arguments.
func (x index) order(names []string) (order []string, err error) {
	done := map[string]bool{}
	var add func(name string, above []string) error
	add = func(name string, above []string) error {
		if done[name] || slices.Contains(x.Builtin, name) {
			return nil
		}
		if slices.Contains(above, name) {
			return dsec.Errorf(dsec.Corrupt, "order modules", name, "it needs itself: %s", strings.Join(append(above, name), ", "))
		}
		m, ok := x.Modules[name]
		if !ok {
			for _, a := range slices.Backward(above) {
				return dsec.Errorf(dsec.Corrupt, "find module", name, "kernel %s has none, and %s needs it", x.Release, a)
			}
			return dsec.Errorf(dsec.NotFound, "find module", name, "kernel %s has none", x.Release)
		}
		above = append(slices.Clone(above), name)
		for _, d := range m.Depends {
			if err := add(d, above); err != nil {
				return err
			}
		}
		done[name] = true
		order = append(order, name)
		return nil
	}
	for _, n := range names {
		if err := add(strings.ReplaceAll(n, "-", "_"), nil); err != nil {
			return nil, err
		}
	}
	return order, nil
}

// parseBuiltin reads modules.builtin, which has one path in each line.
func parseBuiltin(text []byte) (names []string) {
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" {
			names = append(names, moduleName(line))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// modinfo reads what a module says of itself: its name, the kernel it is for,
// and the modules whose symbols it uses.
func modinfo(ko []byte) (name, release string, depends []string, err error) {
	f, err := elf.NewFile(bytes.NewReader(ko))
	if err != nil {
		return "", "", nil, err
	}
	s := f.Section(".modinfo")
	if s == nil || s.Size > 1<<20 {
		return "", "", nil, fmt.Errorf("no section .modinfo")
	}
	text, err := s.Data()
	if err != nil {
		return "", "", nil, err
	}
	for line := range strings.SplitSeq(string(text), "\x00") {
		key, value, _ := strings.Cut(line, "=")
		switch key {
		case "name":
			name = value
		case "vermagic":
			release, _, _ = strings.Cut(value, " ")
		case "depends":
			for d := range strings.SplitSeq(value, ",") {
				if d != "" {
					depends = append(depends, strings.ReplaceAll(d, "-", "_"))
				}
			}
		}
	}
	return name, release, depends, nil
}
