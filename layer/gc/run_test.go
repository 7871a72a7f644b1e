package gc

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/layer"
)

// TestARunThatStoodStillIsOver: it deletes nothing more, and does not come to
// life again.
func TestARunThatStoodStillIsOver(t *testing.T) {
	ctx := context.Background()
	b, err := bucket.Open(ctx, "mem://")
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	r := &run{blobs: b}
	if err := r.write(ctx, []string{"c"}); err != nil {
		t.Fatal(err)
	}
	actx, cancel, err := r.alive(ctx)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if end, ok := actx.Deadline(); !ok || time.Until(end) > layer.RunStops {
		t.Errorf("may delete until %v", end)
	}
	r.wrote = r.wrote.Add(-layer.RunStops - time.Second)
	if _, _, err := r.alive(ctx); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Errorf("alive: %v", err)
	}
	if err := r.again(ctx); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Errorf("again: %v", err)
	}
	r.wrote = time.Now().Add(-layer.RunStops / 2)
	if err := r.again(ctx); err != nil || time.Since(r.wrote) > layer.RunEvery {
		t.Errorf("again: %v, written %v ago", err, time.Since(r.wrote))
	}
}
