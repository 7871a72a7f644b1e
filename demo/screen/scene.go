package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Where things are. The tests know the same numbers.
const (
	buttonX, buttonY, buttonW, buttonH = 40, 40, 320, 100
	fieldX, fieldY, fieldH             = 40, 180, 60
	wheelX, wheelY                     = 40, 270
	paperX, paperY, paperW, paperH     = 40, 330, 560, 240
)

// Colors.
const (
	background = 0x20242c
	idle       = 0x2f6fd0
	clicked    = 0x2fa050
	white      = 0xffffff
	paper      = 0xf4f0e0
	ink        = 0xc02030
	black      = 0x000000
)

const maxText = 60

type point struct{ x, y int }

type scene struct {
	fb   *framebuffer
	font *font
	file string

	x, y    int
	pressed bool
	clicks  int
	devices []string
	turned  int // of the wheel
	trace   []point

	text           []rune
	shift, control bool
	composing      bool
	code           []rune // hexadecimal digits after Ctrl+Shift+U
	numbered       int
}

func (s *scene) handle(e event) {
	switch {
	case e.kind == 0:
		s.devices = append(s.devices, e.device)
	case e.kind == evAbs && e.code == absX:
		s.x = int(int64(e.value) * int64(s.fb.width-1) / range1000)
	case e.kind == evAbs && e.code == absY:
		s.y = int(int64(e.value) * int64(s.fb.height-1) / range1000)
		s.drag()
	case e.kind == evRel && e.code == relWheel:
		s.turned += int(e.value)
	case e.kind == evKey && e.code == buttonLeft:
		s.pressed = e.value != 0
		if s.pressed && (area{buttonX, buttonY, buttonW, buttonH}).has(s.x, s.y) {
			s.clicks++
		}
		s.drag()
	case e.kind == evKey:
		s.key(e.code, e.value)
	}
}

func (s *scene) drag() {
	if s.pressed && (area{paperX, paperY, paperW, paperH}).has(s.x, s.y) {
		s.trace = append(s.trace, point{s.x, s.y})
	}
}

// area is a rectangle: left, top, width, height.
type area [4]int

func (a area) has(x, y int) bool {
	return x >= a[0] && x < a[0]+a[2] && y >= a[1] && y < a[1]+a[3]
}

// Rows of a US keyboard by the code of their first key.
var rows = []struct {
	first       uint16
	plain, more string
}{
	{2, "1234567890-=", "!@#$%^&*()_+"}, {16, "qwertyuiop[]", "QWERTYUIOP{}"}, {30, "asdfghjkl;'`", "ASDFGHJKL:\"~"}, {43, "\\zxcvbnm,./", "|ZXCVBNM<>?"}, {57, " ", " "},
}

func (s *scene) key(code uint16, value int32) {
	switch code {
	case 42, 54:
		s.shift = value != 0
		return
	case 29, 97:
		s.control = value != 0
		return
	}
	if value == 0 {
		return
	}
	if code == 14 && len(s.text) > 0 { // backspace
		s.text = s.text[:len(s.text)-1]
	}
	for _, r := range rows {
		if code < r.first || int(code-r.first) >= len(r.plain) {
			continue
		}
		c := r.plain[code-r.first]
		if s.shift {
			c = r.more[code-r.first]
		}
		s.letter(rune(c))
	}
}

// letter takes one; Ctrl+Shift+U, hexadecimal digits and a space are one, too.
func (s *scene) letter(c rune) {
	switch {
	case s.control && s.shift && c == 'U':
		s.composing, s.code = true, nil
	case s.composing && c == ' ':
		s.composing = false
		if n, err := strconv.ParseUint(string(s.code), 16, 32); err == nil {
			s.add(rune(n))
		}
	case s.composing:
		s.code = append(s.code, c)
	case !s.control:
		s.add(c)
	}
}

func (s *scene) add(c rune) {
	if len(s.text) < maxText {
		s.text = append(s.text, c)
	}
}

func (s *scene) draw() {
	fb := s.fb
	fb.rectangle(0, 0, fb.width, fb.height, background)
	color, label := uint32(idle), "Click me"
	if s.clicks > 0 {
		color, label = clicked, fmt.Sprintf("Clicked: %d", s.clicks)
	}
	fb.rectangle(buttonX, buttonY, buttonX+buttonW, buttonY+buttonH, color)
	fb.text(s.font, buttonX+40, buttonY+buttonH/2-16, label, white)
	fb.rectangle(fieldX, fieldY, fb.width-40, fieldY+fieldH, white)
	fb.text(s.font, fieldX+10, fieldY+fieldH/2-16, string(s.text), black)
	fb.text(s.font, wheelX, wheelY, fmt.Sprintf("Wheel: %d", s.turned), white)
	fb.rectangle(paperX, paperY, paperX+paperW, paperY+paperH, paper)
	for _, p := range s.trace {
		fb.rectangle(p.x-3, p.y-3, p.x+4, p.y+4, ink)
	}
	fb.rectangle(s.x-8, s.y-1, s.x+9, s.y+2, white)
	fb.rectangle(s.x-1, s.y-8, s.x+2, s.y+9, white)
	fb.show()
	s.say()
}

// say writes what is on the screen, at once for who reads it.
func (s *scene) say() {
	s.numbered++
	text := fmt.Sprintf("drawn=%d clicks=%d wheel=%d trace=%d x=%d y=%d devices=%s text=%s\n", s.numbered, s.clicks, s.turned, len(s.trace), s.x, s.y, strings.Join(s.devices, ","), string(s.text))
	if err := os.WriteFile(s.file+".new", []byte(text), 0o644); err == nil {
		_ = os.Rename(s.file+".new", s.file) // a file that is missing is noticed
	}
}
