package container

import (
	"context"
	"fmt"
	goruntime "runtime"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/hold"
)

// gathering is how long refusals are gathered before they are taken: more of one kind
// are one record.
const gathering = 200 * time.Millisecond

// program is the filter of a profile: if somebody wants to know of refusals, it asks
// the hold about those of interest.
func (c *Config) program(p confine.Profile, listed bool) ([]byte, error) {
	return confine.Filter{Profile: p, Arch: confine.Arch(goruntime.GOARCH), Notice: c.Refused != nil, Listed: listed}.Program()
}

// gatherRefusals takes what the hold has said there is, a little later.
func (r *Runtime) gatherRefusals() {
	select {
	case <-time.After(gathering):
		r.takeRefusals(r.life)
	case <-r.life.Done(): // the next one is told again
	}
}

// takeRefusals writes down what the hold has. What is not written down by the time we
// end, the hold tells again.
func (r *Runtime) takeRefusals(ctx context.Context) {
	if r.cfg.Refused == nil {
		return
	}
	r.refusals.Lock()
	defer r.refusals.Unlock()
	for {
		list, number, err := r.hold.Refusals(ctx, r.refusalsWritten)
		if err != nil {
			if ctx.Err() == nil {
				r.log.Warn("ask what was refused", "err", err)
			}
			return
		}
		if len(list) == 0 {
			return
		}
		for i := range list {
			r.cfg.Refused(dsec.SandboxID(list[i].Sandbox), r.evidenceOf(&list[i]))
		}
		r.refusalsWritten = number
	}
}

// evidenceOf makes a record of a refusal. The profile only gives the call its name.
func (r *Runtime) evidenceOf(f *hold.Refusal) dsec.AuditRecord {
	a := dsec.AuditRecord{Kind: dsec.AuditSyscall, Time: f.First, PID: f.PID, UID: f.UID, GID: f.GID, Exe: f.Exe, Exec: f.Exec}
	if f.Count > 1 {
		a.Count = f.Count
	}
	if f.Call < 0 {
		a.Detail = "calls of other kinds than the many told before"
		return a
	}
	profile := confine.Build
	if sb, err := r.boxes.Find("explain refusal", dsec.SandboxID(f.Sandbox)); err == nil {
		if rec := sb.record(); rec != nil {
			if p, err := confine.ParseProfile(rec.Request.Spec.Profile); err == nil {
				profile = p
			}
		}
	}
	why := confine.Explain(profile, confine.Arch(goruntime.GOARCH), uint32(f.Call), f.Args)
	a.Detail = why.Call
	if f.Arg >= 0 && f.Arg < len(f.Args) {
		a.Detail += fmt.Sprintf(" %#x", uint32(f.Args[f.Arg]))
	}
	a.Detail += ": " + why.Errno
	return a
}
