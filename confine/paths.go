package confine

import "slices"

// maskedPaths are hidden because they show or change the whole machine, show
// other sandboxes, or had kernel bugs that reading alone sets off (a recursive
// grep over kpagecgroup once took a machine down). Each costs some
// microseconds of every shell, so what only the machine's root can open
// anyway is here only where that one check is not wall enough.
var maskedPaths = []string{
	"/proc/acpi", "/proc/asound", "/proc/cmdline", "/proc/dynamic_debug", "/proc/interrupts", "/proc/kallsyms", "/proc/kcore",
	"/proc/key-users", "/proc/keys", "/proc/kmsg", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/latency_stats",
	"/proc/pagetypeinfo", "/proc/sched_debug", "/proc/scsi", "/proc/slabinfo", "/proc/sysrq-trigger", "/proc/timer_list",
	"/proc/timer_stats", "/proc/vmallocinfo", "/proc/vmcore",
}

// readOnlyPaths can be read by tools that want to know the machine.
var readOnlyPaths = []string{"/proc/irq", "/proc/sys"}

// MaskedPaths are hidden: files by /dev/null, directories by an empty
// read-only one. A path that does not exist is no error. All are below /proc:
// /sys is not the kernel's in a sandbox.
func MaskedPaths() []string { return slices.Clone(maskedPaths) }

// ReadOnlyPaths are remounted read-only, before the masks.
func ReadOnlyPaths() []string { return slices.Clone(readOnlyPaths) }
