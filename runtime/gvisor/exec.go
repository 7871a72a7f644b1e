package gvisor

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/gvisor/inside"
	"github.com/opendsec/dsec/runtime/tier"
)

// mainID is the main process's.
const mainID = "main"

// startLimit is how long the start of a command may take.
const startLimit = 45 * time.Second

// Exec starts a command. A context that ends while it starts does not stop it.
func (r *Runtime) Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (process.Process, error) {
	const op = "exec in sandbox"
	sb, err := r.boxes.Live(op, id)
	if err != nil {
		return nil, err
	}
	if s.ID == "" {
		s.ID = dsec.Random(20)
	}
	switch {
	case isOwn(s.ID):
		return nil, dsec.Errorf(dsec.Invalid, op, string(id), "ids that begin with %q are taken", ownPrefix)
	case s.Service:
		return nil, dsec.Errorf(dsec.Unsupported, op, string(id), "isolation gvisor has no phases that a service could outlive")
	case sb.IsPaused():
		return nil, dsec.Errorf(dsec.IllegalState, op, string(id), "the sandbox is paused")
	}
	if err := ctx.Err(); err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, string(id), context.Cause(ctx))
	}
	// Once begun it is finished: undoing a start could end a command that an earlier
	// call with the same id had started.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), startLimit)
	defer cancel()
	p, err := r.start(ctx, sb, s)
	if err != nil {
		return nil, explain(op, sb, err)
	}
	return sb.Command(p), nil
}

// explain says that the sandbox has ended where that is why a call failed.
func explain(op string, sb *sandbox, err error) error {
	if p := sb.GetPhase(); p != tier.Running && p != tier.Making {
		return dsec.E(dsec.SandboxGone, op, string(sb.ID), err)
	}
	if errors.Is(err, dsec.SandboxGone.Err()) {
		return dsec.E(dsec.SandboxGone, op, string(sb.ID), err)
	}
	return err
}

// start looks whether a command can run, and starts it.
func (r *Runtime) start(ctx context.Context, sb *sandbox, s process.Spec) (process.Process, error) {
	const op = "exec in sandbox"
	if len(s.Argv) == 0 || s.Argv[0] == "" {
		return nil, dsec.Errorf(dsec.Invalid, op, string(sb.ID), "no program")
	}
	if s.Cwd != "" && !path.IsAbs(s.Cwd) {
		return nil, dsec.Errorf(dsec.Invalid, op, string(sb.ID), "working directory %s is not absolute", dsec.Quote(s.Cwd))
	}
	rec := sb.record()
	spec, image := rec.Request.Spec, rec.Request.Layers.Config
	fs, err := r.asRoot(ctx, sb)
	if err != nil {
		return nil, err
	}
	who, err := lookUp(ctx, fs, cmp.Or(s.User, spec.User, image.User))
	if err != nil {
		return nil, err
	}
	p, err := profile(spec.Profile)
	if err != nil {
		return nil, err
	}
	env := accounts.Environment(who, s.PTY != nil, sb.localeIn(ctx, fs), netpolicy.WithMirror(image.Env, rec.policy()), spec.Env, s.Env)
	cwd := cmp.Or(s.Cwd, spec.Workdir, path.Join("/", image.Workdir))
	if err := canRun(ctx, fs, s.Argv, env, cwd); err != nil {
		return nil, err
	}
	c := inside.Command{Runsc: runscOf(rec.Request.Spec.HasLink()), Env: env, Cwd: cwd, NoNewPrivs: spec.NoNewPrivs, Terminal: s.PTY != nil, Processes: spec.Limits.Pids,
		Who: inside.Who{UID: who.UID, GID: who.GID, Groups: who.Groups, Bounding: uint64(confine.Capabilities(p))}}
	if who.UID == 0 {
		c.Permitted = c.Bounding
	}
	b, err := json.Marshal(c)
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, string(sb.ID), err)
	}
	e := hold.ExecSpec{Sandbox: name(sb.ID), Spec: s, Wrap: []string{binDir + "/" + helperFile, inside.RoleExec, string(b), "--"}, Env: []string{"GOMAXPROCS=2"},
		Caps: hold.Caps{Bounding: allCaps, Permitted: allCaps}, OOMScoreAdj: confine.OOMScoreAdj, Spool: r.dir(sb.ID)}
	if err := r.hold.LimitKept(ctx, &e, spec.Limits.Output); err != nil {
		return nil, err
	}
	return r.hold.Exec(ctx, e)
}

