package adversary

const kernelFileRows = `
proc-kcore | reads the kernel's memory | empty
proc-kallsyms | reads kernel addresses | empty
proc-kpagecgroup | the file whose reading has crashed a node | empty | !reading it may crash
proc-kpagecount | counts mappings of all pages | empty
proc-kpageflags | reads flags of all pages | empty
proc-kmsg | reads, and takes away, the kernel's log | empty | !it would take this machine's
proc-timer_list | reads all timers | empty
proc-vmallocinfo | reads kernel addresses | empty
proc-slabinfo | counts the kernel's objects | empty
proc-keys | lists keys | empty
proc-key-users | lists users of keys | empty
proc-interrupts | counts interrupts, which tells what others type | empty
proc-cmdline | reads the kernel's arguments | empty
proc-sched_debug | lists all processes | empty
proc-latency_stats | reads where all processes wait | empty
debugfs | lists debugfs | ENOENT
tracefs | lists tracefs | ENOENT
bpffs | lists pinned programs | ENOENT
firmware | lists firmware tables | empty
block-devices | lists the machine's disks | empty
recursive-reader | reads everything below /proc and /sys, as a recursive grep does | and lives | !it is stopped from nothing
`

const kernelWriteRows = `
sysrq | has the kernel do what its console can | sysrq-trigger
core-pattern | has the kernel start a program outside at a crash | EACCES
modprobe-path | has the kernel start a program outside for a module | modprobe | !this kernel has no modules to load
sysctl-any | looks for one setting that opens for writing | none of
uevent-helper | has the kernel start a program outside for a device | ENOENT
release-agent | looks for a release agent to set | 0 files
notify-on-empty | looks for a notification to switch on | 0 files
cgroup-limits | raises its own limits | no limit
binfmt-misc | has the kernel start an interpreter for others' programs | ENOENT
`

const deviceRows = `
mknod-disk | makes the machine's disk | EPERM
mknod-memory | makes the machine's memory | EPERM | !kernel lockdown refuses to open it
mknod-kmsg | makes the kernel's log | EPERM
mknod-tun | makes network devices | EPERM
mknod-loop | makes the control of loop devices | EPERM
mknod-in-tmpfs | makes a device outside the root's mount | EPERM
mknod-whiteout | deletes a layer's file behind overlayfs | EPERM
layer-disk | opens the machine's disk, which came in a layer | EACCES
layer-kmsg | opens the kernel's log, which came in a layer | EACCES
layer-null | opens a harmless device, which came in a layer | EACCES
dev-unexpected | looks for a device that nobody needs | no device
dev-disk-ioctl | credits entropy to the generator of all | EPERM
`

const processRows = `
ptrace-first | traces the first process | EPERM | @syscall
ptrace-seize | traces it without stopping it | EPERM | @syscall
read-memory-first | reads its memory | EACCES
process-vm-read | reads it by another call | EPERM | @syscall
process-vm-write | writes it | EPERM | @syscall
pidfd-getfd | takes a descriptor of it | EPERM | @syscall
environ-first | reads its environment | EACCES
descriptors-first | lists its descriptors | EACCES
root-of-first | goes to its root | EACCES
map-files-first | lists what it has mapped | EACCES
executable-first | overwrites the program of the supervisor (CVE-2019-5736) | EACCES
kill-first | kills it | ignored; EPERM
limit-of-init | sets its limits | set another's limit; EPERM | ?it is the sandbox's own first process: only the sandbox is harmed
setuid-unmapped | becomes a user of another sandbox | EINVAL | !to the machine's root every number is a user
setgroups-unmapped | becomes of a group of another sandbox | EINVAL; EPERM
uid-map | maps users anew | EPERM | !a map can be written once
raise-capabilities | gives itself CAP_SYS_ADMIN | EPERM
ambient-capability | hands it to its children | EPERM
replace-exe-link | says that it is another program | EPERM | !it wants a capability that not every machine's root has
drop-seccomp | removes the filter | EINVAL | !no kernel has this
realtime | runs before everybody | EPERM
deadline | has a deadline | EPERM
nice-down | is more important | EACCES
io-realtime | has real-time input and output | EPERM
raise-nofile | may open more files | EPERM | !this machine's root may not either
lock-memory | locks memory | ENOMEM
oom-immunity | is killed after everything of the machine's | EACCES | !it wants a capability that not every machine's root has
memory-of-same-user | writes the memory of its own user's processes by /proc | read the memory | ?processes of one user are one
other-user-maps | reads the mappings of another user's process | untried: root; EACCES
`

const fileRows = `
chroot-dotdot | leaves its root by chroot and .. | own root; EPERM
chroot-kept | leaves its root by a kept descriptor | own root; EPERM
handle-of-root | opens the root by a number | EPERM | @syscall
attribute-overlay | forges overlayfs's opaque mark | EPERM
attribute-redirect | forges overlayfs's redirection | EPERM
attribute-origin | forges overlayfs's origin | EPERM
attribute-security | forges an attribute of integrity | EPERM
capability-of-file | makes a program with the machine's capabilities | bound to the sandbox's own; EPERM
chown-unmapped | gives a file to another sandbox's user | EINVAL
setuid-of-layer | is root by a setuid program of a layer | nobody outside | !seen by its map of users
layer-file-written | writes a file of a layer, which others read, through a mapping | neighbours are asked
layer-redirect | a layer has overlayfs's own attributes, to show what is elsewhere | what the layer has
layer-link-out | a layer has a link that goes up and up | ENOENT
dirty-pipe | writes a page of a file it may only read (CVE-2022-0847) | stayed as it was | !this kernel has been mended
rename-exchange-dev | swaps a file of the kernel's with one of its own | EXDEV | !no kernel does
hardlink-proc | links the program of the first process | EXDEV | !no kernel does
magic-link-root | follows the roots of all processes | own or closed
`

const leakRows = `
leaked-descriptors | lists its descriptors beside the three streams | nothing beside
standard-streams | looks whether a stream is more than one | pipes and the null device
search-sockets | looks for a socket to forge messages to | no socket
search-files | looks for a log, a program or a library of the platform | nothing has our name
search-processes | looks for the platform in all it can read of processes | no process
search-neighbours | looks for a secret that a neighbour's process has in its arguments | no process
search-mounts | looks for paths of the machine in the mounts | no mount names
search-environment | looks for secrets in its environment | no name
abstract-sockets | looks for sockets without a file | none has a name
sysv-of-others | looks for shared memory of others | no segment
`
