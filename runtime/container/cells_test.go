package container

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

func (w *world) cells(t testing.TB, s runtime.CellSpec) (dsec.SandboxID, runtime.Cells) {
	t.Helper()
	id := w.create(t)
	s.UID, s.GID = 65534, 65534
	c, err := w.r.Cells(context.Background(), id, s)
	must(t, err)
	t.Cleanup(func() { must(t, c.Close()) })
	return id, c
}

func cellRun(argv ...string) runtime.CellRun {
	return runtime.CellRun{Command: runtime.CellCommand{Argv: argv, Wall: 5 * time.Second, CPU: 5 * time.Second}, Env: []string{"PATH=/bin:/usr/bin"},
		Output: 64 << 10, Disk: 8 << 20, Back: 1 << 20}
}

// TestCells has what a cell takes, gives and keeps to itself.
func TestCells(t *testing.T) {
	w := newWorld(t)
	id, c := w.cells(t, runtime.CellSpec{})
	do := func(t *testing.T, r runtime.CellRun) runtime.CellEnd {
		t.Helper()
		end, err := c.Run(context.Background(), r)
		must(t, err)
		if !c.Settle(context.Background()) {
			t.Fatal("not clean")
		}
		return end
	}
	t.Run("files, stdin, output and files back", func(t *testing.T) {
		r := cellRun("sh", "-c", "read x; echo got $x; cat a/b.txt; echo e >&2; mkdir -p out/deep; echo 1 > out/1.txt; echo 2 > out/deep/2.txt; ln -s /etc/passwd out/link.txt; exit 3")
		r.Stdin, r.Outputs = []byte("hello\n"), []string{"out/*.txt"}
		r.Files = []runtime.CellFile{{Path: "a/b.txt", Mode: 0o600, Data: []byte("in\n")}}
		end := do(t, r)
		if end.Command.Code != 3 || string(end.Stdout) != "got hello\nin\n" || string(end.Stderr) != "e\n" {
			t.Errorf("%+v %q %q", end.Command, end.Stdout, end.Stderr)
		}
		if len(end.Files) != 1 || end.Files[0].Path != "out/1.txt" || string(end.Files[0].Data) != "1\n" {
			t.Errorf("%+v", end.Files)
		}
		r.Outputs = []string{"out/**"}
		var names []string
		for _, f := range do(t, r).Files {
			names = append(names, f.Path)
		}
		if slices.Sort(names); !slices.Equal(names, []string{"out/1.txt", "out/deep/2.txt"}) {
			t.Error(names)
		}
	})
	t.Run("more back than may come", func(t *testing.T) {
		r := cellRun("sh", "-c", "head -c 600000 /dev/zero >a; cp a b; cp a c")
		r.Outputs = []string{"*"}
		if end := do(t, r); len(end.Files) != 1 || !end.FilesLeftOut || len(end.Files[0].Data) != 600000 {
			t.Errorf("%d files, left out %v", len(end.Files), end.FilesLeftOut)
		}
	})
	t.Run("nothing but its own can be written", func(t *testing.T) {
		end := do(t, cellRun("sh", "-c", "for d in / /etc /bin /dev /home /root /var /proc /sys /dev/pts; do touch $d/x 2>/dev/null && echo $d; done; touch /tmp/x /var/tmp/y /dev/shm/x /task/x && echo own"))
		if string(end.Stdout) != "own\n" {
			t.Errorf("%q", end.Stdout)
		}
	})
	t.Run("what is left is ended", func(t *testing.T) {
		begun := time.Now()
		do(t, cellRun("sh", "-c", "for i in 1 2 3; do setsid sh -c 'trap \"\" TERM HUP; sleep 60' & done"))
		if end := do(t, cellRun("ls", "/proc")); strings.Count(string(end.Stdout), "\n") > 4 {
			t.Errorf("processes: %q", end.Stdout)
		}
		if time.Since(begun) > 3*time.Second {
			t.Error("it was waited for")
		}
	})
	t.Run("files that do not fit", func(t *testing.T) {
		r := cellRun("true")
		r.Files = []runtime.CellFile{{Path: "big", Data: make([]byte, 9<<20)}}
		_, c := w.cells(t, runtime.CellSpec{})
		if _, err := c.Run(context.Background(), r); dsec.ClassOf(err) != dsec.NoSpace || c.Settle(context.Background()) {
			t.Error("it is clean, or", err)
		}
	})
	t.Run("an ended context ends it", func(t *testing.T) {
		id, c := w.cells(t, runtime.CellSpec{})
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		if _, err := c.Run(ctx, cellRun("sleep", "60")); dsec.ClassOf(err) != dsec.Timeout || c.Settle(context.Background()) {
			t.Error("it is clean, or", err)
		}
		must(t, c.Close()) // a second time is for the cleanup
		eventually(t, "nobody is there but PID 1", func() bool { s, err := w.r.Stats(context.Background(), id); return err == nil && s.Pids == 1 })
	})
	must(t, w.r.Destroy(context.Background(), id))
}

