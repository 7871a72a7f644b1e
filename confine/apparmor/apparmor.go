// Package apparmor writes the AppArmor profile of a sandbox: a second wall
// behind seccomp, namespaces and capabilities, that says no to the same things
// by other code of the kernel. It is a generator: pure, no I/O; loading is the
// business of internal/apparmor.
//
// A profile allows files, the capabilities of its confine.Profile, the sockets
// of it, and signals and tracing among processes of the same profile. The rest
// is refused: mounts, tracing and signals across sandboxes, other sockets,
// writes to what belongs to the machine. Processes get it when they are
// executed, and have no right to change it; what they execute inherits it.
//
// The text depends on nothing but Options, names no path of the machine beside
// the file of the ABI, and is the same for the same Options.
package apparmor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
)

// Options of a profile.
type Options struct {
	Name    string          // of the AppArmor profile: 1 to MaxName of a-z, 0-9, "-" and ".", first a letter
	Profile confine.Profile // what it allows
	Userns  bool            // parser and kernel know rules for user namespaces (ABI 4.0); without, nothing is said about them
}

// MaxName is the longest name, in bytes.
const MaxName = 64

// Name is that of the profile for the n-th range of user ids of a node: no two
// sandboxes that live at one time have the same.
func Name(p confine.Profile, n int) string { return fmt.Sprintf("dsec-%s-%d", p, n) }

// Text is the profile in the language of apparmor_parser: Invalid for a name or
// confine.Profile that is none.
func Text(o Options) (string, error) {
	if err := checkName(o.Name); err != nil {
		return "", err
	}
	p, err := confine.ParseProfile(string(o.Profile))
	if err != nil {
		return "", err
	}
	w := &writer{name: o.Name}
	abi := "3.0"
	if o.Userns {
		abi = "4.0"
	}
	w.line("abi <abi/%s>,", abi)
	w.line("profile %s flags=(attach_disconnected,mediate_deleted) {", o.Name)
	w.files(p)
	w.capabilities(p)
	w.sockets(p)
	w.peers(p)
	w.mounts(p)
	if o.Userns {
		w.userns(p)
	}
	w.line("}")
	return w.b.String(), nil
}

func checkName(name string) error {
	ok := name != "" && len(name) <= MaxName && name[0] >= 'a' && name[0] <= 'z'
	for _, c := range []byte(name) {
		ok = ok && (c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '.')
	}
	if !ok {
		return dsec.Errorf(dsec.Invalid, "name AppArmor profile", dsec.Quote(name), "want 1 to %d of a-z, 0-9, '-' and '.', first a letter", MaxName)
	}
	return nil
}

type writer struct {
	b    strings.Builder
	name string
}

func (w *writer) line(format string, args ...any) {
	fmt.Fprintf(&w.b, format+"\n", args...)
}

// rule is a line inside the profile.
func (w *writer) rule(format string, args ...any) {
	w.line("  "+format+",", args...)
}

// Files of the machine, by which a hole in the masks would be used. What is only
// masked because it tells of others stays readable: the mask is /dev/null, and
// programs expect to read it.
var (
	neverTouched = []string{"/proc/kcore", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/vmcore", "/proc/sysrq-trigger",
		"/proc/mem", "/proc/kmem", "/dev/mem", "/dev/kmem", "/dev/port", "/sys/kernel/security/**", "/sys/kernel/debug/**", "/sys/kernel/tracing/**"}
	neverWritten = []string{"/proc/sys/**", "/proc/irq/**", "/proc/acpi/**", "/proc/bus/**", "/proc/fs/**", "/sys/**"}
)

// files allows all, because what a sandbox sees is its own root.
func (w *writer) files(p confine.Profile) {
	w.rule("file")
	for _, f := range neverTouched {
		w.rule("deny %s rwklx", f)
	}
	if p.Gives(confine.Mounts) { // containers inside set what is theirs
		return
	}
	for _, f := range neverWritten {
		w.rule("deny %s wklx", f)
	}
}

// capabilityNames are the kernel's, by number.
var capabilityNames = strings.Fields(`chown dac_override dac_read_search fowner fsetid kill setgid setuid setpcap linux_immutable
net_bind_service net_broadcast net_admin net_raw ipc_lock ipc_owner sys_module sys_rawio sys_chroot sys_ptrace sys_pacct sys_admin sys_boot
sys_nice sys_resource sys_time sys_tty_config mknod lease audit_write audit_control setfcap mac_override mac_admin syslog wake_alarm
block_suspend audit_read perfmon bpf checkpoint_restore`)

// capabilities says no aloud to the others, so that trying them fills no log.
func (w *writer) capabilities(p confine.Profile) {
	have := confine.Capabilities(p)
	if p.Gives(confine.UserNamespaces) {
		// The capability counts in whatever user namespace it is used: this is for
		// those made inside, in which Chromium makes its other namespaces.
		have |= 1 << slices.Index(capabilityNames, "sys_admin")
	}
	var yes, no []string
	for n, name := range capabilityNames {
		if have.Has(n) {
			yes = append(yes, name)
		} else {
			no = append(no, name)
		}
	}
	w.rule("capability %s", strings.Join(yes, " "))
	w.rule("deny capability %s", strings.Join(no, " "))
}

func (w *writer) sockets(p confine.Profile) {
	for _, family := range []string{"inet", "inet6"} {
		for _, kind := range []string{"stream", "dgram"} {
			w.rule("network %s %s", family, kind)
		}
		if p.Gives(confine.RawSockets) {
			w.rule("network %s raw", family)
		} else {
			w.rule("deny network %s raw", family)
		}
	}
	w.rule("network unix")
	if p.Gives(confine.UserNamespaces) && !p.Gives(confine.Mounts) {
		w.rule("deny network netlink")
	} else {
		w.rule("network netlink")
	}
	if p.Gives(confine.PacketSockets) {
		w.rule("network packet")
	} else {
		w.rule("deny network packet")
	}
}

// peers: the machine, which is unconfined, may do to a sandbox what it does, and
// the sandbox nothing to it.
func (w *writer) peers(p confine.Profile) {
	w.rule("signal (receive) peer=unconfined")
	w.rule("signal (send, receive) peer=%s", w.name)
	w.rule("ptrace (readby, tracedby) peer=unconfined")
	if p.Gives(confine.Trace) {
		w.rule("ptrace (read, readby, trace, tracedby) peer=%s", w.name)
		return
	}
	w.rule("ptrace (read, readby) peer=%s", w.name)
	w.rule("deny ptrace (trace) peer=%s", w.name)
}

func (w *writer) mounts(p confine.Profile) {
	for _, what := range []string{"mount", "umount", "pivot_root"} {
		if p.Gives(confine.Mounts) {
			w.rule("%s", what)
		} else {
			w.rule("deny %s", what)
		}
	}
}

func (w *writer) userns(p confine.Profile) {
	if p.Gives(confine.UserNamespaces) {
		w.rule("userns")
	} else {
		w.rule("deny userns")
	}
}
