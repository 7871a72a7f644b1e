package embedded

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/version"
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
	if i := c.Info(); !i.Adopted || i.PID != pid || i.Version != version.Version {
		t.Errorf("%+v, want pid %d", i, pid)
	}
	if err := c.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

// TestEmbeddedHoldIsReplacedByAnother: an agent that carries another dsec-hold
// finds one that runs.
func TestEmbeddedHoldIsReplacedByAnother(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: uid is", os.Getuid())
	}
	bin, err := Hold()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bin.Close() }()
	image, err := io.ReadAll(io.NewSectionReader(bin, 0, 1<<30))
	if err != nil {
		t.Fatal(err)
	}
	other, err := linux.SealedFile("dsec-hold", append(image, 0))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	o := hold.Options{Socket: filepath.Join(t.TempDir(), "hold"), Log: filepath.Join(t.TempDir(), "log"), Binary: bin}
	c, err := hold.Ensure(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	was := c.Info()
	for _, b := range []*os.File{other, bin} {
		if err := c.Put(ctx, "kept", bin); err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		o.Binary = b
		if c, err = hold.Ensure(ctx, o); err != nil {
			t.Fatal(err)
		}
		i := c.Info()
		if !i.Adopted || !i.Upgraded || i.Stale != nil || i.PID != was.PID || !i.Started.Equal(was.Started) {
			t.Errorf("%+v, was %+v", i, was)
		}
		if names, err := c.Names(ctx, ""); err != nil || len(names) != 1 {
			t.Error(names, err)
		}
	}
	if c.Info().Digest != was.Digest {
		t.Error("it did not come back to the first program")
	}
	if err := c.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	log, err := os.ReadFile(o.Log)
	t.Logf("%s%v", log, err)
}
