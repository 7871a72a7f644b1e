package dsec

import (
	"crypto/rand"
	"strings"
)

// NodeID names a node: 1 to 16 characters of the id alphabet (a-z, 2-7).
type NodeID string

// SandboxID names a sandbox and, inside it, its node, so that nothing has to
// be looked up to route a call: "s", one base32 digit for the length of the
// node id minus one, the node id, and 100 bits of randomness. It is a DNS
// label (at most 63 characters, starts with a letter, no '-'), so it can stand
// in a host name beside a port.
type SandboxID string

const (
	idAlphabet   = "abcdefghijklmnopqrstuvwxyz234567"
	maxNodeID    = 16
	randomDigits = 20
)

func inAlphabet(s string) bool {
	for i := 0; i < len(s); i++ {
		if strings.IndexByte(idAlphabet, s[i]) < 0 {
			return false
		}
	}
	return true
}

// Random returns n characters of the id alphabet from the system's entropy,
// five bits each.
func Random(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails: crypto/rand aborts the process instead
	for i := range b {
		b[i] = idAlphabet[b[i]&31]
	}
	return string(b)
}

// ParseNodeID checks s.
func ParseNodeID(s string) (NodeID, error) {
	if s == "" || len(s) > maxNodeID || !inAlphabet(s) {
		return "", Errorf(Invalid, "parse node id", Quote(s), "want 1 to %d characters of %s", maxNodeID, idAlphabet)
	}
	return NodeID(s), nil
}

// NewSandboxID makes an unguessable id on the given node.
func NewSandboxID(node NodeID) SandboxID {
	return SandboxID("s" + string(idAlphabet[len(node)-1]) + string(node) + Random(randomDigits))
}

// ParseSandboxID checks s and returns the id and the node it names.
func ParseSandboxID(s string) (SandboxID, NodeID, error) {
	bad := func(why string) (SandboxID, NodeID, error) {
		return "", "", Errorf(Invalid, "parse sandbox id", Quote(s), "%s", why)
	}
	if len(s) < 3+randomDigits || len(s) > 2+maxNodeID+randomDigits || s[0] != 's' || !inAlphabet(s) {
		return bad("not a sandbox id")
	}
	n := strings.IndexByte(idAlphabet, s[1]) + 1
	if n > maxNodeID || len(s) != 2+n+randomDigits {
		return bad("length does not match its node part")
	}
	return SandboxID(s), NodeID(s[2 : 2+n]), nil
}

// Node returns the node an id names, "" if the id is malformed.
func (id SandboxID) Node() NodeID {
	_, n, err := ParseSandboxID(string(id))
	if err != nil {
		return ""
	}
	return n
}

// Quote shortens and quotes text from outside for use as Error.Object.
func Quote(s string) string {
	const most = 80
	if len(s) > most {
		s = s[:most] + "…"
	}
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		if r < ' ' || r == 0x7f || r == '"' || r == 0xfffd {
			b.WriteByte('?')
			continue
		}
		b.WriteRune(r)
	}
	b.WriteByte('"')
	return b.String()
}
