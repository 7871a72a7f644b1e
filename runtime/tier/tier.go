// Package tier is what the implementations of a runtime share: which sandboxes there are,
// whose turn it is to change one and in which phase it is; the ends that are to be told;
// commands and file services whose errors say when it is the sandbox that is gone.
// Everything is safe for concurrent use.
package tier

import (
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/sizes"
	"github.com/opendsec/dsec/runtime"
)

// Usage is what a control group says of what is in it. What it cannot say is 0.
func Usage(c cgroup.Stats) runtime.Stats {
	return runtime.Stats{CPU: c.CPU, Throttled: c.Throttled, Memory: c.Memory, MemoryPeak: c.MemoryPeak, MemoryLimit: c.MemoryLimit,
		Pids: c.Pids, PidsPeak: c.PidsPeak, PidsLimit: c.PidsLimit, OOMKills: c.OOMKills, PidsDenied: c.PidsDenied}
}

// Wrap names the call and the sandbox in the error of a step; nil stays nil.
func Wrap(op string, id dsec.SandboxID, err error) error {
	if err == nil {
		return nil
	}
	return dsec.E(dsec.ClassOf(err), op, string(id), err)
}

// MachineFits refuses a machine with more memory, in bytes, than this node has at all, whatever is
// promised beyond it: a monitor dies of that, with a word of its own. Another node may have it.
func MachineFits(op, object string, memory int64) error {
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return dsec.E(dsec.Internal, op, object, err)
	}
	if has := int64(si.Totalram) * int64(si.Unit); memory > has {
		return dsec.Errorf(dsec.ResourceExhausted, op, object, "memory: a machine of %s, this node has %s; ask for less (--memory)", sizes.Text(memory), sizes.Text(has))
	}
	return nil
}
