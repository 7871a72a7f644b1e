package gvisor

import (
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// TestATerminalIsOne: it has a size that changes, a process in front that it interrupts,
// and a shell that goes on after that.
func TestATerminalIsOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := w.create(t)
	p, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sh"}, PTY: &process.Size{Rows: 24, Cols: 80}, Stdin: true})
	must(t, err)
	enter := func(s string) {
		t.Helper()
		_, err := p.Write(t.Context(), []byte(s))
		must(t, err)
	}
	shows := func(s string) {
		t.Helper()
		eventually(t, "it shows "+s, func() bool {
			head, _, _, err := p.Kept(t.Context(), process.Stdout)
			return err == nil && strings.Contains(string(head), s)
		})
	}
	enter("stty size; echo is $((1+1))\n")
	shows("24 80")
	shows("is 2")
	must(t, p.Resize(t.Context(), process.Size{Rows: 50, Cols: 132}))
	enter("stty size\n")
	shows("50 132")
	enter("sleep 300; echo after $((2+2))\n")
	eventually(t, "sleep is in front", func() bool {
		o := w.sh(t, id, "ps | grep -c '[s]leep 300'")
		return strings.TrimSpace(o.Stdout) == "1"
	})
	enter("\x03")
	enter("echo again $((3+3))\n")
	shows("again 6")
	enter("exit 7\n")
	r, err := p.Wait(t.Context())
	if err != nil || r.ExitCode != 7 {
		t.Errorf("%+v %v", r, err)
	}
}

// TestFilesOfAPausedOneAreRefused, and do not wait for ever.
func TestFilesOfAPausedOneAreRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := w.create(t)
	fs, err := w.r.Files(t.Context(), id, "root")
	must(t, err)
	must(t, w.r.Pause(t.Context(), id))
	if _, err := fs.Stat(t.Context(), "/etc/passwd", true); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("%v", err)
	}
	must(t, w.r.Resume(t.Context(), id))
	_, err = fs.Stat(t.Context(), "/etc/passwd", true)
	must(t, err)
}
