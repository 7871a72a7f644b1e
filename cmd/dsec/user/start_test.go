package user

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
)

// TestCodesOfWhatDoesNotStart: 126 and 127 are the command's, 125 is dsec's.
func TestCodesOfWhatDoesNotStart(t *testing.T) {
	program := dsec.Quote("/tool")
	for _, c := range []struct {
		err  error
		want ExitCode
	}{
		{dsec.E(dsec.Invalid, "exec", program, syscall.ENOEXEC), exitCannotRun},
		{dsec.E(dsec.Invalid, "exec", program, syscall.E2BIG), exitCannotRun},
		{dsec.E(dsec.Internal, "exec", program, syscall.ETXTBSY), exitCannotRun},
		{dsec.E(dsec.Invalid, "change to directory", dsec.Quote("/loop"), syscall.ELOOP), exitCannotRun},
		{dsec.E(dsec.PermissionDenied, "exec", program, syscall.EACCES), exitCannotRun},
		{dsec.E(dsec.FileNotFound, "exec", program, syscall.ENOENT), exitNotFound},
		{dsec.Errorf(dsec.Invalid, "exec", "id", "needs a valid id"), exitDsec},
		{dsec.Errorf(dsec.Internal, "exec", "id", "start process: %w", syscall.EIO), exitDsec},
		{dsec.E(dsec.ResourceExhausted, "exec", program, syscall.ENOMEM), exitDsec},
		{dsec.E(dsec.SandboxGone, "exec", program, nil), exitDsec},
	} {
		if got := startCode(wire.Err(wire.Detail(c.err)), "/tool"); got != c.want { // as it comes over the wire
			t.Errorf("%v: %d, want %d", c.err, int(got), int(c.want))
		}
	}
}

func TestWhatIsNotBegunIsDsecsOwnWithAdvice(t *testing.T) {
	_, gone := net.Dial("unix", filepath.Join(t.TempDir(), "none.sock"))
	for _, err := range []error{dsec.E(dsec.Unavailable, "create sandbox", "", gone), dsec.E(dsec.PermissionDenied, "find sandbox", "x", nil)} {
		var b bytes.Buffer
		if got := notBegun(&b, err); got != exitDsec || !strings.Contains(b.String(), err.Error()) {
			t.Errorf("%v: %v\n%s", err, got, b.String())
		}
		if strings.Contains(b.String(), "sudo dsec up") != (dsec.ClassOf(err) == dsec.Unavailable) {
			t.Errorf("%v: advice %q", err, b.String())
		}
	}
}

// TestATreeForAServerThatIsNotThere: what became of the packing says nothing.
func TestATreeForAServerThatIsNotThere(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DSEC_SOCKET", filepath.Join(t.TempDir(), "none.sock"))
	for _, args := range [][]string{{"build", "--from", dir}, {"build", "--from", dir, "--at", "/work"}} {
		_, _, err := said(t, Layer, args...)
		if err == nil || strings.Contains(err.Error(), "closed pipe") || !strings.Contains(Advice(err), "is it up?") {
			t.Errorf("%v: %v", args, err)
		}
	}
	_, _, err := said(t, Image, "import", dir)
	if err == nil || strings.Contains(err.Error(), "closed pipe") || !strings.Contains(Advice(err), "is it up?") {
		t.Errorf("import: %v", err)
	}
}
