// Package plot writes plots as SVG files: bars beside each other and lines,
// with axes, ticks and a legend. The same input gives the same bytes.
package plot

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
)

// Series is one kind of bar or one line.
type Series struct {
	Name string
	X    []float64 // of lines only
	Y    []float64 // of bars, one for each group; NaN: none
}

// Bars are groups of bars. The axis starts at 0.
type Bars struct {
	Title  string
	Y      string // what the axis is, with its unit
	Groups []string
	Series []Series
}

// Lines are points joined by lines.
type Lines struct {
	Title  string
	X, Y   string // what the axes are, with their units
	LogX   bool   // powers of two on the axis; all X above 0
	Series []Series
}

// Measures of a plot, in pixels.
const (
	width  = 760
	height = 420
	left   = 70
	right  = 20
	top    = 50
	bottom = 90
)

// colours can be told apart by most people, also without colour.
var colours = []string{"#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999", "#000000"}

func colour(i int) string { return colours[i%len(colours)] }

// File writes a plot to a file.
func File(path string, p interface{ SVG(io.Writer) error }) error {
	var b bytes.Buffer
	if err := p.SVG(&b); err != nil {
		return fmt.Errorf("plot %s: %w", path, err)
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}

// SVG implements the plot.
func (b Bars) SVG(w io.Writer) error {
	if len(b.Groups) == 0 || len(b.Series) == 0 {
		return errors.New("no bars")
	}
	most := 0.0
	for _, s := range b.Series {
		if len(s.Y) != len(b.Groups) {
			return fmt.Errorf("series %q has %d bars for %d groups", s.Name, len(s.Y), len(b.Groups))
		}
		for _, y := range s.Y {
			if y < 0 || math.IsInf(y, 0) {
				return fmt.Errorf("series %q has a bar of %v", s.Name, y)
			}
			if y > most { // not NaN
				most = y
			}
		}
	}
	c := begin(b.Title)
	y := c.yAxis(b.Y, most)
	step := float64(width-left-right) / float64(len(b.Groups))
	bar := 0.8 * step / float64(len(b.Series))
	for g, name := range b.Groups {
		x0 := left + step*(float64(g)+0.1)
		for i, s := range b.Series {
			if math.IsNaN(s.Y[g]) {
				continue
			}
			at, h := x0+bar*float64(i), y(0)-y(s.Y[g])
			c.f(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`, at, y(s.Y[g]), math.Max(bar-1, 1), h, colour(i))
			if bar >= 24 {
				c.text(at+bar/2, y(s.Y[g])-3, "middle", 10, number(s.Y[g]))
			}
		}
		c.label(left+step*(float64(g)+0.5), name, step)
	}
	c.legend(b.Series)
	return c.end(w)
}

// SVG implements the plot.
func (l Lines) SVG(w io.Writer) error {
	lo, hi, most := math.Inf(1), math.Inf(-1), 0.0
	for _, s := range l.Series {
		if len(s.X) != len(s.Y) {
			return fmt.Errorf("series %q has %d x for %d y", s.Name, len(s.X), len(s.Y))
		}
		for i := range s.X {
			if l.LogX && s.X[i] <= 0 || s.Y[i] < 0 || math.IsNaN(s.X[i]+s.Y[i]) || math.IsInf(s.X[i]+s.Y[i], 0) {
				return fmt.Errorf("series %q has a point at %v, %v", s.Name, s.X[i], s.Y[i])
			}
			lo, hi, most = math.Min(lo, s.X[i]), math.Max(hi, s.X[i]), math.Max(most, s.Y[i])
		}
	}
	if lo > hi {
		return errors.New("no points")
	}
	c := begin(l.Title)
	y := c.yAxis(l.Y, most)
	x := c.xAxis(l.X, lo, hi, l.LogX)
	for i, s := range l.Series {
		var points []string
		for k := range s.X {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x(s.X[k]), y(s.Y[k])))
			c.f(`<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`, x(s.X[k]), y(s.Y[k]), colour(i))
		}
		c.f(`<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`, strings.Join(points, " "), colour(i))
	}
	c.legend(l.Series)
	return c.end(w)
}

// canvas gathers the elements.
type canvas struct{ bytes.Buffer }

func (c *canvas) f(format string, args ...any) { fmt.Fprintf(c, format+"\n", args...) }

func begin(title string) *canvas {
	c := &canvas{}
	c.f(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="sans-serif" fill="#222">`, width, height, width, height)
	c.f(`<rect width="%d" height="%d" fill="#fff"/>`, width, height)
	c.text(left, 20, "start", 14, title)
	return c
}

func (c *canvas) end(w io.Writer) error {
	c.f("</svg>")
	_, err := c.WriteTo(w)
	return err
}

func (c *canvas) text(x, y float64, anchor string, size int, s string) {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder takes all
	c.f(`<text x="%.1f" y="%.1f" text-anchor="%s" font-size="%d">%s</text>`, x, y, anchor, size, b.String())
}

// label is the name of a group under the axis, in as many lines as it takes.
func (c *canvas) label(x float64, s string, room float64) {
	fits := max(int(room/6), 4)
	line, y := "", float64(height-bottom+16)
	for _, word := range strings.Fields(s) {
		if line != "" && len(line)+1+len(word) > fits {
			c.text(x, y, "middle", 11, line)
			line, y = "", y+13
		}
		line = strings.TrimSpace(line + " " + word)
	}
	c.text(x, y, "middle", 11, line)
}

// yAxis draws the axis from 0 and returns where a value is.
func (c *canvas) yAxis(name string, most float64) func(float64) float64 {
	step := tick(most)
	ceil := math.Max(math.Ceil(most/step-1e-9), 1) * step
	y := func(v float64) float64 { return height - bottom - v/ceil*(height-top-bottom) }
	for v := 0.0; v <= ceil+step/2; v += step {
		c.f(`<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="#ddd"/>`, left, y(v), width-right, y(v))
		c.text(left-6, y(v)+4, "end", 11, number(v))
	}
	c.f(`<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="#222"/>`, left, height-bottom, width-right, height-bottom)
	c.text(left, top-12, "start", 11, name)
	return y
}

func (c *canvas) xAxis(name string, lo, hi float64, log bool) func(float64) float64 {
	scale := func(v float64) float64 { return v }
	if log {
		scale = math.Log2
	}
	a, b := scale(lo), scale(hi)
	if a == b {
		a, b = a-1, b+1
	}
	x := func(v float64) float64 { return left + 10 + (scale(v)-a)/(b-a)*(width-left-right-20) }
	mark := func(v float64) { c.text(x(v), height-bottom+16, "middle", 11, number(v)) }
	if log {
		for e := math.Ceil(a - 1e-9); e <= b+1e-9; e++ {
			mark(math.Exp2(e))
		}
	} else {
		step := tick(b - a)
		for v := math.Ceil(a/step-1e-9) * step; v <= b+step*1e-9; v += step {
			mark(v)
		}
	}
	c.text((left+width-right)/2, height-bottom+34, "middle", 11, name)
	return x
}

// legend is under the plot, in rows.
func (c *canvas) legend(all []Series) {
	if len(all) < 2 && all[0].Name == "" {
		return
	}
	x, y := float64(left), float64(height-26)
	for i, s := range all {
		w := 26 + 6.5*float64(len(s.Name))
		if x+w > width-right && x > left {
			x, y = left, y+16
		}
		c.f(`<rect x="%.1f" y="%.1f" width="10" height="10" fill="%s"/>`, x, y-9, colour(i))
		c.text(x+14, y, "start", 11, s.Name)
		x += w
	}
}

// tick is a step of 1, 2 or 5 times a power of ten that gives about five.
func tick(span float64) float64 {
	if span <= 0 {
		return 1
	}
	p := math.Pow(10, math.Floor(math.Log10(span/5)))
	for _, m := range []float64{1, 2, 5} {
		if span/(p*m) <= 6 {
			return p * m
		}
	}
	return 10 * p
}

func number(v float64) string {
	switch {
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 10:
		return trim(strconv.FormatFloat(v, 'f', 1, 64))
	}
	return trim(strconv.FormatFloat(v, 'f', 2, 64))
}

func trim(s string) string { return strings.TrimSuffix(strings.TrimRight(s, "0"), ".") }
