package gvisor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime/gvisor/inside"
	"github.com/opendsec/dsec/runtime/tier"
)

// diskSuffix makes the name of the instance for the files of a stopped sandbox.
const diskSuffix = ".disk"

// fileCaps is what root holds on files: chown, dac_override, dac_read_search, fowner,
// fsetid, mknod, setfcap.
const fileCaps = 1<<0 | 1<<1 | 1<<2 | 1<<3 | 1<<4 | 1<<27 | 1<<31

// Files opens the file service as a user. The same user gets the same service; who that
// is was decided when it was opened.
func (r *Runtime) Files(ctx context.Context, id dsec.SandboxID, user string) (files.FS, error) {
	sb, err := r.boxes.FindInside("open files of sandbox", id)
	if err != nil {
		return nil, err
	}
	rec := sb.record()
	if rec == nil {
		return nil, dsec.Errorf(dsec.SandboxGone, "open files of sandbox", string(id), "the sandbox has ended")
	}
	fs, err := r.asRoot(ctx, sb)
	if err != nil {
		return nil, err
	}
	who, err := lookUp(ctx, fs, cmp.Or(user, rec.Request.Spec.User, rec.Request.Layers.Config.User))
	if err != nil {
		return nil, err
	}
	return r.filesAs(ctx, sb, who)
}

func (r *Runtime) filesAs(ctx context.Context, sb *sandbox, who accounts.Identity) (files.FS, error) {
	s := &tier.FileService{Explain: sb.ExplainFiles, Open: func(ctx context.Context) (*files.Redialing, error) { return r.serviceOf(ctx, sb, who) }}
	_, err := s.Open(ctx)
	return s, err
}

// asRoot is the service that this runtime asks for what it has to know.
func (r *Runtime) asRoot(ctx context.Context, sb *sandbox) (files.FS, error) {
	return r.filesAs(ctx, sb, accounts.Identity{})
}

// serviceOf returns the connection of a user, made if there is none since the sandbox last
// changed its state.
func (r *Runtime) serviceOf(ctx context.Context, sb *sandbox, who accounts.Identity) (*files.Redialing, error) {
	if sb.IsPaused() { // who serves stands still, too
		return nil, dsec.Errorf(dsec.IllegalState, "reach files of sandbox", string(sb.ID), "the sandbox is paused, and behind gvisor its files with it")
	}
	if sb.Gone() {
		return nil, dsec.Errorf(dsec.SandboxGone, "open files of sandbox", string(sb.ID), "the sandbox has ended")
	}
	dial := func(ctx context.Context) (io.ReadWriteCloser, error) {
		shell, err := r.reach(ctx, sb)
		if err != nil {
			return nil, err
		}
		w := inside.Who{UID: who.UID, GID: who.GID, Groups: who.Groups}
		if w.UID == 0 {
			w.Bounding, w.Permitted = fileCaps, fileCaps
		}
		return r.dial(ctx, sb, shell, inside.Service{Who: w})
	}
	return sb.services.Get(ctx, fmt.Sprint(who.UID, who.GID, who.Groups), nil, func(context.Context) (*files.Redialing, error) { return files.NewRedialing(dial), nil })
}

// reach returns the shell through which a sandbox's files are reached.
func (r *Runtime) reach(ctx context.Context, sb *sandbox) (shell string, err error) {
	switch sb.GetPhase() {
	case tier.Running, tier.Making: // a main process is started before the sandbox runs
		return name(sb.ID), nil
	case tier.Stopped, tier.Ended:
		return r.diskInstance(ctx, sb)
	}
	return "", dsec.Errorf(dsec.SandboxGone, "open files of sandbox", string(sb.ID), "the sandbox has ended")
}

// dialLimit is how long a helper may take until it serves.
const dialLimit = 40 * time.Second

