package adversary

var groups = []group{
	{"System calls", "seccomp (`confine`), default deny", systemCalls},
	{"Sockets", "seccomp, by family, type and protocol", socketKinds},
	{"Namespaces", "seccomp; what of the first process is asked for, by its memory being the initial user namespace's", namespaceRows},
	{"Mounts", "seccomp: no call that mounts", mountRows},
	{"Ioctls of file systems", "seccomp, by whole letters", ioctlRows},
	{"Ioctls of file systems", "the kernel, which wants a capability or whose overlayfs has no such call", ioctlKernelRows},
	{"Terminals", "seccomp", terminalRows},
	{"Files of the kernel", "masks over /proc, and /sys that is a copy", kernelFileRows},
	{"Files of the kernel", "/proc/sys is read-only, and what is not shown cannot be written", kernelWriteRows},
	{"Devices", "no mknod in a user namespace; `nodev` and the device cgroup for those that are there", deviceRows},
	{"Processes", "the first process is not dumpable; capabilities hold in the sandbox's user namespace only", processRows},
	{"Files and layers", "capabilities hold in the sandbox's user namespace only; its root is a mount of its own", fileRows},
	{"Searches for the platform and for others", "no agent inside; namespaces of its own; descriptors are closed at exec", leakRows},
	{"Network", "a network namespace without a link (`none`); rules at the host end of the link (`allow-list`, `open`)", networkRows},
	{"Network", "capabilities over the network namespace are not the sandbox's", networkRights},
	{"Names", "the resolver of the node, which answers for allowed names only", nameRows},
	{"Damage", "limits of the sandbox's own: control groups, quota, rlimits, counters of its user namespace", damageRows},
}

const systemCalls = `
bpf | makes a map of BPF | EPERM
perf | counts events of the machine | EPERM
io-uring | makes a ring that no filter sees into | ENOSYS
userfaultfd | stops the kernel in the middle of a copy | EPERM
add-key | puts a key into a ring of its user number | ENOSYS
keyctl | asks for the session's ring | ENOSYS
request-key | has the kernel start a program for a key | ENOSYS
init-module | loads a module | EPERM | !kernel lockdown and module signatures answer before it
finit-module | loads a module from a file | EPERM
delete-module | unloads a module | EPERM
kexec-load | replaces the kernel | EPERM | !it would replace the kernel
kexec-file-load | replaces the kernel by files | EPERM | !it would replace the kernel
reboot | restarts the machine | EPERM
swapon | swaps to a file | EPERM
swapoff | ends swapping | EPERM
acct | has the kernel write down each process that ends | EPERM
settimeofday | sets the kernel's time zone | EPERM
clock-settime | sets the clock | EPERM
adjtimex | adjusts the clock | EPERM
sethostname | renames the host | EPERM
kernel-log | reads the kernel's log | EPERM
ioperm | opens a port of the hardware | EPERM | !kernel lockdown refuses it to everybody
iopl | opens all ports of the hardware | EPERM | !kernel lockdown refuses it to everybody
quotactl | speaks to quotas | EPERM
fanotify | stops others' file accesses | ENOSYS
modify-ldt | makes a 16-bit segment | ENOSYS
vhangup | ends a terminal | EPERM
move-pages | moves others' memory | EPERM
migrate-pages | moves others' memory to another node | EPERM
personality-read-implies-exec | makes memory executable | EPERM
memfd-secret | makes memory that cannot be reclaimed | ENOSYS
kcmp | compares kernel addresses of processes | EPERM
file-setattr | sets a project quota | EPERM
process-madvise | gives back others' memory | EPERM
ptrace-traceme | is traced by its parent | EPERM
lease | makes the file service wait for whoever holds a file | EACCES
open-by-handle-anything | opens an inode by a made-up number | EPERM
x32-entry | calls by the x32 convention | ENOSYS | !the kernels of distributions have no x32
call-of-tomorrow | calls a number that no table knows | ENOSYS | !no kernel has it
old-entry | calls by the 32-bit entry | SIGSYS
`

const socketKinds = `
socket-packet | sees and forges frames | EAFNOSUPPORT
socket-raw-icmp | forges ICMP | EACCES
socket-raw-ipv6 | forges ICMPv6 | EACCES
socket-raw-header | forges whole packets | EACCES
socket-echo | has buffers that nobody pays for | EACCES
socket-vsock | speaks to the hypervisor | EAFNOSUPPORT
socket-alg | loads ciphers of the kernel | EAFNOSUPPORT
socket-xdp | goes around the network stack | EAFNOSUPPORT
socket-key | speaks to IPsec | EAFNOSUPPORT
socket-sctp | loads SCTP | EPROTONOSUPPORT
socket-mptcp | speaks MPTCP | EPROTONOSUPPORT
socket-udplite | speaks UDP-Lite | EPROTONOSUPPORT
netlink-netfilter | changes packet filters | EPROTONOSUPPORT
netlink-audit | writes records of the audit | EPROTONOSUPPORT
netlink-uevent | hears and forges events of devices | EPROTONOSUPPORT
netlink-generic | reaches every family of generic netlink | EPROTONOSUPPORT
netlink-diag | lists sockets and their memory | EPROTONOSUPPORT
`

