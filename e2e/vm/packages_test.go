package vm

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestCgroupV2(t *testing.T) {
	ok := inGuest(t, "github.com/opendsec/dsec/internal/cgroup", "", Job{})
	for _, name := range []string{"TestA23_NprocAndOOM", "TestDeviceWallHoldsAgainstNodesMadeElsewhere", "TestUpdateChangesALivingGroup"} {
		if !ok[name] {
			t.Errorf("%s did not run", name)
		}
	}
}

// Layers are mounted through loop devices there, and stacked in a namespace.
func TestRootfs(t *testing.T) {
	dir := t.TempDir()
	euid := filepath.Join(dir, "euid")
	cc := exec.Command("gcc", "-static", "-Os", "-o", euid, "-x", "c", "-")
	cc.Stdin = strings.NewReader("#include <stdio.h>\n#include <unistd.h>\nint main(void) { return printf(\"%d\\n\", (int)geteuid()) < 0; }")
	if out, err := cc.CombinedOutput(); err != nil {
		t.Skipf("gcc: %v: %s", err, out)
	}
	// The guest's compiler knows the one program that the tests compile.
	gcc := filepath.Join(dir, "gcc")
	if err := os.WriteFile(gcc, []byte("#!/bin/sh\nwhile [ \"$1\" != -o ]; do shift; done\ncat >/dev/null\ncp /euid \"$2\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	ok := inGuest(t, "github.com/opendsec/dsec/rootfs", "", Job{
		Files:   map[string]string{"/euid": euid, "/sbin/gcc": gcc},
		Tools:   []string{"mkfs.erofs", "setfattr", "getfattr", "setcap", "getcap"},
		Modules: []string{"erofs", "overlay", "loop", "ext4"}})
	if !ok["TestDeviceNodesOfALayerOpenNothing/attached_loop"] {
		t.Error("layers were not mounted through loop devices")
	}
}

// The oldest kernel's types and verifier are others.
func TestProgramsAreWitnessed(t *testing.T) {
	ok := inGuest(t, "github.com/opendsec/dsec/audit/proc", "", Job{})
	for _, name := range []string{"TestShortProgramsAreToldWhole", "TestHostileArgumentsAreTold", "TestNestedNumbersAreOfEachOnesOwn", "TestLongArgumentsPushNothingOut",
		"TestWithoutTypesProcIsAsked", "TestNoStartIsUncounted"} {
		if !ok[name] {
			t.Errorf("%s did not pass", name)
		}
	}
}

const quotaDisk = `mkfs.ext4 -q -O quota,project /dev/vda && mount -t ext4 -o prjquota /dev/vda /mnt && export TMPDIR=/mnt`

// The disk of the guest is an ext4 with project quotas, and its btrfs knows
// no simple quotas.
func TestDiskpool(t *testing.T) {
	ok := inGuest(t, "github.com/opendsec/dsec/internal/diskpool", quotaDisk, Job{Disk: 8 << 30,
		Tools: []string{"mkfs.btrfs", "mkfs.ext4"}, Modules: []string{"btrfs", "loop", "ext4", "quota_v2"}})
	for _, m := range []string{"project-quota", "btrfs", "loop-ext4"} {
		if !ok["TestD13_WritesStopAtTheLimit/"+m] {
			t.Errorf("the limit was not tried with %s", m)
		}
	}
}

func TestNetworks(t *testing.T) {
	inGuest(t, "github.com/opendsec/dsec/netpolicy/veth", "", Job{Tools: []string{"nft"},
		Modules: []string{"veth", "nf_tables", "nft_chain_nat", "nft_ct", "nft_masq", "nft_nat", "nft_reject_inet", "nft_fib_inet",
			"nft_connlimit", "nft_objref", "nft_redir", "ipv6", "sch_ingress", "cls_bpf", "sch_tbf", "inet_diag", "tcp_diag"}})
}

