package container

import (
	"context"
	"errors"
	"strconv"
	"strings"

	"github.com/opendsec/dsec/confine"
	text "github.com/opendsec/dsec/confine/apparmor"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/apparmor"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime"
)

// mac is AppArmor, where the kernel has it. Each sandbox has a profile of its
// own, named after its uids: two that live at one time never share one, so that
// neither may signal or trace the other, and the one of a range is compiled once.
type mac struct {
	loader *apparmor.Loader
	why    error // there is no loader
}

func openMAC() (m mac) {
	m.loader, m.why = apparmor.Open()
	return m
}

// name of the profile of a sandbox that is being made; "" without AppArmor.
func (m mac) name(p confine.Profile, uid uint32) string {
	if m.loader == nil {
		return ""
	}
	return text.Name(p, int(uid/accounts.IDs))
}

func (m mac) load(ctx context.Context, name string, p confine.Profile) error {
	s, err := text.Text(text.Options{Name: name, Profile: p, Userns: m.loader.Userns()})
	if err != nil {
		return err
	}
	return m.loader.Load(ctx, name, s)
}

// remove is for when no process has the profile any more. Without a loader it
// stays in the kernel, where it confines nobody.
func (m mac) remove(name string) error {
	if name == "" || m.loader == nil {
		return nil
	}
	return m.loader.Remove(name)
}

// setProfile writes down which profile the run to come has: one that was made
// without AppArmor gets it with its next start.
func (b *build) setProfile() error {
	p, err := confine.ParseProfile(b.rec.Request.Spec.Profile)
	if err != nil {
		return err
	}
	b.rec.AppArmor = b.r.mac.name(p, b.rec.UID)
	return nil
}

// profileLoaded is the first step of a run: what it undoes goes last.
func (b *build) profileLoaded() []lifecycle.Step {
	if b.r.mac.loader == nil {
		return nil
	}
	return []lifecycle.Step{{Name: "apparmor", Do: func(ctx context.Context) error {
		p, err := confine.ParseProfile(b.rec.Request.Spec.Profile)
		if err != nil {
			return err
		}
		return b.r.mac.load(ctx, b.rec.AppArmor, p)
	}, Undo: func(context.Context) error { return b.r.mac.remove(b.rec.AppArmor) }}}
}

// reloadProfile is for a sandbox that is taken over: who reloads the machine's
// AppArmor may have removed what no file names, and commands would not start.
func (r *Runtime) reloadProfile(ctx context.Context, rec *record) error {
	if rec.AppArmor == "" || r.mac.loader == nil {
		return nil
	}
	p, err := confine.ParseProfile(rec.Request.Spec.Profile)
	if err != nil {
		return err
	}
	return r.mac.load(ctx, rec.AppArmor, p)
}

// removeStrayProfiles removes those of our uid ranges that no running sandbox has.
func (r *Runtime) removeStrayProfiles() error {
	if r.mac.loader == nil {
		return nil
	}
	names, err := r.mac.loader.Loaded("dsec-")
	if err != nil {
		return err
	}
	mine := map[string]bool{}
	for _, sb := range r.boxes.All() {
		if rec := sb.record(); rec != nil && !rec.Stopped {
			mine[rec.AppArmor] = true
		}
	}
	var errs []error
	for _, name := range names {
		n, err := strconv.ParseUint(name[strings.LastIndexByte(name, '-')+1:], 10, 32)
		first := uint64(r.cfg.UIDBase / accounts.IDs)
		if err == nil && n >= first && n < first+uint64(r.uids.Count()) && !mine[name] {
			errs = append(errs, r.mac.loader.Remove(name))
		}
	}
	return errors.Join(errs...)
}

func (r *Runtime) probeAppArmor(context.Context) runtime.Check {
	c := runtime.Check{Name: "apparmor", OK: r.mac.loader != nil, Detail: "a profile for each sandbox"}
	switch {
	case r.mac.why != nil:
		c.Detail = "sandboxes run without it: " + r.mac.why.Error()
	case r.mac.loader.Userns():
		c.Detail += ", with rules for user namespaces"
	}
	return c
}