// maxArgument is what one argument may have, with its zero byte.
const maxArgument = 128 << 10

// canRun looks for what a command needs, so that its absence is an error of the start:
// what runsc says of it comes too late.
func canRun(ctx context.Context, fs files.FS, argv, env []string, cwd string) error {
	const op = "exec"
	for _, a := range slices.Concat(argv, env) {
		if len(a) >= maxArgument {
			return dsec.E(dsec.Invalid, op, dsec.Quote(argv[0]), unix.E2BIG)
		}
	}
	if i, err := fs.Stat(ctx, cwd, true); err != nil || i.Kind != files.Dir {
		if err == nil {
			err = unix.ENOTDIR
			return dsec.E(dsec.NotADirectory, "enter working directory", dsec.Quote(cwd), err)
		}
		return dsec.E(dsec.ClassOf(err), "enter working directory", dsec.Quote(cwd), err)
	}
	var list string
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			list = v
		}
	}
	err := error(dsec.E(dsec.FileNotFound, op, dsec.Quote(argv[0]), os.ErrNotExist))
	for _, p := range inside.Candidates(argv[0], list) {
		if !path.IsAbs(p) {
			p = path.Join(cwd, p)
		}
		i, e := fs.Stat(ctx, p, true)
		switch {
		case e != nil && (errors.Is(e, dsec.FileNotFound.Err()) || errors.Is(e, dsec.NotADirectory.Err())):
		case e != nil:
			return e
		case i.Kind == files.File && i.Mode&0o111 != 0:
			return nil
		default:
			err = dsec.E(dsec.PermissionDenied, op, dsec.Quote(argv[0]), unix.EACCES)
		}
	}
	return err
}

// lookUp finds a user in the sandbox's own files.
func lookUp(ctx context.Context, fs files.FS, user string) (accounts.Identity, error) {
	var a accounts.Files
	for _, f := range []struct {
		path string
		into *[]byte
	}{{"/etc/passwd", &a.Passwd}, {"/etc/group", &a.Group}} {
		var b bytes.Buffer
		_, err := fs.Read(ctx, f.path, 0, maxAccounts, &b)
		switch dsec.ClassOf(err) {
		case "", dsec.FileNotFound, dsec.IsADirectory, dsec.NotADirectory, dsec.Invalid: // missing or no plain file: empty
		default:
			return accounts.Identity{}, err
		}
		*f.into = b.Bytes()
	}
	return a.Lookup(user)
}

// maxAccounts is what is read of an account file.
const maxAccounts = 1 << 20

// localeIn is the UTF-8 locale that the image has, if any.
func (sb *sandbox) localeIn(ctx context.Context, fs files.FS) string {
	sb.Mu.Lock()
	known := sb.locale
	sb.Mu.Unlock()
	if known != nil {
		return *known
	}
	var found string
	for _, p := range []string{"/usr/lib/locale/C.utf8", "/usr/lib/locale/C.UTF-8"} {
		if _, err := fs.Stat(ctx, p, true); err == nil {
			found = "C.UTF-8"
		}
	}
	sb.Mu.Lock()
	sb.locale = &found
	sb.Mu.Unlock()
	return found
}

// Process finds a command that runs or waits for Release.
func (r *Runtime) Process(ctx context.Context, id dsec.SandboxID, exec string) (process.Process, error) {
	const op = "find command in sandbox"
	sb, err := r.boxes.FindInside(op, id)
	if err != nil {
		return nil, err
	}
	if isOwn(exec) {
		return nil, dsec.Errorf(dsec.NotFound, op, dsec.Quote(exec), "it is none of the sandbox")
	}
	p, err := r.hold.Process(ctx, name(id), exec)
	if err != nil {
		return nil, sb.Command(nil).Explain(err)
	}
	return sb.Command(p), nil
}

// mainProcess is what the sandbox runs: the image's entry point, if it has one, with
// what the caller asked for.
func mainProcess(req runtime.Request) process.Spec {
	return process.Spec{ID: mainID, Main: true, Argv: slices.Concat(req.Layers.Config.Entrypoint, req.Spec.Command)}
}

// signalOf reads the image's stop signal: a number or a name of the usual ones.
func signalOf(s string) int {
	if n, err := strconv.Atoi(s); err == nil && n > 0 && n < 65 {
		return n
	}
	if n := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(s), "SIG")); n > 0 {
		return int(n)
	}
	return int(unix.SIGTERM)
}
