package adversary

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// place makes what the techniques look for: namespaces, a file system in memory,
// addresses, a process to attack. Each runs in a directory of its own.
const place = `
set -e
mount --make-rprivate /
mount -t tmpfs none "$PLACE"
mount -t tmpfs none /dev/shm
ip link set lo up multicast on
for a in 169.254.169.254 169.254.170.2 10.0.0.1 172.16.0.1 192.168.0.1 100.64.0.1 192.0.2.1; do ip addr add $a/32 dev lo; done
ip route add 224.0.0.0/4 dev lo
ip -6 addr add fe80::1/64 dev lo nodad
mount -t bpf none /sys/fs/bpf && mkdir /sys/fs/bpf/some || true
mount -t debugfs none /sys/kernel/debug || true
mount -t tracefs none /sys/kernel/tracing || true
for a in 2001:db8::1 fd00:ec2::254; do ip -6 addr add $a/128 dev lo nodad; done
mkdir "$PLACE/evil"
mknod "$PLACE/evil/disk" b $ATTACK_DISK_MAJOR $ATTACK_DISK_MINOR
mknod "$PLACE/evil/kmsg" c 1 11
mknod "$PLACE/evil/null" c 1 3
echo 0 0 >/proc/sys/net/ipv4/ping_group_range
export ATTACK_CONTROL=1 ATTACK_EVIL="$PLACE" ATTACK_MARK=etc/passwd DSEC_EXAMPLE=1
exec 7</dev/null 8</proc/self/ns/uts </etc/passwd
set +e
for name in "$@"; do
	(exec -a "dsec neighbours-secret" sleep 60) >/dev/null 2>&1 & victim=$!
	mkdir "$PLACE/$name"
	cd "$PLACE/$name"
	touch dsec-file
	said=$(ATTACK_VICTIM=$victim timeout 20 "$ATTACK" "$name" 2>&1)
	echo "$name|$?|$said"
	{ kill -KILL $victim; wait $victim; } 2>/dev/null
done
exit 0
`

// controlGroup is a directory of the kernel's with a release agent, or "".
func controlGroup() string {
	all, _ := filepath.Glob("/sys/fs/cgroup/*/release_agent")
	if len(all) == 0 {
		return ""
	}
	return filepath.Dir(all[0])
}

// A technique that is stopped proves nothing if it is wrong: each must succeed
// where nothing stops it.
func TestEveryTechniqueWorksWhereNothingStopsIt(t *testing.T) {
	all, err := Vectors()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, v := range all {
		if v.Control == "" && v.Class != "Damage" {
			names = append(names, v.Name)
		}
	}
	dir, err := os.MkdirTemp("/var/tmp", "dsec-place-")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.Remove(dir) }()
	major, minor := disk(t)
	cmd := exec.Command("/bin/bash", append([]string{"-c", place, "place"}, names...)...)
	cmd.Env = append(os.Environ(), "PLACE="+dir, "ATTACK="+attack, "ATTACK_CGROUP="+controlGroup(),
		fmt.Sprintf("ATTACK_DISK_MAJOR=%d", major), fmt.Sprintf("ATTACK_DISK_MINOR=%d", minor))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	tried, absent := 0, 0
	const most = 24 // what kernels may lack; more are wrong programs
	for line := range strings.SplitSeq(string(out), "\n") {
		part := strings.SplitN(line, "|", 3)
		if len(part) < 3 || !slices.Contains(names, part[0]) {
			continue
		}
		tried++
		if part[1] == "4" && absent < most {
			absent++
			t.Logf("%s has no control here: %s", part[0], part[2])
			continue
		}
		if part[1] != "3" || !strings.Contains(line, "got: ") {
			t.Errorf("%s does not work where nothing stops it: exit %s, %s", part[0], part[1], part[2])
		}
	}
	if tried != len(names) {
		t.Errorf("%d of %d were tried\n%s", tried, len(names), out)
	}
}

// TestTheTableIsTheProgram: each technique is in the table once, and nothing else.
func TestTheTableIsTheProgram(t *testing.T) {
	all, err := Vectors()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(attack, "-list").Output()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, v := range all {
		if names = append(names, v.Name); v.Root == "" || v.What == "" || v.Wall == "" {
			t.Errorf("%+v", v)
		}
	}
	slices.Sort(names)
	if want := strings.Fields(string(out)); !slices.Equal(names, want) {
		for _, n := range names {
			if !slices.Contains(want, n) {
				t.Error("only in the table, or twice:", n)
			}
		}
		for _, n := range want {
			if !slices.Contains(names, n) {
				t.Error("not in the table:", n)
			}
		}
	}
}
