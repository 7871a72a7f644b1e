package adversary

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
)

// bait is a directory of the machine that the file service is to be led to.
type bait struct{ dir string }

const secret = "of the machine"

func setBait(t *testing.T) bait {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "bait-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	b := bait{dir}
	for _, name := range []string{"file", "keep"} {
		if err := os.WriteFile(b.path(name), []byte(secret), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o777); err != nil { // nothing but the sandbox's walls is in the way
		t.Fatal(err)
	}
	return b
}

func (b bait) path(name string) string { return filepath.Join(b.dir, name) }

// untouched wants nothing of it read, written, removed or added.
func (b bait) untouched(t *testing.T) {
	t.Helper()
	all, err := os.ReadDir(b.dir)
	if err != nil || len(all) != 2 {
		t.Errorf("the machine's directory has %v, %v", all, err)
	}
	for _, name := range []string{"file", "keep"} {
		if text, err := os.ReadFile(b.path(name)); err != nil || string(text) != secret {
			t.Errorf("the machine's %s has %q, %v", name, text, err)
		}
	}
}

// background starts a part of the program that ends when it is killed.
func (h *host) background(t *testing.T, id dsec.SandboxID, argv ...string) *client.Process {
	t.Helper()
	p, err := h.Exec(t.Context(), id, process.Spec{Argv: argv, Cwd: "/tmp", Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// linksThatFlipLeadNowhere: while a process exchanges a directory for a link
// to the machine's thousands of times a second, every call of the file service is
// done over and over. Nothing outside is read, made, changed or removed.
func linksThatFlipLeadNowhere(t *testing.T, h *host) {
	b := setBait(t)
	for how, target := range map[string]string{
		"absolute": b.dir, "upwards": strings.Repeat("../", 30) + b.dir[1:], "magic": "/proc/1/root" + b.dir,
		"own magic": "/proc/self/root" + b.dir, "thread": "/proc/thread-self/root/../../" + b.dir,
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			id := h.create(t, nil)
			h.sh(t, id, "cd /tmp; mkdir real; echo inside >real/file; echo inside >real/keep; ln -s "+target+" link; ln -s "+target+"/file real/out")
			p := h.background(t, id, "/attack", "-flip", "/tmp/real", "/tmp/link")
			work(t, h.Files(id, ""))
			if _, err := p.Kill(t.Context()); err != nil {
				t.Fatal(err)
			}
			if _, err := p.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			if stdout, _, err := p.Kept(t.Context()); err != nil || len(stdout.Head) > 0 {
				t.Errorf("nothing was flipped: %q, %v", stdout.Head, err)
			}
			b.untouched(t)
		})
	}
	t.Cleanup(func() { b.untouched(t) })
}

// work makes every call of the file service below a name that flips, for a time.
func work(t *testing.T, f *client.Files) {
	t.Helper()
	length := time.Second
	if long {
		length = 20 * time.Second
	}
	var wg sync.WaitGroup
	calls, inside := 0, 0
	var mu sync.Mutex
	mode := uint32(0o600)
	for what, call := range map[string]func(io.Writer) error{
		"read": func(w io.Writer) error { _, err := f.Read(t.Context(), "/tmp/real/file", 0, 0, w); return err },
		"out":  func(w io.Writer) error { _, err := f.Read(t.Context(), "/tmp/real/out", 0, 0, w); return err },
		"download": func(w io.Writer) error {
			return f.Download(t.Context(), "/tmp/real", w, files.TreeOptions{Max: 1 << 20})
		},
		"write": func(io.Writer) error {
			_, err := f.Write(t.Context(), "/tmp/real/new", strings.NewReader("x"), files.WriteOptions{})
			return err
		},
		"replace": func(io.Writer) error {
			_, err := f.Write(t.Context(), "/tmp/real/file", strings.NewReader("inside"), files.WriteOptions{})
			return err
		},
		"mode":   func(io.Writer) error { return f.SetAttr(t.Context(), "/tmp/real/file", files.Attr{Mode: &mode}) },
		"mkdir":  func(io.Writer) error { return f.Mkdir(t.Context(), "/tmp/real/a/b", 0o755, true) },
		"remove": func(io.Writer) error { return f.Remove(t.Context(), "/tmp/real/a", true) },
		"keep":   func(io.Writer) error { return f.Remove(t.Context(), "/tmp/real/keep", false) },
		"move":   func(io.Writer) error { return f.Move(t.Context(), "/tmp/real/new", "/tmp/real/newer") },
		"upload": func(io.Writer) error {
			return f.Upload(t.Context(), "/tmp/real", bytes.NewReader(oneFile(t)), files.TreeOptions{})
		},
		"list": func(io.Writer) error { _, err := f.List(t.Context(), "/tmp/real", 3); return err },
	} {
		wg.Go(func() {
			for end := time.Now().Add(length); time.Now().Before(end); {
				var got bytes.Buffer
				err := call(&got)
				mu.Lock()
				if calls++; err == nil {
					inside++
				}
				mu.Unlock()
				if strings.Contains(got.String(), secret) {
					t.Errorf("%s reads what is the machine's", what)
					return
				}
				if c := dsec.ClassOf(err); err != nil && (c == dsec.Internal || c == dsec.Unavailable) {
					t.Errorf("%s: %v", what, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if inside == 0 || calls < 50 {
		t.Errorf("of %d calls %d met the directory", calls, inside)
	}
	t.Logf("%d calls, of which %d were done", calls, inside)
}

func oneFile(t *testing.T) []byte {
	return tarOf(t, tar.Header{Name: "a/uploaded", Mode: 0o644, Typeflag: tar.TypeReg})
}

// tarOf has members without content.
func tarOf(t *testing.T, members ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		body := []byte(nil)
		if m.Typeflag == tar.TypeReg {
			body = []byte("hostile")
			m.Size = int64(len(body))
		}
		if err := w.WriteHeader(&m); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