const namespaceRows = `
clone-user | a process in a user namespace of its own | EPERM
clone-mount | a process in a mount namespace | EPERM
clone-net | a process in a network namespace | EPERM
clone-pid | a process in a pid namespace | EPERM
clone-ipc | a process in an IPC namespace | EPERM
clone-uts | a process in a UTS namespace | EPERM
clone-cgroup | a process in a cgroup namespace | EPERM
unshare-user | leaves its user namespace | EPERM
unshare-mount | leaves its mount namespace | EPERM
unshare-net | leaves its network namespace | EPERM
unshare-pid | leaves its pid namespace | EPERM
unshare-ipc | leaves its IPC namespace | EPERM
unshare-uts | leaves its UTS namespace | EPERM
unshare-cgroup | leaves its cgroup namespace | EPERM
unshare-time | leaves its time namespace | EPERM
unshare-high-bits | hides the flag from a filter of 64 bits | EPERM | !the kernel reads 64 bits and refuses the others
clone3-user | has its flags in memory, where no filter sees them | ENOSYS
setns-first | joins namespaces of the first process by path | EACCES
setns-pidfd | joins them by a pidfd | EPERM
setns-leaked | joins what a leaked descriptor names | EPERM
`

const mountRows = `
mount-tmpfs | mounts a tmpfs | EPERM
mount-proc | mounts a proc without masks | EPERM
mount-sysfs | mounts the kernel's sysfs | EPERM
mount-devpts | mounts other terminals | EPERM
mount-cgroup | sets a release agent, which runs outside | EPERM
mount-bind | binds a directory | EPERM
mount-overlay | stacks file systems | EPERM
mount-unmask | takes a mask away | EPERM
mount-writable-sysctl | makes /proc/sys writable | EPERM
mount-fsopen | mounts by the new calls | EPERM
mount-open-tree | copies a tree of mounts | EPERM
mount-move | moves a mount | EPERM
mount-setattr | changes a mount's attributes | EPERM
mount-fspick | changes a mounted file system | EPERM
mount-pivot-root | has another root | EPERM
mount-fuse | makes files whose reader waits for ever | EPERM
`

const ioctlRows = `
ioctl-xfs-swap-extents | swaps the blocks of two files: has ended a shared XFS | EPERM
ioctl-xfs-exchange-range | exchanges ranges of two files | EPERM
ioctl-xfs-shutdown | ends a file system | EPERM
ioctl-ext4-move-extents | moves blocks between files | EPERM
ioctl-ext4-swap-boot | swaps with the boot loader's inode | EPERM
ioctl-immutable | makes a file that cannot be removed | EPERM
ioctl-project-quota | leaves its quota's project | EPERM
ioctl-freeze | freezes a file system | EPERM
ioctl-thaw | thaws one that is being packed | EPERM
ioctl-trim | discards blocks | EPERM
ioctl-dedupe | shares blocks with files it may only read | EPERM
ioctl-btrfs-subvolume | makes a volume without its quota | EPERM
ioctl-btrfs-destroy | removes a volume | EPERM
ioctl-btrfs-quota | raises its quota | EPERM
ioctl-btrfs-quota-off | switches quotas off | EPERM
ioctl-btrfs-tree-search | reads the trees of a file system | EPERM
ioctl-btrfs-logical | finds files by blocks | EPERM
ioctl-verity | seals a file | EPERM
ioctl-encryption-key | adds a key to a file system | EPERM
ioctl-f2fs | speaks to F2FS | EPERM
ioctl-high-bits | hides the number from a filter of 64 bits | EPERM
`

const ioctlKernelRows = `
ioctl-generation | forges the generation of an inode | ENOTTY | !tmpfs, where the control is, has none either
ioctl-fibmap | asks where on the disk a file is | EPERM | !tmpfs, where the control is, has no blocks
`

const terminalRows = `
tty-type | types into a terminal (TIOCSTI) | EPERM
tty-type-high-bits | the same, hidden from a filter of 64 bits | EPERM
tty-linux | pastes into a console (TIOCLINUX) | EPERM
tty-discipline | loads a line discipline | EPERM
tty-console | takes the console's output | EPERM | !it would take this machine's
`
