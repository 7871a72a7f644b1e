package dsec

import "unicode/utf8"

// Region is a part of a screen in pixels; of no size, all of it.
type Region struct {
	X, Y, Width, Height int
}

// Picture is what a screen showed.
type Picture struct {
	PNG    []byte
	Region Region // what of the screen it is
	Width  int    // of the screen
	Height int
}

// ScreenKind is a kind of ScreenAction.
type ScreenKind string

// The kinds.
const (
	ScreenMove   ScreenKind = "move"   // the pointer to X, Y
	ScreenClick  ScreenKind = "click"  // there, Count times with Button
	ScreenDrag   ScreenKind = "drag"   // from X, Y to ToX, ToY with Button down
	ScreenScroll ScreenKind = "scroll" // at X, Y by DX, DY steps of the wheel, to the right and down
	ScreenKeys   ScreenKind = "keys"   // pressed in order and let go in reverse: ctrl, alt, t
	ScreenText   ScreenKind = "text"   // typed on a US keyboard
)

// ScreenAction is one thing that a person does at a screen. Positions are pixels of the screen as
// the last picture of it had them.
type ScreenAction struct {
	Kind     ScreenKind
	X, Y     int
	ToX, ToY int
	DX, DY   int
	Button   string // "left" (or ""), "middle", "right"
	Count    int    // of clicks; 0: one
	Keys     []string
	Text     string
	// Compose types what a US keyboard has no key for as Ctrl+Shift+U, its number, Space, which GTK,
	// IBus and some other programs understand; without it that is Unsupported.
	Compose bool
}

// Bounds of one call.
const (
	MaxScreenActions = 256
	MaxScreenText    = 4096 // characters
	MaxScreenSteps   = 100  // of a wheel, and clicks
)

// Validate says what of an action cannot be done anywhere, as Invalid.
func (a ScreenAction) Validate() error {
	bad := func(format string, args ...any) error {
		return Errorf(Invalid, "act on screen", Quote(string(a.Kind)), format, args...)
	}
	switch a.Kind {
	case ScreenMove, ScreenClick, ScreenDrag, ScreenScroll:
		if a.X < 0 || a.Y < 0 || a.ToX < 0 || a.ToY < 0 {
			return bad("a position left of the screen or above it")
		}
	case ScreenKeys:
		if len(a.Keys) == 0 || len(a.Keys) > 8 {
			return bad("%d keys, from 1 to 8", len(a.Keys))
		}
	case ScreenText:
		if !utf8.ValidString(a.Text) || utf8.RuneCountInString(a.Text) > MaxScreenText {
			return bad("a text that is not UTF-8, or of more than %d characters", MaxScreenText)
		}
	default:
		return bad("there is no such action")
	}
	switch a.Button {
	case "", "left", "middle", "right":
	default:
		return bad("button %s: left, middle or right", Quote(a.Button))
	}
	if a.Count < 0 || a.Count > MaxScreenSteps || max(a.DX, -a.DX, a.DY, -a.DY) > MaxScreenSteps {
		return bad("more than %d clicks or steps", MaxScreenSteps)
	}
	return nil
}

// Power is what can be done to a machine as a whole.
type Power string

// The ways.
const (
	PowerButton Power = "button" // pressed: what the system does then is its own business
	PowerReset  Power = "reset"  // it begins anew, without being asked
)
