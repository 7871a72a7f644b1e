package container

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime/tier"
)

// startLimit is how long the start of a command may take; the hold gives up
// before, and says at what.
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
	if s.Service {
		if err := r.noteService(ctx, sb, s.ID); err != nil {
			return nil, err
		}
	}
	done, err := sb.beginStart(ctx, op)
	if err != nil {
		return nil, err
	}
	defer done()
	if sb.IsPaused() {
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
		return nil, r.explain(op, sb, err)
	}
	return sb.Command(p), nil
}

// explain says that the sandbox has ended where that is why a call on the hold failed.
func (r *Runtime) explain(op string, sb *sandbox, err error) error {
	if p := sb.GetPhase(); p != tier.Running && p != tier.Making {
		return dsec.E(dsec.SandboxGone, op, string(sb.ID), err)
	}
	if errors.Is(err, dsec.SandboxGone.Err()) {
		return dsec.E(dsec.SandboxGone, op, string(sb.ID), err)
	}
	return err
}

// start makes of a command's spec what the hold needs and starts it.
func (r *Runtime) start(ctx context.Context, sb *sandbox, s process.Spec) (process.Process, error) {
	if len(s.Argv) == 0 || s.Argv[0] == "" {
		return nil, dsec.Errorf(dsec.Invalid, "exec in sandbox", string(sb.ID), "no program")
	}
	if s.Cwd != "" && !path.IsAbs(s.Cwd) {
		return nil, dsec.Errorf(dsec.Invalid, "exec in sandbox", string(sb.ID), "working directory %s is not absolute", dsec.Quote(s.Cwd))
	}
	rec := sb.record()
	spec, image := rec.Request.Spec, rec.Request.Layers.Config
	rights, err := rec.rightsOf(sb, s)
	if err != nil {
		return nil, err
	}
	who, err := r.identify(ctx, sb, cmp.Or(s.User, rights.User, spec.User, image.User))
	if err != nil {
		return nil, err
	}
	if err := rights.allow(sb, who); err != nil {
		return nil, err
	}
	profile, err := r.profile(spec.Profile)
	if err != nil {
		return nil, err
	}
	sb.Mu.Lock()
	locale := sb.locale
	sb.Mu.Unlock()
	e := hold.ExecSpec{Sandbox: string(sb.ID), Spec: s,
		Env: accounts.Environment(who, s.PTY != nil, locale, netpolicy.WithMirror(image.Env, rec.policy()), spec.Env, s.Env),
		Cwd: cmp.Or(s.Cwd, spec.Workdir, path.Join("/", image.Workdir)),
		UID: who.UID, GID: who.GID, Groups: who.Groups,
		Caps: capsFor(who.UID, confine.Capabilities(profile)&^rights.dropped), NoNewPrivs: spec.NoNewPrivs || rights.NoNewPrivs,
		Landlock: rights.landlock(),
		Seccomp:  r.programs[profile], Notice: r.cfg.Refused != nil, AppArmor: sb.record().AppArmor, OOMScoreAdj: confine.OOMScoreAdj, Spool: r.dir(sb.ID)}
	e.Rlimits = r.rlimits[profile]
	if len(rights.Executables) > 0 {
		if e.Seccomp, err = r.cfg.program(profile, true); err != nil {
			return nil, err
		}
	}
	if err := r.hold.LimitKept(ctx, &e, spec.Limits.Output); err != nil {
		return nil, err
	}
	p, err := r.hold.Exec(ctx, e)
	if g, ok := p.(interface{ Group() uint64 }); err == nil && ok {
		r.witnessCommand(g.Group(), s.ID)
	}
	return p, err
}

// ownRlimits are the profile's within what this process may hand on: the hold
// was started by one like it.
func ownRlimits(p confine.Profile) []hold.Rlimit {
	var out []hold.Rlimit
	for _, l := range confine.Rlimits(p) {
		var have unix.Rlimit
		if err := unix.Getrlimit(l.Resource, &have); err == nil {
			l = l.Within(have.Max)
		}
		out = append(out, hold.Rlimit{Resource: l.Resource, Cur: l.Soft, Max: l.Hard})
	}
	return out
}

// capsFor: root inside has what the profile leaves it; others get it only
// through setuid programs and file capabilities.
func capsFor(uid uint32, allowed confine.Caps) hold.Caps {
	c := hold.Caps{Bounding: uint64(allowed)}
	if uid == 0 {
		c.Permitted = uint64(allowed)
	}
	return c
}

// Process finds a command that runs or waits for Release.
func (r *Runtime) Process(ctx context.Context, id dsec.SandboxID, exec string) (process.Process, error) {
	const op = "find command in sandbox"
	sb, err := r.boxes.FindInside(op, id)
	if err != nil {
		return nil, err
	}
	p, err := r.hold.Process(ctx, string(id), exec)
	if err != nil {
		return nil, sb.Command(nil).Explain(err)
	}
	return sb.Command(p), nil
}

// userCache is what was last read of the account files, and from which version
// of them.
type userCache struct {
	accounts      accounts.Files
	passwd, group fileVersion
}

type fileVersion struct {
	dev, ino     uint64
	size         int64
	mtime, ctime unix.Timespec
}

// identify looks a user up in the sandbox's own files.
func (r *Runtime) identify(ctx context.Context, sb *sandbox, user string) (accounts.Identity, error) {
	sb.Mu.Lock()
	if sb.root != nil {
		defer sb.Mu.Unlock()
		sb.users.read(sb.root)
		return sb.users.accounts.Lookup(user)
	}
	sb.Mu.Unlock()
	return r.identifyIn(ctx, string(sb.ID), user)
}

// identifyIn looks a user up in a shell of the hold.
func (r *Runtime) identifyIn(ctx context.Context, shell, user string) (accounts.Identity, error) {
	var a accounts.Files
	for _, f := range []struct {
		path string
		into *[]byte
	}{{"/etc/passwd", &a.Passwd}, {"/etc/group", &a.Group}} {
		file, err := r.hold.OpenIn(ctx, shell, f.path)
		switch {
		case errors.Is(err, dsec.FileNotFound.Err()), errors.Is(err, dsec.Invalid.Err()):
			continue
		case err != nil:
			return accounts.Identity{}, err
		}
		*f.into, err = accounts.ReadCapped(file)
		file.Close()
		if err != nil {
			return accounts.Identity{}, dsec.E(dsec.Internal, "read", f.path, err)
		}
	}
	return a.Lookup(user)
}

// read brings the cache up to date. A file that is missing or no plain file
// counts as empty.
func (c *userCache) read(root *os.File) {
	for _, f := range []struct {
		path    string
		into    *[]byte
		version *fileVersion
	}{{"/etc/passwd", &c.accounts.Passwd, &c.passwd}, {"/etc/group", &c.accounts.Group, &c.group}} {
		file, err := linux.OpenOnMount(root, f.path, unix.O_RDONLY)
		if err != nil {
			*f.into, *f.version = nil, fileVersion{}
			continue
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(file.Fd()), &st); err == nil {
			v := fileVersion{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}
			if v != *f.version {
				if *f.into, err = accounts.ReadCapped(file); err == nil {
					*f.version = v
				}
			}
		}
		file.Close()
	}
}
