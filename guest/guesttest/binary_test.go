package guesttest

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The program goes into every image of a machine, alone.
func TestAgentIsSmallAndStatic(t *testing.T) {
	for _, arch := range []string{"amd64", "arm64"} {
		at := filepath.Join(t.TempDir(), "dsec-guest")
		build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", at, "github.com/opendsec/dsec/cmd/dsec-guest")
		build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+arch)
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", arch, err, out)
		}
		st, err := os.Stat(at)
		must(t, err)
		if st.Size() >= 5<<20 {
			t.Errorf("%s: %d bytes", arch, st.Size())
		}
		f, err := elf.Open(at)
		must(t, err)
		for _, p := range f.Progs {
			if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
				t.Errorf("%s is linked dynamically", arch)
			}
		}
		must(t, f.Close())
		t.Logf("%s: %d bytes", arch, st.Size())
	}
	list := exec.Command("go", "list", "-deps", "github.com/opendsec/dsec/cmd/dsec-guest")
	out, err := list.Output()
	must(t, err)
	for _, dep := range strings.Fields(string(out)) {
		for _, heavy := range []string{"dsec/api", "dsec/node", "dsec/gateway", "dsec/cluster", "dsec/runtime", "protobuf", "nats", "net/http"} {
			if strings.Contains(dep, heavy) {
				t.Errorf("it imports %s", dep)
			}
		}
	}
}
