package fullvm

import (
	"testing"
	"time"
)

// memory: what a program of the machine had, and files that nobody reads any more, go back to the host.
func (b *box) memory(t *testing.T) {
	b = b.in(t)
	const mib = 1 << 20
	host := func() int64 {
		s, err := b.r.Stats(b.ctx(), b.id)
		must(t, err)
		return s.HostMemory
	}
	falls := func(what string, to int64) {
		t.Helper()
		for end := time.Now().Add(3 * time.Minute); host() > to; time.Sleep(250 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: the host still has %d MiB of it, want at most %d", what, host()/mib, to/mib)
			}
		}
	}
	before := host()
	// tail keeps what has no end of line.
	b.run("(head -c 125829120 /dev/zero; touch /run/full; while test -e /run/full; do sleep 0.1; done) | tail >/dev/null & while ! test -e /run/full; do sleep 0.1; done")
	most := host()
	t.Logf("%d MiB, and with a program of 120 MiB %d", before/mib, most/mib)
	b.run("rm /run/full")
	falls("after a program", most-90*mib)
	b.run("head -c 83886080 /dev/urandom >/srv/big; sync; cat /srv/big >/dev/null")
	most = host()
	falls("after a file", most-50*mib)
	b.run("rm /srv/big")
}