// The whole tier: the kernel's oldest mount plan, cgroup v2, disks limited by
// project quotas. (Quota groups of 6.1 commit the file system again and again
// near the limit, which takes half a minute under emulation.)
func TestContainerTierConforms(t *testing.T) {
	if ok := containers(t, "-test.run", "Conformance"); !ok["TestConformance"] {
		t.Error("the conformance suite did not pass")
	}
}

func containers(t *testing.T, flags ...string) map[string]bool {
	return inGuest(t, "github.com/opendsec/dsec/runtime/container", quotaDisk, Job{Disk: 16 << 30, Memory: 4096,
		Tools:   []string{"mkfs.btrfs", "mkfs.ext4", "mkfs.erofs"},
		Modules: []string{"erofs", "overlay", "loop", "ext4", "quota_v2", "btrfs", "veth", "fuse"}}, flags...)
}

// What an idle sandbox costs where only cgroup v2 counts it: printed, to be
// compared with the same benchmark outside.
func TestIdleMemory(t *testing.T) {
	containers(t, "-test.run", "TestCreateExecDestroy", "-test.bench", "Idle", "-test.benchtime", "1x")
}

// What is not here comes through loop devices there: the kernel mounts no files,
// and nobody tells of reads before they are made. Loaders are killed meanwhile.
func TestE26_LayersOnDemand(t *testing.T) {
	disk := `mkfs.ext4 -q /dev/vda && mkdir -p /var/tmp && mount -t ext4 /dev/vda /var/tmp && export TMPDIR=/var/tmp`
	ok := inGuest(t, "github.com/opendsec/dsec/layer/ondemand/loader", disk, Job{
		Tools: []string{"mkfs.ext4"}, Modules: []string{"erofs", "overlay", "loop", "ext4", "fuse"}},
		"-test.run", "'TestE26_|TestReaders|TestALayer|TestWithout'")
	for _, name := range []string{"TestE26_KilledLoadersLoseNothing/fuse", "TestE26_AReadThatWaitsHoldsUpNoOther", "TestReadersEndWithWhoCouldServe"} {
		if !ok[name] {
			t.Errorf("%s did not run", name)
		}
	}
}

// AppArmor, which the machines of the tests do not have: the profiles are
// loaded by the real parser and hold with no other wall beside them.
const securityfs = `mount -t securityfs securityfs /sys/kernel/security`

var apparmorFiles = map[string]string{"/etc/apparmor.d/abi/3.0": "/etc/apparmor.d/abi/3.0"}

func TestAppArmor(t *testing.T) {
	ok := inGuest(t, "github.com/opendsec/dsec/internal/apparmor", securityfs, Job{Files: apparmorFiles, Tools: []string{"apparmor_parser"},
		Append: "apparmor=1 security=apparmor"}, "-test.bench", "Load", "-test.benchtime", "50x")
	for _, name := range []string{"TestProfilesAreEnforcedWithoutAnyOtherWall", "TestRemovedProfilesAreGoneAndMissingOnesAreRefused"} {
		if !ok[name] {
			t.Errorf("%s did not run", name)
		}
	}
}

// The container tier with an AppArmor profile on every command.
func TestContainerTierUnderAppArmor(t *testing.T) {
	ok := inGuest(t, "github.com/opendsec/dsec/runtime/container", quotaDisk+"\n"+securityfs, Job{Disk: 16 << 30, Memory: 4096,
		Files: apparmorFiles, Append: "apparmor=1 security=apparmor",
		Tools:   []string{"mkfs.btrfs", "mkfs.ext4", "mkfs.erofs", "apparmor_parser"},
		Modules: []string{"erofs", "overlay", "loop", "ext4", "quota_v2", "btrfs", "veth", "fuse"}}, "-test.run", "'Conformance|AppArmor|CreateExecDestroy|Terminal|Device'")
	for _, name := range []string{"TestAppArmorHoldsWithoutSeccomp", "TestConformance"} {
		if !ok[name] {
			t.Errorf("%s did not pass", name)
		}
	}
}
