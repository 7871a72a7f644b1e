package proc

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/internal/linux"
)

// TestNoProgramIsToldAsTheOneAfterIt: a process that becomes another program of the same command
// name at once is not told to have been that one all along.
func TestNoProgramIsToldAsTheOneAfterIt(t *testing.T) {
	dir, err := os.MkdirTemp("", "masked")
	must(t, err)
	defer os.RemoveAll(dir)
	must(t, os.Chmod(dir, 0o755))
	own := filepath.Join(dir, "sh")
	copyFile(t, "/bin/sh", own)
	for name, f := range map[string]form{"by loads": byLoads, "by proc": byProc} {
		t.Run(name, func(t *testing.T) {
			k, o := linux.NewKeeper(), &told{}
			defer k.Close()
			id := newID()
			w := openAs(t, k, o, f)
			must(t, w.Add(t.Context(), audit.Subject{ID: id, UID: base}, false))
			must(t, w.Start())
			as(t, 0, 0, own, "-c", "exec /bin/sh -c '/bin/sleep 0.05; :'")
			w.Remove(t.Context(), id, nil)
			must(t, w.Close())
			must(t, Forget(t.Context(), w.cfg))
			got := o.of(id)
			if len(got) != 3 || !isFile(got[1], "sh") {
				t.Fatalf("%+v", got)
			}
			if exe := got[0].Exe; exe != own && !strings.HasPrefix(exe, "~") || got[1].Exe == own {
				t.Errorf("%s is told as %s, then %s", own, exe, got[1].Exe)
			}
		})
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	must(t, err)
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE, 0o755)
	must(t, err)
	_, err = io.Copy(out, in)
	must(t, err)
	must(t, out.Close())
}
