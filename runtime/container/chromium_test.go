package container

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

// Debian's Chromium itself, with its sandbox on: the page is what it renders,
// and the kernel says which walls its renderer is behind.
func TestChromiumRunsWithItsSandboxOn(t *testing.T) {
	if os.Getenv("DSEC_LONG") == "" {
		t.Skip("installs Chromium into a directory, some minutes and 1 GiB: set DSEC_LONG=1")
	}
	w := newWorld(t)
	l := layertest.New(t, func(dir string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		tree := filepath.Join(dir, "tree")
		cmd := exec.CommandContext(ctx, "mmdebstrap", "--variant=minbase", "--mode=root", "--quiet",
			"--include=chromium-headless-shell", "bookworm", tree)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Skipf("mmdebstrap: %v: %s", err, tail(out, 1000))
		}
		entries, err := os.ReadDir(tree)
		for _, e := range entries {
			if err == nil && e.Name() != "dev" {
				err = os.Rename(filepath.Join(tree, e.Name()), filepath.Join(dir, e.Name()))
			}
		}
		if err != nil {
			return err
		}
		return os.RemoveAll(tree)
	})
	world := func(p confine.Profile) func(*runtime.Request) {
		return func(r *runtime.Request) {
			r.Spec.Profile, r.Layers.Layers = string(p), []layer.Local{l}
			r.Spec.Limits.Memory, r.Spec.Limits.Disk, r.Spec.Limits.Pids, r.Spec.Limits.CPU = 2<<30, 512<<20, 512, 2
		}
	}
	const chromium = `mkdir -p /tmp/h && cd /tmp/h && export HOME=/tmp/h && timeout 25 chromium-headless-shell --disable-gpu `
	render := process.Spec{User: "65534", Argv: []string{"/bin/sh", "-c", chromium +
		`--dump-dom 'data:text/html,<p id=x></p><script>x.textContent=6*7+" rendered"</script>'`}}
	id := w.create(t, world(confine.Desktop))
	if o := w.run(t, id, render); !strings.Contains(o.Stdout, "42 rendered") {
		t.Errorf("%q %s %+v", o.Stdout, o.Stderr, o.Result)
	}
	// A renderer is process 1 of a namespace in a namespace, and under a filter
	// of Chromium's beside ours.
	o := w.run(t, id, process.Spec{User: "65534", Argv: []string{"/bin/sh", "-c", chromium + `--remote-debugging-port=9222 about:blank 2>log &
		for i in $(seq 200); do
			for p in /proc/[0-9]*; do
				grep -qa type=renderer $p/cmdline 2>/dev/null && grep -q 'Seccomp_filters:.[2-9]' $p/status || continue
				grep -E '^(NSpid|Seccomp_filters)' $p/status; kill %1; exit
			done
			sleep 0.1
		done; cat log`}})
	if !regexp.MustCompile(`NSpid:\t\d+\t\d+\t1\nSeccomp_filters:\t[2-9]`).MatchString(o.Stdout) {
		t.Errorf("the renderer: %q %s", o.Stdout, o.Stderr)
	}
	t.Logf("the renderer: %q", o.Stdout)
	if o := w.run(t, w.create(t, world(confine.Build)), render); o.ExitCode == 0 || !strings.Contains(o.Stderr, "sandbox") {
		t.Errorf("under build: %q %s", o.Stdout, o.Stderr)
	}
}
