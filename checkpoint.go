package dsec

import (
	"maps"
	"reflect"
	"slices"
	"time"
)

// MaxKeepCheckpoint is how long a checkpoint is kept at most, and KeepCheckpoint how
// long where nobody says so.
const (
	MaxKeepCheckpoint = 30 * 24 * time.Hour
	KeepCheckpoint    = 7 * 24 * time.Hour
)

// Checkpoint is a sandbox as it was at one moment, with its memory and its disk, where
// every node finds it that has the same object storage. A sandbox whose spec names it goes
// on from there.
type Checkpoint struct {
	Digest  string    `json:"digest"` // its name: "sha256:…"
	Sandbox SandboxID `json:"sandbox"`
	Time    time.Time `json:"time"`           // of the moment
	Until   time.Time `json:"until,omitzero"` // kept by the node that made it; zero: not told
	Spec    Spec      `json:"spec"`           // of what goes on from it
	Disk    int64     `json:"disk"`           // bytes, holes included
	Memory  int64     `json:"memory"`         // bytes
}

// GoesOnFrom completes a spec that names a checkpoint by what a sandbox that goes on from
// that is made of. A memory knows its limits, layers and users: what is asked for of them has
// to be what they are, else it is Invalid. Name, host name, labels, rollout key, lifetimes and
// network policy may be others; whether there is a network may not.
func (s Spec) GoesOnFrom(of Spec) (Spec, error) {
	out := of
	out.Name, out.Checkpoint, out.CallID = s.Name, s.Checkpoint, s.CallID
	if s.Hostname != "" {
		out.Hostname = s.Hostname
	}
	if s.Labels != nil {
		out.Labels = maps.Clone(s.Labels)
	}
	if s.RolloutKey != "" {
		out.RolloutKey = s.RolloutKey
	}
	l, had := &out.Lifetimes, s.Lifetimes
	for _, d := range []struct {
		to   *time.Duration
		from time.Duration
	}{{&l.Idle, had.Idle}, {&l.Lifetime, had.Lifetime}, {&l.Retention, had.Retention}, {&l.KeepFailed, had.KeepFailed}} {
		if d.from != 0 {
			*d.to = d.from
		}
	}
	if s.Network != "" {
		out.Network, out.Allow, out.Cutoff, out.MirrorDeny = s.Network, slices.Clone(s.Allow), s.Cutoff, slices.Clone(s.MirrorDeny)
	} else if len(s.Allow) > 0 || !s.Cutoff.IsZero() || len(s.MirrorDeny) > 0 {
		return Spec{}, Errorf(Invalid, "go on from checkpoint", "network", "rules without a mode")
	}
	if out.HasLink() != of.HasLink() {
		return Spec{}, Errorf(Invalid, "go on from checkpoint", "network", "%s: it was made with %s, and a machine keeps its cable or the lack of one", s.Network, of.Network)
	}
	if field := differs(reflect.ValueOf(s), reflect.ValueOf(of), ""); field != "" {
		return Spec{}, Errorf(Invalid, "go on from checkpoint", field, "it is what it was when the checkpoint was made, and cannot be chosen")
	}
	return out, nil
}

// chosen are the fields that GoesOnFrom takes from who asks.
var chosen = map[string]bool{"Name": true, "Checkpoint": true, "CallID": true, "Hostname": true, "Labels": true, "RolloutKey": true, "Lifetimes": true,
	"Network": true, "Allow": true, "Cutoff": true, "MirrorDeny": true}

// differs names the first of the other fields that is asked for and is another.
func differs(asked, is reflect.Value, in string) string {
	for i := range asked.NumField() {
		name := asked.Type().Field(i).Name
		a, b := asked.Field(i), is.Field(i)
		switch {
		case in == "" && chosen[name] || a.IsZero() || a.Kind() == reflect.Slice && a.Len() == 0 || a.Kind() == reflect.Map && a.Len() == 0:
		case a.Kind() == reflect.Struct:
			if field := differs(a, b, name+"."); field != "" {
				return field
			}
		case !reflect.DeepEqual(a.Interface(), b.Interface()):
			return in + name
		}
	}
	return ""
}
