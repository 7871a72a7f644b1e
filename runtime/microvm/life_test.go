package microvm

import (
	"fmt"
	"strconv"
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
	if !strings.HasPrefix(o.Stdout, want) || !strings.HasSuffix(o.Stdout, "image\n") || strings.Count(o.Stderr, "not permitted")+strings.Count(o.Stderr, "denied") != 2 {
		t.Errorf("%s%s", o.Stdout, o.Stderr)
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
	_, err := w.r.Create(t.Context(), request(func(r *runtime.Request) { r.Spec.Limits.Memory = 1 << 44 }))
	if dsec.ClassOf(err) != dsec.ResourceExhausted || !strings.Contains(err.Error(), "this node has") {
		t.Errorf("more memory than there is: %v", err)
	}
	w.nothingLeft(t)
}

// A disk that is filled and emptied again and again, also after a moment of it was kept, holds each time what it may, and no
// read or write of it fails.
func TestDiskIsFilledAgain(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	// Files of many sizes, every other of which is removed, so that what is given back lies between what is kept.
	const fill = `cd /root; i=0; while dd if=/dev/urandom of=$1.$i bs=64k count=$((i%37+1)) 2>/tmp/why; do i=$((i+1)); done
grep -q "No space left on device" /tmp/why || cat /tmp/why; sync; du -sm . | cut -f1; rm -f $1.*[02468]; touch still-writable; sync`
	fills := func(word string) {
		t.Helper()
		o := w.run(t, id, "set -- "+word+"; "+fill)
		if mib, err := strconv.Atoi(strings.TrimSpace(o.Stdout)); err != nil || mib < 48 || mib > 64 || o.ExitCode != 0 {
			t.Fatalf("%s: %+v, want 48 to 64 MiB", word, o)
		}
	}
	fills("a")
	must(t, w.r.KeepMoment(t.Context(), id, "m"))
	for _, word := range []string{"b", "c", "d", "e", "f"} {
		fills(word)
	}
	must(t, w.r.DropMoment(t.Context(), "m"))
	must(t, w.r.Stop(t.Context(), id, 0))
	_, err := w.r.Start(t.Context(), id)
	must(t, err)
	fills("g")
}
