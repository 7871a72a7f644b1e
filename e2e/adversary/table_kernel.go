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
bpf | makes a map of BPF | EPERM | @syscall
perf | counts events of the machine | EPERM | @syscall
io-uring | makes a ring that no filter sees into | ENOSYS
userfaultfd | stops the kernel in the middle of a copy | EPERM
add-key | puts a key into a ring of its user number | ENOSYS | @syscall
keyctl | asks for the session's ring | ENOSYS | @syscall
request-key | has the kernel start a program for a key | ENOSYS | @syscall
init-module | loads a module | EPERM | !kernel lockdown and module signatures answer before it | @syscall
finit-module | loads a module from a file | EPERM | @syscall
delete-module | unloads a module | EPERM | @syscall
kexec-load | replaces the kernel | EPERM | !it would replace the kernel | @syscall
kexec-file-load | replaces the kernel by files | EPERM | !it would replace the kernel | @syscall
reboot | restarts the machine | EPERM | @syscall
swapon | swaps to a file | EPERM | @syscall
swapoff | ends swapping | EPERM | @syscall
acct | has the kernel write down each process that ends | EPERM | @syscall
settimeofday | sets the kernel's time zone | EPERM | @syscall
clock-settime | sets the clock | EPERM | @syscall
adjtimex | adjusts the clock | EPERM
sethostname | renames the host | EPERM
kernel-log | reads the kernel's log | EPERM | @syscall
ioperm | opens a port of the hardware | EPERM | !kernel lockdown refuses it to everybody | @syscall
iopl | opens all ports of the hardware | EPERM | !kernel lockdown refuses it to everybody | @syscall
quotactl | speaks to quotas | EPERM
fanotify | stops others' file accesses | ENOSYS
modify-ldt | makes a 16-bit segment | ENOSYS
vhangup | ends a terminal | EPERM
move-pages | moves others' memory | EPERM
migrate-pages | moves others' memory to another node | EPERM
personality-read-implies-exec | makes memory executable | EPERM | @syscall
memfd-secret | makes memory that cannot be reclaimed | ENOSYS
kcmp | compares kernel addresses of processes | EPERM
file-setattr | sets a project quota | EPERM | @syscall
process-madvise | gives back others' memory | EPERM
ptrace-traceme | is traced by its parent | EPERM | @syscall
lease | makes the file service wait for whoever holds a file | EACCES
open-by-handle-anything | opens an inode by a made-up number | EPERM | @syscall
x32-entry | calls by the x32 convention | ENOSYS | !the kernels of distributions have no x32
call-of-tomorrow | calls a number that no table knows | ENOSYS | !no kernel has it
old-entry | calls by the 32-bit entry | SIGSYS
`

const socketKinds = `
socket-packet | sees and forges frames | EAFNOSUPPORT | @syscall
socket-raw-icmp | forges ICMP | EACCES | @syscall
socket-raw-ipv6 | forges ICMPv6 | EACCES | @syscall
socket-raw-header | forges whole packets | EACCES | @syscall
socket-echo | has buffers that nobody pays for | EACCES
socket-vsock | speaks to the hypervisor | EAFNOSUPPORT | @syscall
socket-alg | loads ciphers of the kernel | EAFNOSUPPORT | @syscall
socket-xdp | goes around the network stack | EAFNOSUPPORT | @syscall
socket-key | speaks to IPsec | EAFNOSUPPORT | @syscall
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
clone-user | a process in a user namespace of its own | EPERM | @syscall
clone-mount | a process in a mount namespace | EPERM | @syscall
clone-net | a process in a network namespace | EPERM | @syscall
clone-pid | a process in a pid namespace | EPERM | @syscall
clone-ipc | a process in an IPC namespace | EPERM | @syscall
clone-uts | a process in a UTS namespace | EPERM | @syscall
clone-cgroup | a process in a cgroup namespace | EPERM | @syscall
unshare-user | leaves its user namespace | EPERM | @syscall
unshare-mount | leaves its mount namespace | EPERM | @syscall
unshare-net | leaves its network namespace | EPERM | @syscall
unshare-pid | leaves its pid namespace | EPERM | @syscall
unshare-ipc | leaves its IPC namespace | EPERM | @syscall
unshare-uts | leaves its UTS namespace | EPERM | @syscall
unshare-cgroup | leaves its cgroup namespace | EPERM | @syscall
unshare-time | leaves its time namespace | EPERM | @syscall
unshare-high-bits | hides the flag from a filter of 64 bits | EPERM | !the kernel reads 64 bits and refuses the others | @syscall
clone3-user | has its flags in memory, where no filter sees them | ENOSYS
setns-first | joins namespaces of the first process by path | EACCES
setns-pidfd | joins them by a pidfd | EPERM | @syscall
setns-leaked | joins what a leaked descriptor names | EPERM | @syscall
`

const mountRows = `
mount-tmpfs | mounts a tmpfs | EPERM | @syscall
mount-proc | mounts a proc without masks | EPERM | @syscall
mount-sysfs | mounts the kernel's sysfs | EPERM | @syscall
mount-devpts | mounts other terminals | EPERM | @syscall
mount-cgroup | sets a release agent, which runs outside | EPERM | @syscall
mount-bind | binds a directory | EPERM | @syscall
mount-overlay | stacks file systems | EPERM | @syscall
mount-unmask | takes a mask away | EPERM | @syscall
mount-writable-sysctl | makes /proc/sys writable | EPERM | @syscall
mount-fsopen | mounts by the new calls | EPERM | @syscall
mount-open-tree | copies a tree of mounts | EPERM | @syscall
mount-move | moves a mount | EPERM | @syscall
mount-setattr | changes a mount's attributes | EPERM | @syscall
mount-fspick | changes a mounted file system | EPERM | @syscall
mount-pivot-root | has another root | EPERM | @syscall
mount-fuse | makes files whose reader waits for ever | EPERM
`

const ioctlRows = `
ioctl-xfs-swap-extents | swaps the blocks of two files: has ended a shared XFS | EPERM | @syscall
ioctl-xfs-exchange-range | exchanges ranges of two files | EPERM | @syscall
ioctl-xfs-shutdown | ends a file system | EPERM | @syscall
ioctl-ext4-move-extents | moves blocks between files | EPERM | @syscall
ioctl-ext4-swap-boot | swaps with the boot loader's inode | EPERM | @syscall
ioctl-immutable | makes a file that cannot be removed | EPERM | @syscall
ioctl-project-quota | leaves its quota's project | EPERM | @syscall
ioctl-freeze | freezes a file system | EPERM | @syscall
ioctl-thaw | thaws one that is being packed | EPERM | @syscall
ioctl-trim | discards blocks | EPERM | @syscall
ioctl-dedupe | shares blocks with files it may only read | EPERM | @syscall
ioctl-btrfs-subvolume | makes a volume without its quota | EPERM | @syscall
ioctl-btrfs-destroy | removes a volume | EPERM | @syscall
ioctl-btrfs-quota | raises its quota | EPERM | @syscall
ioctl-btrfs-quota-off | switches quotas off | EPERM | @syscall
ioctl-btrfs-tree-search | reads the trees of a file system | EPERM | @syscall
ioctl-btrfs-logical | finds files by blocks | EPERM | @syscall
ioctl-verity | seals a file | EPERM | @syscall
ioctl-encryption-key | adds a key to a file system | EPERM | @syscall
ioctl-f2fs | speaks to F2FS | EPERM
ioctl-high-bits | hides the number from a filter of 64 bits | EPERM | @syscall
`

const ioctlKernelRows = `
ioctl-generation | forges the generation of an inode | ENOTTY | !tmpfs, where the control is, has none either
ioctl-fibmap | asks where on the disk a file is | EPERM | !tmpfs, where the control is, has no blocks
`

const terminalRows = `
tty-type | types into a terminal (TIOCSTI) | EPERM | @syscall
tty-type-high-bits | the same, hidden from a filter of 64 bits | EPERM | @syscall
tty-linux | pastes into a console (TIOCLINUX) | EPERM | @syscall
tty-discipline | loads a line discipline | EPERM | @syscall
tty-console | takes the console's output | EPERM | !it would take this machine's | @syscall
`
