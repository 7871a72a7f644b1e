package function

import (
	"bytes"
	_ "embed"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

//go:embed testdata/inspect.py
var inspect string

//go:embed testdata/hostile.py
var hostile string

// TestHostilePredecessorsLeaveNothing has one container for commands and one for
// snippets. After each call that tries to leave something the next one looks at all it
// can see, which has to be what the first call ever saw in it.
func TestHostilePredecessorsLeaveNothing(t *testing.T) {
	rounds := 2 // of all, in both
	if os.Getenv("DSEC_LONG") != "" {
		rounds = 23
	}
	w := newWorld(t, func(c *Config) { c.PerPool = 1 })
	command := func(code string, args ...string) dsec.Call {
		return dsec.Call{Type: dsec.CallExec, Command: append([]string{"/usr/bin/python3", "-I", "-B", "-c", code}, args...)}
	}
	snippet := func(code string, args ...string) dsec.Call {
		c := python(code)
		c.Command = args
		return c
	}
	for name, call := range map[string]func(string, ...string) dsec.Call{"command": command, "snippet": snippet} {
		t.Run(name, func(t *testing.T) {
			n, err := strconv.Atoi(string(w.call(t, call(hostile, "count")).Stdout))
			must(t, err)
			looked := func(before string) dsec.CallResult {
				c := call(before + inspect)
				c.Limits = dsec.CallLimits{Disk: 8 << 20, Memory: 256 << 20}
				return w.call(t, c)
			}
			first := looked("")
			if first.Verdict != dsec.VerdictOK || !bytes.Contains(first.Stdout, []byte(`"shm": "free"`)) {
				t.Fatalf("%s\n%s\n%s", first.Verdict, first.Stdout, first.Stderr)
			}
			// What looks is not blind: of what is left in the same call it sees each.
			for _, left := range []string{"open('/tmp/x', 'w')", "open('/dev/shm/x', 'w')", "os.umask(0)", "os.fork() or os.execv('/bin/sleep', ['sleep', '60'])", "os.environ['X'] = '1'",
				"ctypes.CDLL(None).shmget(4242, 4096, 0o1600)", "ctypes.CDLL(None).msgget(4242, 0o1600)", "ctypes.CDLL(None).semget(4242, 1, 0o1600)",
				"import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0leak')", "os.openpty()", "os.nice(3)", "builtins.leak = 1",
				"resource.setrlimit(resource.RLIMIT_MEMLOCK, (1, 1))", "signal.setitimer(signal.ITIMER_REAL, 50)"} {
				if d := difference(first.Stdout, looked("import builtins, ctypes, os, resource, signal\n"+left+"\n").Stdout); d == "" {
					t.Errorf("%s is not seen", left)
				}
			}
			before, leaks, verdicts := w.e.Counts().Discarded, 0, map[dsec.Verdict]int{}
			for i := range rounds * n {
				c := call(hostile, strconv.Itoa(i%n))
				c.Limits = dsec.CallLimits{Wall: 500 * time.Millisecond, Output: 1 << 16, Disk: 8 << 20, Memory: 256 << 20}
				bad := w.call(t, c)
				verdicts[bad.Verdict]++
				next := looked("")
				if d := difference(first.Stdout, next.Stdout); d != "" || next.Verdict != dsec.VerdictOK {
					leaks++
					t.Errorf("after %d (%s): %s %s\n%.2000s", i%n, bad.Verdict, next.Verdict, d, next.Stderr)
				}
			}
			t.Logf("%d predecessors (%v), %d leaks, %d containers discarded", rounds*n, verdicts, leaks, w.e.Counts().Discarded-before)
		})
	}
}

// difference is the lines that only one of two has.
func difference(a, b []byte) string {
	count := map[string]int{}
	for l := range strings.Lines(string(a)) {
		count[l]++
	}
	for l := range strings.Lines(string(b)) {
		count[l]--
	}
	var out strings.Builder
	for l, n := range count {
		if n != 0 {
			out.WriteString(strconv.Itoa(-n) + " " + l)
		}
	}
	return out.String()
}
