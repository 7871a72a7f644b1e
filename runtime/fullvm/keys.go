package fullvm

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// names of keys that people use, and QEMU's.
var names = map[string]string{
	"enter": "ret", "return": "ret", "escape": "esc", "space": "spc", "control": "ctrl", "win": "meta_l", "super": "meta_l", "cmd": "meta_l", "meta": "meta_l",
	"pageup": "pgup", "pagedown": "pgdn", "page_up": "pgup", "page_down": "pgdn", "del": "delete", "ins": "insert", "option": "alt", "altgr": "alt_r",
	"capslock": "caps_lock", "numlock": "num_lock", "printscreen": "print",
}

// known are the names that QEMU has for keys besides letters and digits.
var known = strings.Fields(`shift shift_r alt alt_r ctrl ctrl_r menu esc minus equal backspace tab bracket_left bracket_right ret semicolon apostrophe
	grave_accent backslash comma dot slash asterisk spc caps_lock f1 f2 f3 f4 f5 f6 f7 f8 f9 f10 f11 f12 num_lock scroll_lock kp_divide kp_multiply kp_subtract
	kp_add kp_enter kp_decimal kp_0 kp_1 kp_2 kp_3 kp_4 kp_5 kp_6 kp_7 kp_8 kp_9 less sysrq print home pgup pgdn end left up down right insert delete
	pause meta_l meta_r compose`)

// keyOf is QEMU's name of a key.
func keyOf(name string) (string, error) {
	low := strings.ToLower(name)
	if n, ok := names[low]; ok {
		return n, nil
	}
	if len(low) == 1 {
		if k, shifted, ok := stroke(rune(low[0])); ok && !shifted {
			return k, nil
		}
	}
	if slices.Contains(known, low) {
		return low, nil
	}
	return "", dsec.Errorf(dsec.Invalid, "press key", dsec.Quote(name), "there is none of that name; as ctrl, enter, f5, left, a")
}

// plainKeys are those of a US keyboard that are not named after their letter, with what they
// give alone and with shift.
var plainKeys = []struct {
	key          string
	plain, shift rune
}{
	{"grave_accent", '`', '~'}, {"1", '1', '!'}, {"2", '2', '@'}, {"3", '3', '#'}, {"4", '4', '$'}, {"5", '5', '%'}, {"6", '6', '^'}, {"7", '7', '&'}, {"8", '8', '*'},
	{"9", '9', '('}, {"0", '0', ')'}, {"minus", '-', '_'}, {"equal", '=', '+'}, {"bracket_left", '[', '{'}, {"bracket_right", ']', '}'}, {"backslash", '\\', '|'},
	{"semicolon", ';', ':'}, {"apostrophe", '\'', '"'}, {"comma", ',', '<'}, {"dot", '.', '>'}, {"slash", '/', '?'}, {"spc", ' ', 0}, {"ret", '\n', 0}, {"tab", '\t', 0},
}

// stroke is the key that gives a letter on a US keyboard.
func stroke(r rune) (key string, shifted, ok bool) {
	switch {
	case r >= 'a' && r <= 'z':
		return string(r), false, true
	case r >= 'A' && r <= 'Z':
		return string(r - 'A' + 'a'), true, true
	}
	for _, k := range plainKeys {
		if r == k.plain {
			return k.key, false, true
		}
		if r == k.shift && r != 0 {
			return k.key, true, true
		}
	}
	return "", false, false
}

// moment is what happens at once; the devices get time to tell the guest before the next.
type moment []vmm.Input

func press(keys ...string) (all []moment) {
	for _, k := range keys {
		all = append(all, moment{{Key: k, Down: true}})
	}
	for _, k := range slices.Backward(keys) {
		all = append(all, moment{{Key: k}})
	}
	return all
}

// typing is a text key by key.
func typing(text string, compose bool) (all []moment, err error) {
	for _, r := range strings.ReplaceAll(text, "\r\n", "\n") {
		key, shifted, ok := stroke(r)
		switch {
		case ok && shifted:
			all = append(all, press("shift", key)...)
		case ok:
			all = append(all, press(key)...)
		case r < ' ' || r == 0x7f:
			return nil, dsec.Errorf(dsec.Invalid, "type text", fmt.Sprintf("U+%04X", r), "no key gives that; press keys instead")
		case !compose:
			return nil, dsec.Errorf(dsec.Unsupported, "type text", fmt.Sprintf("U+%04X", r), "a US keyboard has no key for it; compose types it where programs understand Ctrl+Shift+U")
		default:
			all = append(all, press("ctrl", "shift", "u")...)
			for _, d := range fmt.Sprintf("%x", r) {
				all = append(all, press(string(d))...)
			}
			all = append(all, press("spc")...)
		}
	}
	return all, nil
}

// geometry is the size of a screen in pixels.
type geometry struct{ width, height int }

// axis is where the tablet is for the middle of a pixel, whichever way the guest rounds.
func axis(at, size int) int {
	return min(vmm.MaxAxis, (2*at+1)*(vmm.MaxAxis+1)/(2*size))
}

func (g geometry) at(x, y int) (moment, error) {
	if x >= g.width || y >= g.height {
		return nil, dsec.Errorf(dsec.Invalid, "point at", fmt.Sprintf("%d,%d", x, y), "the screen has %d by %d pixels", g.width, g.height)
	}
	return moment{{Axis: "x", Value: axis(x, g.width)}, {Axis: "y", Value: axis(y, g.height)}}, nil
}

// dragSteps is how many times a pointer is seen on its way.
const dragSteps = 10

// moments are what an action makes of the devices.
func (g geometry) moments(a dsec.ScreenAction) ([]moment, error) {
	switch a.Kind {
	case dsec.ScreenKeys:
		var keys []string
		for _, k := range a.Keys {
			key, err := keyOf(k)
			if err != nil {
				return nil, err
			}
			keys = append(keys, key)
		}
		return press(keys...), nil
	case dsec.ScreenText:
		return typing(a.Text, a.Compose)
	}
	there, err := g.at(a.X, a.Y)
	if err != nil {
		return nil, err
	}
	all := []moment{there}
	button := a.Button
	if button == "" {
		button = "left"
	}
	click := func(b string, n int) {
		for range n {
			all = append(all, moment{{Button: b, Down: true}}, moment{{Button: b}})
		}
	}
	switch a.Kind {
	case dsec.ScreenClick:
		click(button, max(1, a.Count))
	case dsec.ScreenDrag:
		if _, err := g.at(a.ToX, a.ToY); err != nil {
			return nil, err
		}
		all = append(all, moment{{Button: button, Down: true}})
		for i := 1; i <= dragSteps; i++ {
			m, err := g.at(a.X+(a.ToX-a.X)*i/dragSteps, a.Y+(a.ToY-a.Y)*i/dragSteps)
			if err != nil {
				return nil, err
			}
			all = append(all, m)
		}
		all = append(all, moment{{Button: button}})
	case dsec.ScreenScroll:
		for _, w := range []struct {
			n    int
			name string
		}{{a.DY, "wheel-down"}, {-a.DY, "wheel-up"}, {a.DX, "wheel-right"}, {-a.DX, "wheel-left"}} {
			click(w.name, max(0, w.n))
		}
	}
	return all, nil
}
