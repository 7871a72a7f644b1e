package veth

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// TestARateHoldsEachWay: what comes through is what the rate lets in that time, and
// much more without one.
func TestARateHoldsEachWay(t *testing.T) {
	l := newLab(t)
	n := testNetwork(t, l, Config{Deny: labDeny()})
	const rate, most, length = 1 << 20, leastBurst + 1<<20/20 + 1<<16, time.Second
	carried := func(id string, rate int64, port string, sends bool) int64 {
		ns := testNamespace(t)
		attachAt(t, n, dsec.SandboxID(id), open, netpolicy.Place{NetNS: ns, Rate: rate})
		var outside atomic.Int64
		accept(t, l.outside, "0.0.0.0:"+port, func(c net.Conn) {
			if !sends {
				_, _ = io.Copy(c, endless{})
				return
			}
			for b := make([]byte, 64<<10); ; {
				n, err := c.Read(b)
				outside.Add(int64(n))
				if err != nil {
					return
				}
			}
		})
		c := stream(t, ns, public+":"+port)
		defer func() { _ = c.Close() }()
		begun := time.Now()
		_ = c.SetDeadline(begun.Add(length))
		if sends {
			_, _ = io.Copy(c, endless{})
			return outside.Load() * int64(length) / int64(time.Since(begun))
		}
		inside, _ := io.Copy(io.Discard, c)
		return inside * int64(length) / int64(time.Since(begun))
	}
	for name, sends := range map[string]bool{"from the sandbox": true, "to the sandbox": false} {
		port := map[bool]string{true: "8001", false: "8002"}[sends]
		limited, free := carried("l"+port, rate, port, sends), carried("f"+port, 0, "1"+port, sends)
		t.Logf("%s: %d bytes in a second with a rate of %d, %d without", name, limited, rate, free)
		if limited > rate+most || limited < rate/4 || free < 4*limited {
			t.Errorf("%s: %d bytes in a second with a rate of %d, %d without", name, limited, rate, free)
		}
	}
}

// endless is a stream of zeros.
type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }
