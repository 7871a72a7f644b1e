package daemon

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer/ondemand/loader"
	"github.com/opendsec/dsec/layer/store"
)

func TestUnusedLayersWithoutATagAreRemoved(t *testing.T) {
	tree := t.TempDir()
	s, err := store.Open(t.TempDir(), store.Options{Grace: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	for _, tag := range []string{"kept:1", ""} {
		if err := os.WriteFile(filepath.Join(tree, "f"), []byte("x"+tag), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Import(t.Context(), tree, tag, image.Options{}); err != nil {
			t.Fatal(err)
		}
	}
	stop := collecting(s, time.Millisecond, slog.New(slog.DiscardHandler))
	defer stop()
	for end := time.Now().Add(10 * time.Second); ; {
		all, err := s.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(all) == 1 && len(all[0].Tags) == 1 && all[0].Tags[0] == "kept:1" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%+v", all)
		}
	}
}

// TestTheLoaderIsToldWhatRoomThereIs: also when something could not be given back.
func TestTheLoaderIsToldWhatRoomThereIs(t *testing.T) {
	busy := dsec.E(dsec.Timeout, "wait until nobody reads layer", "sha256:00", nil)
	type answer struct {
		freed, used int64
		err         error
	}
	for name, c := range map[string]struct {
		full    bool
		answers []answer
		told    []int64
		errs    bool
	}{
		"as it should":            {answers: []answer{{1, 70, nil}}, told: []int64{30}},
		"one did not go":          {answers: []answer{{1, 70, busy}}, told: []int64{30}, errs: true},
		"not known":               {answers: []answer{{0, 0, busy}}, errs: true},
		"more than it may":        {answers: []answer{{0, 120, busy}}, told: []int64{0}, errs: true},
		"full":                    {full: true, answers: []answer{{1, 70, nil}, {20, 50, nil}}, told: []int64{50}},
		"full, and one stays":     {full: true, answers: []answer{{1, 70, nil}, {10, 60, busy}}, told: []int64{40}, errs: true},
		"full, and then not seen": {full: true, answers: []answer{{1, 70, busy}, {0, 0, busy}}, told: []int64{30}, errs: true},
	} {
		var told []int64
		var freed int64
		for _, a := range c.answers {
			freed += a.freed
		}
		left := c.answers
		got, err := oneTrim{most: 100, trim: func(context.Context, int64) (int64, int64, error) {
			a := left[0]
			left = left[1:]
			return a.freed, a.used, a.err
		}, room: func(_ context.Context, left int64) error {
			told = append(told, left)
			return nil
		}}.run(t.Context(), c.full)
		if got != freed || !slices.Equal(told, c.told) || (err != nil) != c.errs || len(left) != 0 {
			t.Errorf("%s: freed %d of %d, told %v, want %v, %v", name, got, freed, told, c.told, err)
		}
	}
}

// TestAFullDiskIsNotForgotten while a trim is waited for, in either order.
func TestAFullDiskIsNotForgotten(t *testing.T) {
	for _, order := range [][]bool{{false, true}, {true, false}, {false, true, false}} {
		a := &agent{shorts: make(chan bool, 1)}
		for _, full := range order {
			a.noteShort(t.Context(), full)
		}
		if !<-a.shorts {
			t.Errorf("%v: the disk is not full", order)
		}
	}
}

// TestNobodyTakesNoteWhenTheAgentIsClosing: what is not recorded the next agent
// has to be told.
func TestNobodyTakesNoteWhenTheAgentIsClosing(t *testing.T) {
	a := &agent{opened: make(chan struct{}), closing: make(chan struct{})}
	close(a.opened)
	close(a.closing)
	if a.noteFailure(t.Context(), loader.Trouble{Err: errors.New("x")}) || a.noteEnd(t.Context(), loader.Ended{}) {
		t.Error("noted")
	}
}

func TestALostMountWasLostWhenNoAgentWasThere(t *testing.T) {
	begun := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	before, soon, late := begun.Add(-time.Hour), begun.Add(time.Second), begun.Add(time.Hour)
	for _, c := range []struct{ at, last, want time.Time }{
		{soon, before, before}, {begun.Add(-time.Minute), before, before}, {late, before, late}, {soon, time.Time{}, soon}, {before.Add(-time.Hour), before, before.Add(-time.Hour)},
	} {
		if got := lostSince(c.at, c.last, begun); !got.Equal(c.want) {
			t.Errorf("told of at %v, last alive %v: %v, want %v", c.at, c.last, got, c.want)
		}
	}
}
