package watch

import (
	"fmt"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

// BenchmarkWrites is a shell that writes and removes files as a compiler does, with a
// program started between them. agent-µs/file is CPU time of the witness.
func BenchmarkWrites(b *testing.B) {
	const files = 300
	x := newWorld(b)
	x.open(b, false)
	script := fmt.Sprintf("cd %s/opt; i=0; while [ $i -lt %d ]; do i=$((i+1)); : > t$i; echo x > t$i; /bin/true; echo x > o$i; rm t$i; done", x.at, files)
	before := ownCPU(b)
	for b.Loop() {
		if out, err := exec.Command("/bin/sh", "-c", script).CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
	}
	x.w.writes.settle()
	x.w.names.settle()
	b.ReportMetric(float64(ownCPU(b)-before)/float64(b.N*files)/1000, "agent-µs/file")
	must(b, x.w.Close())
}

func ownCPU(b *testing.B) int64 {
	var u unix.Rusage
	must(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return u.Utime.Nano() + u.Stime.Nano()
}
