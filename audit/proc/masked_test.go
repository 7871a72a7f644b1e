package proc

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
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
			c := exec.Command(own, "-c", "exec /bin/sh -c 'echo ready; read x'")
			c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: base, Gid: base}}
			in, err := c.StdinPipe()
			must(t, err)
			out, err := c.StdoutPipe()
			must(t, err)
			must(t, c.Start())
			_, err = out.Read(make([]byte, 8))
			must(t, err)
			must(t, w.Start()) // who reads may always come that late
			w.Remove(t.Context(), id, nil)
			must(t, w.Close())
			must(t, Forget(t.Context(), w.cfg))
			must(t, in.Close())
			_ = c.Wait() // it read nothing, which is an error
			got := o.of(id)
			if len(got) != 2 || !isFile(got[1], "sh") {
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
