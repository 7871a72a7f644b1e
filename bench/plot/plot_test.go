package plot

import (
	"bytes"
	"encoding/xml"
	"io"
	"math"
	"strings"
	"testing"
)

// parse reads an SVG as XML and counts its elements.
func parse(t *testing.T, p interface{ SVG(io.Writer) error }) map[string]int {
	t.Helper()
	var b bytes.Buffer
	if err := p.SVG(&b); err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for d := xml.NewDecoder(&b); ; {
		tok, err := d.Token()
		if err == io.EOF {
			return count
		}
		if err != nil {
			t.Fatal(err)
		}
		if e, ok := tok.(xml.StartElement); ok {
			count[e.Name.Local]++
			for _, a := range e.Attr {
				if strings.Contains(a.Value, "NaN") || strings.Contains(a.Value, "Inf") || strings.HasPrefix(a.Value, "-") {
					t.Errorf("%s of %s is %s", a.Name.Local, e.Name.Local, a.Value)
				}
			}
		}
	}
}

func TestEveryValueIsDrawn(t *testing.T) {
	got := parse(t, Bars{Title: "a < b & c", Y: "s", Groups: []string{"one", "two words and more of them"},
		Series: []Series{{Name: "x", Y: []float64{1, 0}}, {Name: "y", Y: []float64{math.NaN(), 3.5}}}})
	if want := 1 + 3 + 2; got["rect"] != want { // background, bars, legend
		t.Errorf("%d rectangles, want %d", got["rect"], want)
	}
	got = parse(t, Lines{Title: "t", X: "n", Y: "s", LogX: true,
		Series: []Series{{Name: "a", X: []float64{1, 1000}, Y: []float64{0, 2}}, {Name: "b", X: []float64{64}, Y: []float64{1}}}})
	if got["circle"] != 3 || got["polyline"] != 2 {
		t.Errorf("%v", got)
	}
}

func TestWhatCannotBeDrawnIsRefused(t *testing.T) {
	for _, p := range []interface{ SVG(io.Writer) error }{
		Bars{}, Bars{Groups: []string{"a"}, Series: []Series{{Y: []float64{1, 2}}}}, Bars{Groups: []string{"a"}, Series: []Series{{Y: []float64{-1}}}},
		Lines{}, Lines{LogX: true, Series: []Series{{X: []float64{0}, Y: []float64{1}}}}, Lines{Series: []Series{{X: []float64{1}, Y: nil}}},
		Lines{Series: []Series{{X: []float64{1}, Y: []float64{math.NaN()}}}},
	} {
		if err := p.SVG(io.Discard); err == nil {
			t.Errorf("%+v was drawn", p)
		}
	}
}

func TestTicksAreRound(t *testing.T) {
	for span, want := range map[float64]float64{1: 0.2, 9: 2, 100: 20, 0.03: 0.005, 12: 2, 0: 1} {
		if got := tick(span); math.Abs(got-want) > want/1e6 {
			t.Errorf("tick(%v) = %v, want %v", span, got, want)
		}
	}
}
