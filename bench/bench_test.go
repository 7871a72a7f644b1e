package bench

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

type fixed struct {
	took time.Duration
	err  error
}

func (f fixed) Cycle(context.Context, int) (time.Duration, error) { return f.took, f.err }
func (f fixed) Close() error                                      { return nil }

func contender(name string, f fixed) Contender {
	return Contender{Name: name, Worker: func(int) (Worker, error) { return f, nil }}
}

func TestRoundsAreInterleavedAndComplete(t *testing.T) {
	var order []string
	ks := []Contender{contender("a", fixed{took: time.Millisecond}), contender("b", fixed{took: 4 * time.Millisecond})}
	samples, err := Run(t.Context(), ks, Options{Concurrency: []int{1, 4}, Rounds: 2, Cycles: 10,
		Progress: func(l string) { order = append(order, l[:1]) }})
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(order, ""); got != "abbaabba" {
		t.Errorf("order %s", got)
	}
	for _, s := range samples {
		if s.Cycles != 10 || s.Failures != 0 {
			t.Errorf("%+v", s)
		}
	}
	var b strings.Builder
	Table(&b, samples, ks)
	if !strings.Contains(b.String(), "1/4.0") {
		t.Errorf("no p50 ratio of 4 in:\n%s", b.String())
	}
}

func TestFailuresAreCountedNotHidden(t *testing.T) {
	_, err := Run(t.Context(), []Contender{contender("bad", fixed{err: errors.New("boom")})},
		Options{Concurrency: []int{1}, Rounds: 1, Cycles: 3})
	if err == nil || !strings.Contains(err.Error(), "boom") {
		t.Fatalf("a contender that never works must be an error, got %v", err)
	}
}

func TestQuantile(t *testing.T) {
	d := []time.Duration{1, 2, 3, 4}
	if Quantile(nil, .5) != 0 || Quantile(d, .5) != 3 || Quantile(d, .99) != 4 {
		t.Error("quantiles are off")
	}
}

func TestSumOfPartsIsTheRateOfAllInARow(t *testing.T) {
	samples := []Sample{
		{Contender: "a", Concurrency: 8, Cycles: 100, Wall: time.Second},
		{Contender: "b", Concurrency: 8, Cycles: 300, Wall: time.Second},
		{Contender: "b", Concurrency: 1, Cycles: 9, Wall: time.Second},
		{Contender: "all", Concurrency: 8, Cycles: 60, Wall: time.Second},
	}
	got := Sum(samples, "all", []string{"a", "b"})
	if want := "at concurrency 8 the parts alone allow 75 cycles/s; all reaches 60, 0.80x of that"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := Sum(samples, "all", nil); got != "" {
		t.Errorf("no parts: %q", got)
	}
}
