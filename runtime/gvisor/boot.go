package gvisor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime/gvisor/inside"
)

// Commands in a shell that are not the sandbox's.
const (
	ownPrefix = "gvisor."
	runID     = ownPrefix + "run"
)

func isOwn(exec string) bool { return strings.HasPrefix(exec, ownPrefix) }

// allCaps is what root in the shell has, which is nobody on the machine.
const allCaps = 1<<41 - 1

// enter gives the shell what runsc needs.
func (b *build) enter(ctx context.Context) error {
	root, err := clone(b.r.rootDir(), nil, unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return err
	}
	defer root.Close()
	im, err := b.r.images.Open(b.rec.Image)
	if err != nil {
		return err
	}
	defer im.Close()
	e := hold.EnterSpec{ID: b.name, Root: root, Hostname: "gvisor", Mounts: []hold.Mount{{Target: inside.StateDir, Size: 8 << 20, Mode: 0o700}}}
	defer func() {
		for _, m := range e.Mounts {
			if m.Source != nil {
				m.Source.Close()
			}
		}
	}()
	for _, m := range []struct {
		path   string
		file   *os.File
		target string
		ro     bool
	}{{b.r.runsc.dir, nil, binDir, true}, {filepath.Join(b.r.dir(b.sb.ID), "b"), nil, placeBundle, true}, {"", im, placeImage, true}, {"", b.dir, placeDisk, false}} {
		var attr uint64
		if m.ro {
			attr = unix.MOUNT_ATTR_RDONLY
		}
		src, err := clone(m.path, m.file, attr)
		if err != nil {
			return err
		}
		// Programs of the image run in processes that map its file.
		e.Mounts = append(e.Mounts, hold.Mount{Source: src, Target: m.target, RO: m.ro, Exec: m.ro && m.target != placeBundle || m.target == placeDisk})
	}
	return b.r.hold.Enter(ctx, e)
}

// clone makes a mount of a directory.
func clone(path string, f *os.File, attr uint64) (*os.File, error) {
	const op = "mount for runsc"
	if f == nil {
		var err error
		if f, err = os.Open(path); err != nil {
			return nil, dsec.E(dsec.Internal, op, path, err)
		}
		defer f.Close()
	}
	m, err := linux.Clone(f, false)
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, f.Name(), err)
	}
	if err := linux.SetMountAttr(m, attr|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV); err != nil {
		m.Close()
		return nil, dsec.E(dsec.Internal, op, f.Name(), err)
	}
	return m, nil
}

// own starts a command of ours in a shell.
func (r *Runtime) own(ctx context.Context, shell string, id dsec.SandboxID, exec, role string, arg any) (process.Process, error) {
	b, err := json.Marshal(arg)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "start "+role, string(id), err)
	}
	return r.hold.Exec(ctx, hold.ExecSpec{Sandbox: shell, Spec: process.Spec{ID: exec, Argv: []string{binDir + "/" + helperFile, role, string(b)}, Head: 16 << 10, Tail: 16 << 10},
		Env: []string{"GOMAXPROCS=2"}, Caps: hold.Caps{Bounding: allCaps, Permitted: allCaps}, OOMScoreAdj: confine.OOMScoreAdj, Spool: r.dir(id)})
}

// run has runsc start the sandbox and waits until PID 1 is ready.
func (b *build) run(ctx context.Context) error {
	spec, img := b.rec.Request.Spec, b.rec.Request.Layers.Config
	host := hostname(b.sb.ID, spec)
	s := inside.Setup{Files: map[string]string{}}
	if !b.quiet {
		s.Files = map[string]string{"/etc/hosts": string(b.lease.Hosts(host)), "/etc/hostname": host + "\n", "/etc/resolv.conf": string(b.lease.ResolvConf())}
		for _, dir := range []string{path.Join("/", img.Workdir), cmp.Or(spec.Workdir, "/")} {
			if dir != "/" {
				s.Dirs = append(s.Dirs, dir)
			}
		}
	}
	oci, err := bundleOf(s, host, spec.Limits.Disk, b.linked(), b.saved())
	if err != nil {
		return dsec.E(dsec.Internal, "make bundle of sandbox", string(b.sb.ID), err)
	}
	if err := writeBundle(filepath.Join(b.r.dir(b.sb.ID), "b"), oci); err != nil {
		return err
	}
	p, err := b.r.own(ctx, b.name, b.sb.ID, runID, inside.RoleRun, inside.Run{Runsc: runscOf(b.linked()), Bundle: placeBundle})
	if err != nil {
		return err
	}
	return b.ready(ctx, p)
}

// runLimit is how long runsc may take to have PID 1 running.
const runLimit = 60 * time.Second

// ready waits for PID 1's word, or for the end of who started it.
func (b *build) ready(ctx context.Context, p process.Process) error {
	const op = "start sentry of sandbox"
	ctx, cancel := context.WithTimeout(ctx, runLimit)
	defer cancel()
	out, err := p.Follow(ctx, process.Stdout, 0)
	if err != nil {
		return err
	}
	defer out.Close()
	var said []byte
	for {
		c, err := out.Next(ctx)
		if err != nil {
			return err
		}
		said = append(said, c.Data...)
		line, _, whole := strings.Cut(string(said), "\n")
		if whole && line == inside.Ready {
			return nil
		}
		var no inside.Refusal
		if whole && json.Unmarshal([]byte(line), &no) == nil && no.Class != "" {
			return dsec.Errorf(no.Class, no.Op, dsec.Quote(no.Object), "%s", no.Text)
		}
		if c.EOF || len(said) > 64<<10 {
			return dsec.E(dsec.Unavailable, op, string(b.sb.ID), errors.New(b.r.reason(ctx, p, said)))
		}
	}
}

// reason is what a command of ours said before it ended.
func (r *Runtime) reason(ctx context.Context, p process.Process, more []byte) string {
	if _, err := p.Wait(ctx); err != nil {
		return err.Error()
	}
	head, tail, _, err := p.Kept(ctx, process.Stderr)
	if err != nil {
		return err.Error()
	}
	text := strings.TrimSpace(string(more) + string(head) + string(tail))
	if text == "" {
		text = "it said nothing"
	}
	return strings.ToValidUTF8(text[max(0, len(text)-1000):], "?")
}

func hostname(id dsec.SandboxID, s dsec.Spec) string {
	if s.Hostname == "" {
		return string(id)
	}
	return dsec.ShortHostname(s.Hostname)
}