func TestLoopbackIsACellsOwn(t *testing.T) {
	w := newWorld(t)
	_, c := w.cells(t, runtime.CellSpec{Loopback: true})
	for range 3 { // the port is free each time
		end, err := c.Run(context.Background(), cellRun("sh", "-c", "(echo over lo | nc -l -p 4242) & for i in 1 2 3 4 5 6 7 8 9 10; do nc 127.0.0.1 4242 </dev/null && exit 0; sleep 0.05; done; exit 1"))
		if err != nil || string(end.Stdout) != "over lo\n" || !c.Settle(context.Background()) {
			t.Fatalf("%+v %v %q %q", end.Command, err, end.Stdout, end.Stderr)
		}
	}
	_, none := w.cells(t, runtime.CellSpec{})
	if end, err := none.Run(context.Background(), cellRun("nc", "-l", "-p", "4242")); err != nil || end.Command.Code == 0 || !strings.Contains(string(end.Stderr), "not supported") {
		t.Errorf("%v %q", err, end.Stderr)
	}
}

func TestInterpretersThatDoNotStartAreNamed(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	for _, program := range []string{"/bin/nothing", "/bin/true"} {
		_, err := w.r.Cells(context.Background(), id, runtime.CellSpec{UID: 1, GID: 1, Interpreter: &runtime.Interpreter{Programs: []string{program}}})
		if dsec.ClassOf(err) != dsec.Invalid || !errors.As(err, new(*cellStep)) && !strings.Contains(err.Error(), "interpreter") {
			t.Errorf("%s: %v", program, err)
		}
	}
}

func FuzzCellFrames(f *testing.F) {
	frame := func(kind byte, body []byte) []byte {
		return append([]byte{kind, 0, 0, 0, byte(len(body)), 0, 0, 0}, body...)
	}
	result := make([]byte, exitSize)
	result[0] = 1
	f.Add(slices.Concat(frame('o', []byte("x")), frame('r', result), frame('f', []byte("\xa4\x01\x00\x00name")), frame('d', []byte("data")), frame('g', make([]byte, 4)), frame('C', make([]byte, 4))))
	f.Add(frame('x', append([]byte{byte(syscall.ENOSPC), 0, 0, 0}, "write files"...)))
	f.Fuzz(func(t *testing.T, b []byte) {
		in, got := cellReader{r: bytes.NewReader(b)}, cellCollector{most: 100, back: 100}
		for {
			kind, body, err := in.next()
			if err != nil {
				return
			}
			if last, err := got.add(kind, body); last || err != nil {
				break
			}
		}
		if got.out.Len() > 200 || got.err.Len() > 200 {
			t.Errorf("%d and %d bytes of output", got.out.Len(), got.err.Len())
		}
		total := 0
		for _, x := range got.end.Files {
			total += len(x.Data)
		}
		if total > 100 {
			t.Errorf("%d bytes of files", total)
		}
	})
}
