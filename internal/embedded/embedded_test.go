package embedded

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/hold"
)

// TestEmbeddedHoldRuns starts the real, static binary from its memfd, as dsec
// does, and meets it again as a second agent would.
func TestEmbeddedHoldRuns(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: uid is", os.Getuid())
	}
	bin, err := Hold()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bin.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	o := hold.Options{Socket: filepath.Join(t.TempDir(), "hold"), Binary: bin}
	c, err := hold.Ensure(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	pid := c.Info().PID
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if c, err = hold.Ensure(ctx, o); err != nil {
		t.Fatal(err)
	}
	if i := c.Info(); !i.Adopted || i.PID != pid || i.Version != hold.Version {
		t.Errorf("%+v, want pid %d", i, pid)
	}
	if err := c.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}
