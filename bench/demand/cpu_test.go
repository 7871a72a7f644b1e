package demand

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ticks of /proc are hundredths of a second on every machine.
const tick = 10 * time.Millisecond

// idle is how long the CPUs of this machine have had nothing to do, added.
func idle(t *testing.T) time.Duration {
	t.Helper()
	text, err := os.ReadFile("/proc/stat")
	must(t, err)
	f := strings.Fields(string(text)) // cpu user nice system idle iowait …
	return ticks(t, f[4]) + ticks(t, f[5])
}

// serving is the CPU time of the S3 server, which is our child, and of this
// process, which has the proxy before it and asks for the sandboxes.
func serving(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	must(t, unix.Getrusage(unix.RUSAGE_SELF, &u))
	sum := time.Duration(u.Utime.Nano() + u.Stime.Nano())
	all, err := filepath.Glob("/proc/[0-9]*/stat")
	must(t, err)
	for _, path := range all {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		name, rest, _ := strings.Cut(string(text), ") ")
		f := strings.Fields(rest) // state ppid … from the third on
		if strings.HasSuffix(name, "(versitygw") && f[1] == strconv.Itoa(os.Getpid()) {
			sum += ticks(t, f[11]) + ticks(t, f[12])
		}
	}
	return sum
}

func ticks(t *testing.T, s string) time.Duration {
	t.Helper()
	n, err := strconv.ParseInt(s, 10, 64)
	must(t, err)
	return time.Duration(n) * tick
}
