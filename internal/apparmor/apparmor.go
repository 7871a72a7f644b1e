// Package apparmor loads AppArmor profiles into the kernel and removes them:
// compiled by apparmor_parser, which is asked once for each text, and written to
// securityfs by us. What a profile says is the business of confine/apparmor.
//
// A process takes a profile by writing "exec NAME" to its attr/apparmor/exec
// before it executes a program; the forker of internal/hold does.
package apparmor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/opendsec/dsec"
)

const (
	enabledFile = "/sys/module/apparmor/parameters/enabled"
	policyDir   = "/sys/kernel/security/apparmor"

	mostCompiled = 1024    // policies kept, each about 10 KiB
	maxPolicy    = 1 << 20 // bytes of one that are believed
)

// Loader compiles and loads. Its methods may be called concurrently.
type Loader struct {
	dir    string // of securityfs
	parser string // program
	userns bool

	mu       sync.Mutex
	compiled map[string][]byte // by text
}

// Open looks whether the kernel has AppArmor and the machine its parser:
// Unsupported, with what is missing, if not.
func Open() (*Loader, error) {
	no := func(object, format string, args ...any) error {
		return dsec.Errorf(dsec.Unsupported, "use AppArmor", object, format, args...)
	}
	b, err := os.ReadFile(enabledFile)
	if err != nil {
		return nil, no(enabledFile, "this kernel has no AppArmor: %w", err)
	}
	if strings.TrimSpace(string(b)) != "Y" {
		return nil, no(enabledFile, "AppArmor is off; boot with apparmor=1 security=apparmor")
	}
	l := &Loader{dir: policyDir, compiled: map[string][]byte{}}
	if f, err := os.OpenFile(filepath.Join(l.dir, ".replace"), os.O_WRONLY, 0); err != nil {
		return nil, no(l.dir, "profiles cannot be loaded; securityfs has to be mounted on /sys/kernel/security: %w", err)
	} else if err := f.Close(); err != nil {
		return nil, no(l.dir, "%w", err)
	}
	for _, p := range []string{"apparmor_parser", "/usr/sbin/apparmor_parser", "/sbin/apparmor_parser"} {
		if l.parser, err = exec.LookPath(p); err == nil {
			break
		}
	}
	if err != nil {
		return nil, no("apparmor_parser", "it is not installed (Debian: apparmor): %w", err)
	}
	l.userns = exists("/etc/apparmor.d/abi/4.0") && exists(filepath.Join(l.dir, "features/namespaces/userns_create"))
	return l, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Userns reports whether parser and kernel know rules for user namespaces.
func (l *Loader) Userns() bool { return l.userns }

// Load puts the profiles of a text into force, instead of those of the same
// names. Processes that have those go on under the new ones.
func (l *Loader) Load(ctx context.Context, name, text string) error {
	policy, err := l.compile(ctx, name, text)
	if err != nil {
		return err
	}
	// One write: the kernel takes a policy whole or not at all.
	if err := writeOnce(filepath.Join(l.dir, ".replace"), policy); err != nil {
		return dsec.E(dsec.Internal, "load AppArmor profile", name, err)
	}
	return nil
}

func writeOnce(file string, b []byte) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Close())
}

func (l *Loader) compile(ctx context.Context, name, text string) ([]byte, error) {
	l.mu.Lock()
	policy := l.compiled[text]
	l.mu.Unlock()
	if policy != nil {
		return policy, nil
	}
	var out, said bytes.Buffer
	cmd := exec.CommandContext(ctx, l.parser, "--skip-kernel-load", "--skip-cache", "--skip-read-cache", "--stdout", "--quiet")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(text), &out, &said
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return nil, dsec.E(dsec.ClassOf(ctx.Err()), "compile AppArmor profile", name, context.Cause(ctx))
		}
		return nil, dsec.Errorf(dsec.Internal, "compile AppArmor profile", name, "%w: %s", err, dsec.Quote(strings.TrimSpace(said.String())))
	}
	if out.Len() == 0 || out.Len() > maxPolicy {
		return nil, dsec.Errorf(dsec.Internal, "compile AppArmor profile", name, "the parser wrote %d bytes", out.Len())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.compiled) >= mostCompiled {
		clear(l.compiled)
	}
	l.compiled[text] = out.Bytes()
	return out.Bytes(), nil
}

// Remove takes a profile out of force; that there is none is no error.
// Processes that still have it become unconfined, so it goes last.
func (l *Loader) Remove(name string) error {
	err := writeOnce(filepath.Join(l.dir, ".remove"), []byte(name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return dsec.E(dsec.Internal, "remove AppArmor profile", name, err)
	}
	return nil
}

// Loaded are the names of profiles with a prefix that are in force.
func (l *Loader) Loaded(prefix string) ([]string, error) {
	b, err := os.ReadFile(filepath.Join(l.dir, "profiles"))
	if err != nil {
		return nil, dsec.E(dsec.Internal, "list AppArmor profiles", l.dir, err)
	}
	var names []string
	for line := range strings.Lines(string(b)) { // "name (enforce)"
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
	}
	return names, nil
}

// Current is the profile of this process, as "name (enforce)" or "unconfined".
func Current() (string, error) {
	b, err := os.ReadFile("/proc/self/attr/apparmor/current")
	if err != nil {
		return "", fmt.Errorf("read the profile of this process: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}
