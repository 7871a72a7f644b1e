package proc

import (
	"encoding/binary"
	"reflect"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
)

// encoded is what the program tells of arguments and a path.
func encoded(flags uint32, all int, args, asked string) []byte {
	b := make([]byte, headerSize, headerSize+len(args)+len(asked))
	e := binary.NativeEndian
	copy(b[atName:], "name")
	e.PutUint32(b[atTold:], flags)
	e.PutUint32(b[atAllArgs:], uint32(all))
	e.PutUint32(b[atArgs:], uint32(len(args)))
	e.PutUint32(b[atAsked:], uint32(len(asked)))
	return append(append(b, args...), asked...)
}

func TestArgumentsAreTakenAsTheyAre(t *testing.T) {
	long := strings.Repeat("x", mostArgs)
	for name, c := range map[string]struct {
		all  int // 0: what is there
		text string
		want []string
	}{
		"none":               {0, "", nil},
		"an empty one":       {0, "\x00", []string{""}},
		"empty ones":         {0, "a\x00\x00b\x00\x00", []string{"a", "", "b", ""}},
		"no end":             {0, "a\x00b", []string{"a", "b"}},
		"cut":                {mostArgs + 1, long, []string{long + "…"}},
		"cut between":        {mostArgs + 2, long[1:] + "\x00", []string{long[1:], "…"}},
		"cut in a letter":    {mostArgs + 1, long[1:] + "\xc3", []string{long[1:] + "…"}},
		"no letters":         {mostArgs + 1, long[5:] + "\x80\x80\x80\x80\x80", []string{long[5:] + "\x80\x80\x80\x80\x80…"}},
		"cut, only the ends": {mostArgs + 1, "\x00", []string{"", "…"}},
	} {
		all := c.all
		if all == 0 {
			all = len(c.text)
		}
		s, ok := decode(encoded(toldArgs|toldAsked, all, c.text, "/bin/true\x00"))
		if !ok || !reflect.DeepEqual(s.args, c.want) || s.asked != "/bin/true" || s.name != "name" {
			t.Errorf("%s: %v %q", name, ok, s.args)
		}
		if s, ok = decode(encoded(0, all, c.text, "/bin/true\x00")); !ok || s.args != nil || s.asked != "" {
			t.Errorf("%s: what was not told is %q %q", name, s.args, s.asked)
		}
	}
}

func TestWhatIsNotKnownIsNamedByWhatWasAskedFor(t *testing.T) {
	long := "/" + strings.Repeat("x", mostAsked-2)
	for asked, want := range map[string]string{
		"/bin/true\x00": "~/bin/true", "./a\x00": "~./a", "a b\n\x00": "~a b\n", "\x00": "~name", "": "~name", "/dev/fd/5\x00": "~name", long + "\x00": "~" + long + "…",
	} {
		if s, ok := decode(encoded(toldAsked, 0, "", asked)); !ok || s.unproven() != want {
			t.Errorf("%q: %v %q", asked, ok, s.unproven())
		}
	}
}

func TestWhatIsKeptFits(t *testing.T) {
	for _, b := range [][]byte{nil, make([]byte, headerSize-1), encoded(toldArgs, 4, "abc\x00", "")[:headerSize+3],
		encoded(toldArgs, 1<<20, strings.Repeat("x", mostArgs+1), ""), encoded(toldAsked, 0, "", strings.Repeat("x", mostAsked+1)), encoded(toldAsked, 0, "", "x")[:headerSize]} {
		if _, ok := decode(b); ok {
			t.Errorf("%d bytes are taken", len(b))
		}
	}
}

// FuzzDecode: whatever is in the ring, what comes out is within its bounds.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(nil))
	f.Add(encoded(toldArgs|toldAsked|toldPID|toldParent, 9, "true\x00a b\x00", "/bin/true\x00"))
	f.Add(encoded(toldArgs, mostArgs*2, strings.Repeat("\xff\x00", mostArgs/2), ""))
	f.Add(encoded(toldArgs|toldAsked, 1, "\xe2\x80", strings.Repeat("é", mostAsked/2)))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, ok := decode(b)
		if !ok {
			if s.args != nil || s.asked != "" {
				t.Error("it is not taken, and has texts")
			}
			return
		}
		text := strings.Join(s.args, "\x00")
		if len(text) > mostArgs+len("\x00…") || len(s.name) > nameSize || len(s.asked) > mostAsked+len("…") || strings.ContainsRune(s.name, 0) {
			t.Errorf("%d bytes of arguments, %d of the path, name %q", len(text), len(s.asked), s.name)
		}
		if cut := audit.CutArgs(s.args); len(cut) > dsec.MaxAuditArgs+1 || !reflect.DeepEqual(cut, audit.CutArgs(cut)) && len(s.args) <= dsec.MaxAuditArgs {
			t.Errorf("%q is cut to %q, and then to %q", s.args, cut, audit.CutArgs(cut))
		}
		if s.unproven() == "" || s.unproven()[0] != '~' {
			t.Errorf("%q looks like a file", s.unproven())
		}
	})
}
