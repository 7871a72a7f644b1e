package gvisor

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// program is runsc as it is used.
type program struct {
	dir     string // holds it and the helper, and is mounted in shells
	digest  string // of runsc, SHA-256 in hex
	version string // as it says itself
}

// Names of the programs in a shell.
const (
	binDir     = "/bin"
	runscFile  = "runsc"
	helperFile = "dsec-hold"
)

// blocksOf is what a file takes on its file system.
func blocksOf(st os.FileInfo) int64 {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return s.Blocks * 512
	}
	return st.Size()
}

// install copies the programs to a directory that is never written again: a sandbox
// goes on with what it was started with, whatever becomes of the operator's file.
func (r *Runtime) install(ctx context.Context) (program, error) {
	const op = "install runsc"
	if r.cfg.Runsc == "" {
		return program{}, dsec.Errorf(dsec.Unsupported, op, "runsc", "isolation gvisor needs gVisor's runsc: it is not in PATH, and node.runsc names none; make runsc builds one and prints the path that node.runsc has to have")
	}
	src, err := os.Open(r.cfg.Runsc)
	if err != nil {
		return program{}, dsec.E(dsec.Unsupported, op, r.cfg.Runsc, err)
	}
	defer src.Close()
	h, both := sha256.New(), sha256.New()
	if _, err := io.Copy(io.MultiWriter(h, both), src); err != nil {
		return program{}, dsec.E(dsec.Unsupported, op, r.cfg.Runsc, err)
	}
	if _, err := io.Copy(both, io.NewSectionReader(r.cfg.Helper, 0, 1<<30)); err != nil {
		return program{}, dsec.E(dsec.Internal, op, helperFile, err)
	}
	p := program{dir: filepath.Join(r.cfg.Dir, fmt.Sprintf(".bin-%x", both.Sum(nil))), digest: fmt.Sprintf("%x", h.Sum(nil))}
	if p.version, err = versionOf(ctx, r.cfg.Runsc); err != nil {
		return program{}, err
	}
	if _, err := os.Stat(p.dir); err == nil {
		return p, nil
	}
	tmp := p.dir + ".new"
	if err := errors.Join(os.RemoveAll(tmp), os.Mkdir(tmp, 0o755)); err != nil {
		return program{}, dsec.E(dsec.Internal, op, tmp, err)
	}
	for name, from := range map[string]io.Reader{runscFile: io.NewSectionReader(src, 0, 1<<30), helperFile: io.NewSectionReader(r.cfg.Helper, 0, 1<<30)} {
		if err := writeProgram(filepath.Join(tmp, name), from); err != nil {
			return program{}, dsec.E(dsec.Internal, op, name, err)
		}
	}
	if err := os.Rename(tmp, p.dir); err != nil {
		return program{}, dsec.E(dsec.Internal, op, p.dir, err)
	}
	return p, nil
}

func writeProgram(path string, from io.Reader) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	return errors.Join(err, f.Close())
}

// versionOf has a program say what it is; one that is no runsc is Unsupported.
func versionOf(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Env = []string{}
	out, err := cmd.Output()
	first, _, _ := strings.Cut(string(out), "\n")
	v, isRunsc := strings.CutPrefix(first, "runsc version ")
	if err == nil && !isRunsc {
		err = errors.New("it does not say that it is runsc")
	}
	if err != nil {
		return "", dsec.E(dsec.Unsupported, "ask the version of", path, err)
	}
	return v, nil
}

// rootDir is what the root of every shell is mounted from: empty directories.
func (r *Runtime) rootDir() string { return filepath.Join(r.cfg.Dir, ".root") }

// Places in a shell.
const (
	placeBundle = "/b"
	placeImage  = "/image"
	placeDisk   = "/disk"
	placeEmpty  = "/empty"
)

func (r *Runtime) makeRoot() error {
	old := unix.Umask(0o022)
	defer unix.Umask(old)
	for _, d := range []string{"", binDir, placeBundle, placeImage, placeDisk, placeEmpty, "/run", "/dev", "/proc", "/sys", "/tmp"} {
		if err := os.MkdirAll(r.rootDir()+d, 0o755); err != nil {
			return dsec.E(dsec.Internal, "make root of shells", d, err)
		}
	}
	return nil
}
