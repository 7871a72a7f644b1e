package layer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

// The format, see docs/formats/stack.md.
const (
	StackVersion = 1
	MaxStack     = 80      // layers in one stack, and in all that a sandbox stands on: what an old kernel can be told at once
	MaxStackSize = 1 << 20 // bytes of its text
)

// Role says what a layer of a template is there for.
type Role string

const (
	RoleBase      Role = "base"
	RoleWorkspace Role = "workspace"
	RoleToolkit   Role = "toolkit"
)

// rank orders the roles in a template; 0 for what is none.
func (r Role) rank() int {
	switch r {
	case RoleBase:
		return 1
	case RoleWorkspace:
		return 2
	case RoleToolkit:
		return 3
	}
	return 0
}

// Part is one layer of a stack.
type Part struct {
	Digest Digest        `json:"digest"`
	Role   Role          `json:"role,omitempty"` // "": of an image
	Ref    dsec.LayerRef `json:"ref,omitempty"`  // what was asked for, for people
}

// Stack is an immutable list of layers that stand on one another, the lowest
// first: an image that was converted layer by layer, or a template.
type Stack struct {
	Version int           `json:"version"`
	Layers  []Part        `json:"layers"`
	Config  *image.Config `json:"config,omitempty"`
}

// Encode returns the one encoding of the stack.
func (s Stack) Encode() []byte {
	b, err := json.Marshal(s)
	if err != nil { // strings and integers only
		panic(err)
	}
	return append(b, '\n')
}

// Digest names the stack.
func (s Stack) Digest() Digest { return DigestOf(s.Encode()) }

// IsTemplate reports whether the layers have roles.
func (s Stack) IsTemplate() bool { return len(s.Layers) > 0 && s.Layers[0].Role != "" }

// DecodeStack reads an encoding, which must be the one that Encode gives, and
// must have the digest.
func DecodeStack(b []byte, want Digest) (Stack, error) {
	const op = "read stack"
	if len(b) > MaxStackSize {
		return Stack{}, dsec.Errorf(dsec.Corrupt, op, string(want), "%d bytes, at most %d", len(b), MaxStackSize)
	}
	if got := DigestOf(b); got != want {
		return Stack{}, dsec.Errorf(dsec.Corrupt, op, string(want), "content has digest %s", got)
	}
	var s Stack
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	err := d.Decode(&s)
	if err == nil {
		err = s.Check()
	}
	if err == nil && !bytes.Equal(s.Encode(), b) {
		err = errors.New("not in canonical form")
	}
	if err != nil {
		return Stack{}, dsec.E(dsec.Corrupt, op, string(want), err)
	}
	return s, nil
}

// Check reports the first thing that no stack may be.
func (s Stack) Check() error {
	if s.Version != StackVersion {
		return fmt.Errorf("version %d, this program knows %d", s.Version, StackVersion)
	}
	if len(s.Layers) == 0 || len(s.Layers) > MaxStack {
		return fmt.Errorf("%d layers, want 1 to %d", len(s.Layers), MaxStack)
	}
	seen := map[Digest]bool{}
	last := s.Layers[0].Role
	for i, p := range s.Layers {
		if _, err := ParseDigest(string(p.Digest)); err != nil {
			return err
		}
		switch {
		case seen[p.Digest]:
			return fmt.Errorf("layer %s: there twice", p.Digest)
		case p.Role != "" && p.Role.rank() == 0, (p.Role == "") != (last == ""), p.Role.rank() < last.rank():
			return fmt.Errorf("layer %d: role %s after %s", i, dsec.Quote(string(p.Role)), dsec.Quote(string(last)))
		case len(p.Ref) > dsec.MaxRefBytes:
			return fmt.Errorf("layer %d: ref of %d bytes, at most %d", i, len(p.Ref), dsec.MaxRefBytes)
		}
		seen[p.Digest], last = true, p.Role
	}
	return nil
}

// TopMost drops from a list of layers, the lowest first, those that are there
// again further up: what a layer hides and shows above, it hides and shows for all.
func TopMost(parts []Part) []Part {
	last := map[Digest]int{}
	for i, p := range parts {
		last[p.Digest] = i
	}
	out := make([]Part, 0, len(parts))
	for i, p := range parts {
		if last[p.Digest] == i {
			out = append(out, p)
		}
	}
	return out
}