// dial has something inside a sandbox serve a connection.
func (r *Runtime) dial(ctx context.Context, sb *sandbox, shell string, s inside.Service) (net.Conn, error) {
	const op = "dial into sandbox"
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	sock := "s" + dsec.Random(8)
	l, err := listen(filepath.Join(r.dir(sb.ID), "b"), sock)
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, string(sb.ID), err)
	}
	defer l.Close() // and removes it
	linked := sb.record() != nil && sb.record().Request.Spec.HasLink() && shell == name(sb.ID)
	s.Runsc, s.Socket = runscOf(linked), placeBundle+"/"+sock
	p, err := r.own(ctx, shell, sb.ID, ownPrefix+sock, inside.RoleDial, s)
	if err != nil {
		return nil, err
	}
	defer r.releaseAfter(ctx, p)
	res, err := p.Wait(ctx)
	if err == nil && (res.Status != process.Exited || res.ExitCode != 0) {
		err = errors.New(r.reason(ctx, p, nil))
	}
	if err != nil {
		return nil, dsec.E(dsec.Unavailable, op, string(sb.ID), err)
	}
	if err := l.SetDeadline(time.Now().Add(time.Second)); err != nil { // it has connected, or never will
		return nil, dsec.E(dsec.Internal, op, string(sb.ID), err)
	}
	c, err := l.Accept()
	if err != nil {
		return nil, dsec.E(dsec.Unavailable, op, string(sb.ID), err)
	}
	return c, nil
}

// releaseAfter ends a command of ours and forgets it.
func (r *Runtime) releaseAfter(ctx context.Context, p process.Process) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
	defer cancel()
	_ = p.Kill(ctx) // all of these are gone with their sandbox at the latest
	_, _ = p.Wait(ctx)
	_ = p.Release(ctx)
}

// listen makes a socket in a directory whose path may be longer than that of a socket.
// It is anybody's to dial who is in the shell, which is root there only.
func listen(dir, sock string) (*net.UnixListener, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), sock)})
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, sock)
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o666); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// diskInstance starts a sandbox without its commands, for its files, unless there is one.
func (r *Runtime) diskInstance(ctx context.Context, sb *sandbox) (string, error) {
	const op = "open disk of sandbox"
	if err := sb.Enter(ctx, op); err != nil {
		return "", err
	}
	defer sb.Leave()
	p := sb.GetPhase()
	if p != tier.Stopped && p != tier.Ended {
		return "", dsec.Errorf(dsec.Unavailable, op, string(sb.ID), "the sandbox changed its state during the call")
	}
	shell := name(sb.ID) + diskSuffix
	if sb.hasDisk {
		return shell, nil
	}
	if p == tier.Ended {
		r.conclude(ctx, sb)
	}
	b := &build{r: r, sb: sb, rec: sb.record(), name: shell, quiet: true}
	defer b.close()
	if _, err := lifecycle.Run(ctx, "gvisor.disk", append([]lifecycle.Step{b.reopen()}, b.instance()...)...); err != nil {
		return "", tier.Wrap(op, sb.ID, err)
	}
	sb.hasDisk = true
	return shell, nil
}

// closeDisk ends that instance, if there is one, and keeps what was written. The turn is held.
func (r *Runtime) closeDisk(ctx context.Context, sb *sandbox, keep bool) error {
	if !sb.hasDisk {
		return nil
	}
	sb.services.Close()
	shell := name(sb.ID) + diskSuffix
	if keep {
		switch err := r.save(ctx, sb, shell, false); {
		case err == nil:
		case ctx.Err() != nil, dsec.ClassOf(err) == dsec.NoSpace:
			return err
		default: // there is no sentry to ask, and a sandbox must not be lost with it
			r.log.Warn("what was written into a stopped sandbox is lost", "sandbox", sb.ID, "err", err)
		}
	}
	err := errors.Join(r.hold.RemoveSandbox(ctx, shell), r.groups.Remove(ctx, shell))
	r.images.Unuse(shell)
	if err == nil {
		sb.hasDisk = false
	}
	return err
}
