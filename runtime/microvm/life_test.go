package microvm

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// A sandbox has a kernel, a boot and names of its own, its limits, and nothing of the machine's.
func TestSandboxIsAMachine(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, func(r *runtime.Request) { r.Spec.Limits.Memory, r.Spec.Workdir = 96<<20, "/srv/deep" })
	o := w.run(t, id, "hostname; cat /etc/hostname; pwd; ls /dev; ls /sys/class/net; cat /proc/1/comm; ls /proc | grep -c '^[0-9]'; mknod /x b 8 0; mount -t proc x /proc; echo $FROM")
	want := fmt.Sprintf("%s\n%s\n/srv/deep\nfd\nfull\nmqueue\nnull\nptmx\npts\nrandom\nshm\nstderr\nstdin\nstdout\ntty\nurandom\nzero\n", id, id)
	if !strings.HasPrefix(o.stdout, want) || !strings.HasSuffix(o.stdout, "image\n") || strings.Count(o.stderr, "not permitted")+strings.Count(o.stderr, "denied") != 2 {
		t.Errorf("%s%s", o.stdout, o.stderr)
	}
	if o := w.run(t, id, "tail /dev/zero"); o.ExitCode != 137 || !o.OOM {
		t.Errorf("beyond its memory: %+v", o.Result)
	}
	s, err := w.r.Stats(t.Context(), id)
	if err != nil || s.HostMemory <= 0 || s.Memory <= 0 || s.Memory > 96<<20 {
		t.Errorf("%+v %v", s, err)
	}
}

// What no guest gives is refused in words, before anything is made.
func TestWhatIsNotGivenIsUnsupported(t *testing.T) {
	w := newWorld(t)
	for name, change := range map[string]func(*runtime.Request){
		"profile": func(r *runtime.Request) { r.Spec.Profile = "nested" },
		"phases":  func(r *runtime.Request) { r.Spec.Phases = []dsec.Phase{{Name: "a"}} },
		"mounts":  func(r *runtime.Request) { r.Spec.Mounts = []dsec.HostMount{{Source: "/etc", Target: "/x"}} },
		"network": func(r *runtime.Request) { r.Spec.Network = dsec.NetworkOpen },
		"disk":    func(r *runtime.Request) { r.Spec.Limits.Disk = dsec.MaxBytes },
	} {
		_, err := w.r.Create(t.Context(), request(change))
		if dsec.ClassOf(err) != dsec.Unsupported {
			t.Errorf("%s: %v", name, err)
		}
		w.nothingLeft(t)
	}
}
