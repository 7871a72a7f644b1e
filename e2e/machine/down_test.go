package machine

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec/process"
)

// busy starts a command that does not end.
func (h *host) busy() {
	h.t.Helper()
	if _, err := h.Exec(h.t.Context(), h.create(nil), process.Spec{Argv: []string{"/bin/sleep", "1000"}}); err != nil {
		h.t.Fatal(err)
	}
}

// ends runs "dsec down" and wants that nothing of the machine is left; its
// error may tell of what stays on disk.
func (h *host) ends() {
	h.t.Helper()
	begun := time.Now()
	out, err := h.Command("down").CombinedOutput()
	<-h.Ended
	if !bytes.Contains(out, []byte("nothing is left")) {
		h.t.Errorf("dsec down: %v\n%s", err, out)
	}
	if took := time.Since(begun); took > time.Minute {
		h.t.Errorf("dsec down took %v", took)
	}
	h.t.Logf("dsec down: %v\n%s", err, out)
}

// A disk that is full makes the pool on it read-only, and the ledger takes no
// word. What runs ends all the same.
func TestDownOnAFullHostDisk(t *testing.T) {
	dir := small(t)
	h := startIn(t, filepath.Join(dir, "state"))
	if h.Log.Count("the disk pool may grow to") == 0 {
		t.Errorf("no word of a pool of 8 GiB on 700 MB:\n%s", h.Log)
	}
	writer := h.create(nil)
	h.busy()
	fill(t, filepath.Join(dir, "filler"))
	// New blocks for metadata, which the disk cannot take either.
	const script = "for d in 1 2 3 4 5 6; do for i in $(seq 1 1500); do head -c 1500 /dev/urandom > /root/f$d.$i; done; sync; done"
	_, err := h.Run(t.Context(), writer, process.Spec{Argv: []string{"/bin/sh", "-c", script}, Timeout: time.Minute}, io.Discard, io.Discard)
	t.Log("the writer ended with", err) // a machine may end with its disk
	h.ends()
}

// The state of the node may be broken: what runs ends without it.
func TestDownWithoutTheStateOfTheNode(t *testing.T) {
	h := start(t)
	h.busy()
	h.busy()
	if err := os.WriteFile(filepath.Join(h.Dir, "data", "node", "ledger.db"), bytes.Repeat([]byte("x"), 1<<16), 0o600); err != nil {
		t.Fatal(err)
	}
	h.ends()
}

// An instance names control groups and network: what has other data and the
// same name must leave the sandboxes of the first alone, also when only its hold
// is left to be seen.
func TestAnInstanceIsOfOneData(t *testing.T) {
	h := start(t)
	id := h.create(nil)
	other := t.TempDir()
	for _, d := range []string{"data", "run"} {
		if err := os.MkdirAll(filepath.Join(other, d), 0o711); err != nil {
			t.Fatal(err)
		}
	}
	refused := func() {
		t.Helper()
		for _, verb := range []string{"up", "down"} {
			out, err := h.Command(verb, "--data", filepath.Join(other, "data"), "--run", filepath.Join(other, "run")).CombinedOutput()
			if err == nil || !bytes.Contains(out, []byte("choose another --instance")) || !bytes.Contains(out, []byte(h.Dir)) {
				t.Errorf("%s with other data: %v\n%s", verb, err, out)
			}
		}
	}
	refused()
	if out, r := h.sh(id, "echo alive"); r.ExitCode != 0 || out != "alive\n" {
		t.Errorf("%q %+v", out, r)
	}
	h.Quit(os.Interrupt)
	refused()
	h.Serve()
	if out, r := h.sh(id, "echo alive"); r.ExitCode != 0 || out != "alive\n" {
		t.Errorf("%q %+v", out, r)
	}
}
