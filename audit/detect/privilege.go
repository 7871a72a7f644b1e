package detect

import (
	"regexp"
	"strings"

	"github.com/opendsec/dsec"
)

// rights are what programs for more rights weigh. Debuggers and sudo are honest work.
var rights = map[string]float64{"mount": 0.5, "umount": 0.3, "unshare": 0.55, "nsenter": 0.75, "setcap": 0.5, "capsh": 0.5, "pkexec": 0.6, "su": 0.3, "sudo": 0.15,
	"insmod": 0.8, "modprobe": 0.6, "bpftool": 0.7, "bpftrace": 0.5, "keyctl": 0.5, "debugfs": 0.6, "losetup": 0.5, "pivot_root": 0.8, "switch_root": 0.8, "kexec": 0.9,
	"mknod": 0.5, "newuidmap": 0.4, "newgidmap": 0.4, "chroot": 0.3, "xfs_io": 0.5, "e4defrag": 0.5, "swapon": 0.6, "iptables": 0.3, "nft": 0.3, "runc": 0.3, "docker": 0.25}

// calls are what refused system calls weigh. A tracer, a sanitizer and a container
// tool are refused some, once.
var calls = map[string]float64{"mount": 0.55, "umount2": 0.5, "move_mount": 0.7, "open_tree": 0.6, "fsopen": 0.6, "fsmount": 0.6, "pivot_root": 0.8, "ptrace": 0.2, "bpf": 0.65,
	"keyctl": 0.5, "add_key": 0.5, "request_key": 0.5, "kexec_load": 0.95, "kexec_file_load": 0.95, "init_module": 0.9, "finit_module": 0.9, "delete_module": 0.9,
	"setns": 0.7, "unshare": 0.4, "clone": 0.3, "clone3": 0.1, "perf_event_open": 0.2, "userfaultfd": 0.5, "io_uring_setup": 0.15, "process_vm_writev": 0.3,
	"process_vm_readv": 0.2, "open_by_handle_at": 0.9, "name_to_handle_at": 0.2, "swapon": 0.7, "swapoff": 0.7, "reboot": 0.8, "syslog": 0.4, "acct": 0.8, "quotactl": 0.6,
	"iopl": 0.8, "ioperm": 0.8, "settimeofday": 0.6, "clock_settime": 0.6, "sethostname": 0.3, "personality": 0.05, "mknod": 0.4, "mknodat": 0.4, "chroot": 0.3,
	"fanotify_init": 0.3, "landlock_restrict_self": 0, "seccomp": 0.05, "ioctl": 0.6, "lookup_dcookie": 0.6, "kcmp": 0.2, "pidfd_getfd": 0.4, "vhangup": 0.4}

var (
	setuidBits = regexp.MustCompile(`^([2467][0-7]{3}|0?[2467][0-7]{3}|[ug]*\+[rwx]*s[rwx]*)$`)
	rightTexts = regexp.MustCompile(`\b(ptrace|libc\.mount|setns|keyctl|kexec_load|init_module|setresuid|process_vm_writev|SYS_mount|unshare\(|XFS_IOC_SWAPEXT|EXT4_IOC_MOVE_EXT|0xc0c0586d|CLONE_NEWUSER|core_pattern|release_agent|uevent_helper)\b|core_pattern|release_agent`)
)

// privilege: programs that are started for rights beyond those given.
func privilege(c command) []sign {
	one := func(kind string, weight float64) []sign {
		return []sign{{dsec.HackPrivilege, kind, weight, c.line()}}
	}
	if w, ok := rights[c.name]; ok {
		switch {
		case c.parent == "dpkg" || strings.HasSuffix(c.parent, ".postinst"):
			return nil
		case c.name == "mount" && len(c.operands()) == 0, c.name == "docker" && !c.has("run"):
			w = 0.05 // only lists
		case c.name == "sudo" && (c.has("apt-get") || c.has("apt") || c.has("make")):
			w = 0.05
		}
		return one(c.name, w)
	}
	if c.name == "chmod" || c.name == "install" {
		for _, a := range c.args {
			if setuidBits.MatchString(strings.TrimPrefix(a, "--mode=")) && !strings.HasPrefix(a, "0") {
				return one("setuid", 0.6)
			}
		}
	}
	if c.name == "sysctl" && c.mentions("-w", "=") != "" {
		return one("sysctl", 0.5)
	}
	if t := rightTexts.FindString(c.script); t != "" {
		return one("script "+t, pick(shells[c.name], 0.4, 0.5))
	}
	return nil
}

// refusedCall is a system call that was refused. Detail begins with its name.
func refusedCall(r dsec.AuditRecord) []sign {
	name, _, _ := strings.Cut(strings.TrimSpace(r.Detail), " ")
	name, _, _ = strings.Cut(name, "(")
	weight, known := calls[name]
	if !known {
		weight = 0.2
	}
	c := commandOf(r)
	if c.name == "gdb" || c.name == "strace" || c.name == "ltrace" || c.name == "perf" || c.name == "bwrap" || c.name == "node" {
		weight /= 2
	}
	return []sign{{dsec.HackPrivilege, "refused " + name, weight, "refused: " + r.Detail + " of " + c.line()}}
}
