package proc

import (
	"bytes"
	"encoding/binary"
	"strings"
	"unicode/utf8"

	"github.com/opendsec/dsec"
)

// What the program tells: a header, then the bytes of arguments, then those of the path.
const (
	atTime        = 0
	atPID         = 8  // of the thread, then of the process
	atIDs         = 16 // uid, gid
	atGroup       = 24
	atName        = 32
	atRange       = 48
	atTold        = 52 // flags, for what is not always told
	atInner       = 56 // number in its own pid namespace; 0: it is in ours
	atParent      = 60 // process
	atParentInner = 64
	atParentUID   = 68
	atAllArgs     = 72 // bytes of all arguments
	atArgs        = 76 // of those that follow
	atAsked       = 80 // of the path that follows, with the 0 at its end

	headerSize = 88
	nameSize   = 16
)

// Flags of what is told.
const (
	toldPID = 1 << iota
	toldParent
	toldArgs
	toldAsked
)

const (
	mostArgs    = dsec.MaxAuditArgBytes
	mostAsked   = 256
	mostAll     = 1 << 30 // arguments have a few MiB at most
	mostStarted = headerSize + mostArgs + mostAsked
)

// started is what the program tells, as far as told says so.
type started struct {
	time, group uint64
	pid         int
	uid, gid    uint32
	number      uint32 // of the range
	name        string

	told   uint32
	inner  int
	parent parent
	args   []string
	asked  string // the path that was to be started
}

type parent struct {
	pid, inner int
	uid        uint32
}

// decode takes apart what is in the ring. The bytes of arguments and path are the agent's;
// the rest is the kernel's.
func decode(b []byte) (s started, ok bool) {
	if len(b) < headerSize {
		return s, false
	}
	e := binary.NativeEndian
	s = started{time: e.Uint64(b), pid: int(e.Uint32(b[atPID+4:])), uid: e.Uint32(b[atIDs:]), gid: e.Uint32(b[atIDs+4:]), group: e.Uint64(b[atGroup:]),
		number: e.Uint32(b[atRange:]), told: e.Uint32(b[atTold:]), inner: int(e.Uint32(b[atInner:])),
		parent: parent{int(e.Uint32(b[atParent:])), int(e.Uint32(b[atParentInner:])), e.Uint32(b[atParentUID:])}}
	name, _, _ := bytes.Cut(b[atName:atName+nameSize], []byte{0})
	s.name = string(name)
	args, asked, all := e.Uint32(b[atArgs:]), e.Uint32(b[atAsked:]), e.Uint32(b[atAllArgs:])
	b = b[headerSize:]
	if args > mostArgs || asked > mostAsked || int(args+asked) > len(b) {
		return s, false
	}
	if s.told&toldArgs != 0 {
		s.args = splitArgs(string(b[:args]), all > args)
	}
	if s.told&toldAsked != 0 {
		s.asked = strings.TrimSuffix(string(b[args:args+asked]), "\x00")
		if asked == mostAsked { // or it has this length exactly, which nobody can tell
			s.asked = wholeRunes(s.asked) + "…"
		}
	}
	return s, true
}

// splitArgs is the arguments that end with a 0 each, with … at the end if there were more.
func splitArgs(text string, more bool) []string {
	if text == "" {
		return nil
	}
	whole := strings.HasSuffix(text, "\x00")
	args := strings.Split(strings.TrimSuffix(text, "\x00"), "\x00")
	switch {
	case more && whole:
		args = append(args, "…")
	case more:
		args[len(args)-1] = wholeRunes(args[len(args)-1]) + "…"
	}
	return args
}

// wholeRunes is a text that was cut anywhere, without the piece of a letter at its end.
func wholeRunes(s string) string {
	for i := len(s) - 1; i >= 0 && len(s)-i < utf8.UTFMax; i-- {
		if utf8.RuneStart(s[i]) {
			if !utf8.FullRuneInString(s[i:]) {
				return s[:i]
			}
			break
		}
	}
	return s
}
