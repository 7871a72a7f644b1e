package adversary

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
)

// theHelperIsNeverInHand: what starts a command inside is ours for a moment. It
// is named as the command (CVE-2019-5736), its descriptors as the directory
// (CVE-2024-21626), it is the interpreter of a script, and it is watched by root of
// the sandbox as it comes. It is never opened, and starts commands afterwards.
func theHelperIsNeverInHand(t *testing.T, h *host) {
	before := h.look(t)
	id := h.create(t, nil)
	mode := uint32(0o755)
	if _, err := h.Files(id, "").Write(t.Context(), "/tmp/script", strings.NewReader("#!/proc/self/exe\n"), files.WriteOptions{Mode: &mode}); err != nil {
		t.Fatal(err)
	}
	h.sh(t, id, "cp /bin/busybox /tmp/kept 2>/dev/null; ln -s /proc/self/exe /tmp/link; ln -s /proc/self/fd/3 /tmp/three; ln -s /proc/self/cwd /tmp/here")
	for _, argv := range []string{"/proc/self/exe", "/tmp/link", "/tmp/script", "/proc/thread-self/exe", "/proc/1/exe", "/proc/self/fd/3", "/dev/fd/4", "/proc/self/fd/0"} {
		var out bytes.Buffer
		r, err := h.Run(t.Context(), id, process.Spec{Argv: []string{argv, "-c", "echo ran"}, Timeout: 10 * time.Second}, &out, &out)
		if err == nil && (r.ExitCode == 0 || strings.Contains(out.String(), "ran")) {
			t.Errorf("%s ran as a command: %+v %q", argv, r, out.String())
		}
	}
	for n := range 40 {
		for _, cwd := range []string{fmt.Sprintf("/proc/self/fd/%d", n), fmt.Sprintf("/proc/self/fd/%d/../../../..", n)} {
			var out bytes.Buffer
			r, err := h.Run(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c", "cd -P .; pwd; ls; cat etc/debian_version"}, Cwd: cwd, Timeout: 10 * time.Second}, &out, &out)
			if err == nil && r.ExitCode == 0 {
				t.Errorf("in %s: %q", cwd, out.String())
			}
		}
	}
	h.watched(t, id)
	h.watched(t, h.create(t, func(s *dsec.Spec) { s.Profile = "debug" }))
	if got := h.sh(t, id, "echo lives"); got != "lives\n" {
		t.Errorf("afterwards it says %q", got)
	}
	if got := h.sh(t, h.create(t, nil), "echo lives"); got != "lives\n" {
		t.Errorf("afterwards another says %q", got)
	}
	h.unchanged(t, before)
}

// nobodyElseIsBecome: a command runs as no number that is not the sandbox's, whether
// the number does not fit, is unmapped, or means "keep".
func nobodyElseIsBecome(t *testing.T, h *host) {
	id := h.create(t, nil)
	for _, user := range []string{"70000", "0:70000", "70000:0", "4294967295", "4294967296", "-1", "0:-1", "0:4294967295", "root:70000", "65536", "18446744073709551616", "0x0", "0 ", "\n0"} {
		var out bytes.Buffer
		r, err := h.Run(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c", "cat /proc/self/status"}, User: user}, &out, &out)
		if err == nil {
			t.Errorf("a command ran as %q: %+v %s", user, r, out.String())
		} else if c := dsec.ClassOf(err); c == dsec.Internal || c == dsec.Unavailable {
			t.Errorf("as %q: %v", user, err)
		}
	}
}

// theSecondWallHolds: a profile that lets a sandbox trace its own processes lets it do
// nothing to the first one: there the kernel itself says no.
func theSecondWallHolds(t *testing.T, h *host) {
	id := h.create(t, func(s *dsec.Spec) { s.Profile = "debug" })
	for _, name := range []string{"ptrace-first", "ptrace-seize", "process-vm-read", "process-vm-write", "pidfd-getfd", "read-memory-first", "environ-first",
		"descriptors-first", "root-of-first", "map-files-first", "executable-first", "setns-first", "setns-pidfd"} {
		for _, user := range []string{"root", "user"} {
			s := h.try(t, id, user, name, nil)
			if !strings.HasPrefix(s.text, "blocked: EPERM") && !strings.HasPrefix(s.text, "blocked: EACCES") {
				t.Errorf("%s as %s says %q", name, user, s.text)
			}
		}
	}
	if s := h.try(t, id, "root", "ptrace-traceme", nil); !strings.HasPrefix(s.text, "got: ") {
		t.Errorf("the profile does not let it be traced, so this proves nothing: %q", s.text)
	}
}

// watched starts commands while root of the sandbox looks at every process.
func (h *host) watched(t *testing.T, id dsec.SandboxID) {
	t.Helper()
	p := h.background(t, id, "/attack", "-watch")
	n := 100
	if long {
		n = 3000
	}
	for range n {
		if got := h.sh(t, id, "echo x"); got != "x\n" {
			t.Fatalf("a command said %q", got)
		}
	}
	if err := p.Feed(t.Context(), strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	stdout, _, err := p.Kept(t.Context())
	var looks int
	text := string(stdout.Head) + string(stdout.Tail)
	if i := strings.Index(text, " looks"); i >= 0 {
		_, _ = fmt.Sscan(text[strings.LastIndexByte(text[:i], '\n')+1:i], &looks)
	}
	if err != nil || looks < n || strings.Contains(text, "got: ") {
		t.Errorf("with %d looks: %v\n%s", looks, err, text)
	}
}
