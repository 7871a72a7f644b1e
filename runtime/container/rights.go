package container

import (
	"fmt"
	"maps"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/hold"
)

// rights are what the phase in force says of the commands that begin in it.
type rights struct {
	dsec.Phase
	dropped confine.Caps
	users   map[string]uint32
	service bool
}

// rights of a sandbox without phases take nothing away.
func (r *record) rights() rights {
	i := r.phase()
	if i < 0 {
		return rights{}
	}
	out := rights{Phase: r.Request.Spec.Phases[i], users: r.Users}
	for _, c := range out.DropCapabilities {
		if c == "all" {
			out.dropped = ^confine.Caps(0)
			continue
		}
		out.dropped |= 1 << dsec.CapabilityNames[c]
	}
	return out
}

// allow holds a user against those the phase names. They are compared by the uids
// that their names had in the layers: what has become of /etc/passwd is the
// sandbox's own business.
func (g *rights) allow(sb *sandbox, who accounts.Identity) error {
	if g.Name != "" && !g.service && isService(who.UID) {
		return dsec.Errorf(dsec.PermissionDenied, "exec in sandbox", string(sb.ID), "uid %d is of services", who.UID)
	}
	if len(g.Users) == 0 {
		return nil
	}
	for _, u := range g.Users {
		if uid, ok := g.users[u]; ok && uid == who.UID {
			return nil
		}
	}
	return dsec.Errorf(dsec.PermissionDenied, "exec in sandbox", string(sb.ID), "in the phase %s nothing runs as uid %d", dsec.Quote(g.Name), who.UID)
}

func (g *rights) landlock() *hold.Landlock {
	p := confine.Paths(g.Writable, g.Executables)
	if p == nil {
		return nil
	}
	l := &hold.Landlock{Handled: p.Handled}
	for _, r := range p.Rules {
		l.Rules = append(l.Rules, hold.LandlockRule{Access: r.Access, Path: r.Path})
	}
	return l
}

// CanPhase says what this kernel lacks, or the profile of the spec gives too much of.
func (r *Runtime) CanPhase(s dsec.Spec) error {
	profile, err := r.profile(s.Profile)
	if err != nil {
		return err
	}
	if len(s.Phases) > 0 && profile.Gives(confine.Mounts) {
		return dsec.Errorf(dsec.Unsupported, "create sandbox", "phases", "with the profile %s a sandbox could undo what its phases mount", profile)
	}
	for _, p := range s.Phases {
		rules := confine.Paths(p.Writable, p.Executables)
		if rules == nil {
			continue
		}
		if have, err := landlockVersion(); err != nil || have < rules.Needs {
			return dsec.Errorf(dsec.Unsupported, "create sandbox", "phases "+dsec.Quote(p.Name),
				"writable and executables need landlock version %d, this kernel has %s", rules.Needs, orVersion(have, err))
		}
	}
	return nil
}

func orVersion(v int, err error) string {
	if err != nil {
		return "none: " + err.Error()
	}
	return fmt.Sprint(v)
}

// landlockVersion asks the kernel for the version of its interface.
func landlockVersion() (int, error) {
	v, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0, errno
	}
	return int(v), nil
}

// pinUsers looks up the users that phases name, in a root that nobody has changed.
func (b *build) pinUsers() error {
	var cache userCache
	cache.read(b.root)
	users := map[string]uint32{}
	for _, p := range b.rec.Request.Spec.Phases {
		for _, u := range p.Users {
			who, err := cache.accounts.Lookup(u)
			if err != nil {
				return dsec.E(dsec.ClassOf(err), "find user of phase", dsec.Quote(p.Name), err)
			}
			users[u] = who.UID
		}
	}
	if len(users) == 0 || maps.Equal(users, b.rec.Users) {
		return nil
	}
	return b.rerecord(func(rec *record) { rec.Users = users })
}

// rerecord changes the record that is being built on.
func (b *build) rerecord(change func(rec *record)) error {
	err := b.r.rerecord(b.sb, change)
	if err == nil {
		b.rec = b.sb.record()
	}
	return err
}

// packable refuses to make a layer of a disk on which something is hidden: what the
// platform took away would be taken for something that the sandbox removed.
func (r *record) packable(op string) error {
	i := r.phase()
	if i < 0 {
		return nil
	}
	hidden := r.Request.Spec.HiddenIn(i)
	if r.Moving == "" && len(hidden) == 0 {
		return nil
	}
	return dsec.Errorf(dsec.IllegalState, op, string(r.Request.ID), "in its phase %s it has %d hidden paths: move it to a phase that hides nothing first", dsec.Quote(r.Phase), len(hidden))
}

// keep takes a clone of the root without what is mounted on it, to read accounts from:
// paths that are read-only are mounts.
func keep(sb *sandbox, root *os.File) {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	if sb.root != nil {
		sb.root.Close()
	}
	sb.root = root
}

// ancestors of paths, and the paths, outermost first; the root is none.
func ancestors(paths []string) []string {
	var all []string
	for _, p := range paths {
		for i := 1; i <= len(p); i++ {
			if (i == len(p) || p[i] == '/') && !slices.Contains(all, p[:i]) {
				all = append(all, p[:i])
			}
		}
	}
	slices.Sort(all) // a directory comes before what is in it
	return all
}
