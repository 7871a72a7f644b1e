package fullvm

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// told spells out moments.
func told(all []moment) string {
	var out []string
	for _, m := range all {
		for _, e := range m {
			switch {
			case e.Key != "":
				out = append(out, fmt.Sprintf("%s%s", map[bool]string{true: "+", false: "-"}[e.Down], e.Key))
			case e.Button != "":
				out = append(out, fmt.Sprintf("%s%s", map[bool]string{true: "+", false: "-"}[e.Down], e.Button))
			default:
				out = append(out, fmt.Sprintf("%s=%d", e.Axis, e.Value))
			}
		}
	}
	return strings.Join(out, " ")
}

func TestActionsAreWhatDevicesDo(t *testing.T) {
	g := geometry{100, 50}
	for _, c := range []struct {
		a    dsec.ScreenAction
		want string
	}{
		{dsec.ScreenAction{Kind: dsec.ScreenText, Text: "aB\n"}, "+a -a +shift +b -b -shift +ret -ret"},
		{dsec.ScreenAction{Kind: dsec.ScreenText, Text: "é", Compose: true}, "+ctrl +shift +u -u -shift -ctrl +e -e +9 -9 +spc -spc"},
		{dsec.ScreenAction{Kind: dsec.ScreenKeys, Keys: []string{"Ctrl", "alt", "Delete"}}, "+ctrl +alt +delete -delete -alt -ctrl"},
		{dsec.ScreenAction{Kind: dsec.ScreenKeys, Keys: []string{"Enter"}}, "+ret -ret"},
		{dsec.ScreenAction{Kind: dsec.ScreenMove, X: 0, Y: 49}, "x=163 y=32440"},
		{dsec.ScreenAction{Kind: dsec.ScreenClick, X: 99, Y: 0, Button: "right", Count: 2}, "x=32604 y=327 +right -right +right -right"},
		{dsec.ScreenAction{Kind: dsec.ScreenScroll, X: 0, Y: 0, DY: -1, DX: 1}, "x=163 y=327 +wheel-up -wheel-up +wheel-right -wheel-right"},
	} {
		all, err := g.moments(c.a)
		if err != nil || told(all) != c.want {
			t.Errorf("%+v: %q, %v; want %q", c.a, told(all), err, c.want)
		}
	}
	all, err := g.moments(dsec.ScreenAction{Kind: dsec.ScreenDrag, X: 10, Y: 10, ToX: 90, ToY: 40})
	if got := told(all); err != nil || !strings.HasPrefix(got, "x=3440 y=6881 +left x=") || !strings.HasSuffix(got, "x=29655 y=26542 -left") || len(all) != dragSteps+3 {
		t.Errorf("drag: %q, %v", got, err)
	}
}

// TestEveryPixelIsReached however the guest rounds.
func TestEveryPixelIsReached(t *testing.T) {
	for _, size := range []int{1, 320, 800, 1280, 1919, 4096} {
		for at := range size {
			if v := axis(at, size); v < 0 || v > vmm.MaxAxis || v*size/(vmm.MaxAxis+1) != at {
				t.Fatalf("pixel %d of %d is %d, which is pixel %d", at, size, v, v*size/(vmm.MaxAxis+1))
			}
		}
	}
}

func TestPicturesOfAGuestAreBounded(t *testing.T) {
	good := "P6\n2 1\n255\n\n  abc"[:len("P6\n2 1\n255\n")] + "\n  abc"
	raw, g, err := readPPM(strings.NewReader(good))
	if err != nil || g != (geometry{2, 1}) || !slices.Equal(raw, []byte("\n  abc")) {
		t.Fatalf("%q %v %v", raw, g, err)
	}
	for text, want := range map[string]dsec.Class{
		"": dsec.Corrupt, "P5\n2 1\n255\nxxxxxx": dsec.Corrupt, "P6\n2 1\n255\nxxx": dsec.Corrupt, "P6\n" + strings.Repeat("1", 100): dsec.Corrupt,
		"P6\n100000 100000\n255\n": dsec.Unsupported, "P6\n-1 1\n255\n": dsec.Unsupported, "P6\n2 1\n65535\n": dsec.Unsupported,
	} {
		if _, _, err := readPPM(strings.NewReader(text)); dsec.ClassOf(err) != want {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
	for _, r := range []dsec.Region{{X: -1, Width: 1, Height: 1}, {Width: 3, Height: 1}, {X: 1, Width: 1 << 62, Height: 1}, {Width: 1}} {
		if _, err := picture(raw, g, r); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%+v: %v", r, err)
		}
	}
	p, err := picture(raw, g, dsec.Region{X: 1, Width: 1, Height: 1})
	if err != nil || p.Width != 2 || !bytes.HasPrefix(p.PNG, []byte("\x89PNG")) {
		t.Error(p, err)
	}
}
