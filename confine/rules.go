package confine

// An action is what happens to a call. Allowed calls have none of the rest.
type action struct {
	allow  bool
	errno  errno
	reason string
	way    string
	notice bool  // the refusal is of interest
	tell   uint8 // the argument that says what was wanted, from 1; 0: none
}

type errno uint32

// The errnos in use; 0 is "answered with success, and not done".
const (
	ignored         errno = 0
	ePERM           errno = 1
	eACCES          errno = 13
	eNOSYS          errno = 38
	ePROTONOSUPPORT errno = 93
	eOPNOTSUPP      errno = 95
	eAFNOSUPPORT    errno = 97
)

func (e errno) String() string {
	switch e {
	case ePERM:
		return "EPERM"
	case eACCES:
		return "EACCES"
	case eNOSYS:
		return "ENOSYS"
	case ePROTONOSUPPORT:
		return "EPROTONOSUPPORT"
	case eOPNOTSUPP:
		return "EOPNOTSUPP"
	case eAFNOSUPPORT:
		return "EAFNOSUPPORT"
	}
	return "ignored"
}

var allowed = action{allow: true}

// A test looks at the low 32 bits of an argument: everything tested is an int
// or a flag word of which the kernel uses no more, and a test of 64 bits
// could be evaded by setting high ones.
type test struct {
	arg   int
	mask  uint32
	value uint32
	any   bool // true if any bit of mask is set, instead of (arg & mask) == value
}

// A clause decides a call if all its tests hold.
type clause struct {
	label  string // of what it decides, for Explain: "TIOCSTI"
	tests  []test
	action action
}

// A rule decides a call: the first clause that holds, else otherwise.
type rule struct {
	clauses   []clause
	otherwise action
}

// plain allows calls without looking at arguments.
const plainCalls = `
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat openat2 creat close close_range lseek
stat fstat lstat newfstatat fstatat statx statfs fstatfs access faccessat faccessat2 truncate ftruncate fallocate fadvise64 readahead
getdents getdents64 getcwd chdir fchdir rename renameat renameat2 mkdir mkdirat rmdir link linkat unlink unlinkat symlink symlinkat
readlink readlinkat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat umask utime utimes utimensat futimesat mknod mknodat
setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr
setxattrat getxattrat listxattrat removexattrat file_getattr
flock dup dup2 dup3 pipe pipe2 fsync fdatasync sync_file_range syncfs sendfile splice tee vmsplice copy_file_range cachestat
name_to_handle_at inotify_init inotify_init1 inotify_add_watch inotify_rm_watch statmount listmount chroot
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 signalfd signalfd4
timerfd_create timerfd_settime timerfd_gettime io_setup io_destroy io_getevents io_pgetevents io_submit io_cancel
mmap mprotect munmap brk mremap msync mincore madvise mlock mlock2 munlock mlockall munlockall remap_file_pages memfd_create
pkey_mprotect pkey_alloc pkey_free mseal map_shadow_stack membarrier mbind set_mempolicy get_mempolicy set_mempolicy_home_node
shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo rt_sigsuspend sigaltstack
kill tkill tgkill pause alarm getitimer setitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
timer_create timer_settime timer_gettime timer_getoverrun timer_delete restart_syscall
fork vfork execve execveat exit exit_group wait4 waitid pidfd_open pidfd_send_signal process_mrelease
getpid getppid gettid getpgid setpgid getpgrp getsid setsid getuid geteuid getgid getegid getgroups setgroups
setuid setgid setreuid setregid setresuid setresgid getresuid getresgid setfsuid setfsgid capget capset prctl arch_prctl
getrlimit setrlimit prlimit64 getrusage getpriority setpriority ioprio_set ioprio_get sysinfo uname getcpu getrandom
sched_yield sched_setparam sched_getparam sched_setscheduler sched_getscheduler sched_get_priority_max sched_get_priority_min
sched_rr_get_interval sched_setaffinity sched_getaffinity sched_setattr sched_getattr
set_tid_address set_robust_list get_robust_list futex futex_waitv futex_wake futex_wait futex_requeue rseq rseq_slice_yield
set_thread_area get_thread_area uretprobe uprobe
connect accept accept4 bind listen getsockname getpeername setsockopt getsockopt shutdown
sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg
seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self lsm_get_self_attr lsm_list_modules
`

// refusal is a group of calls with one answer.
type refusal struct {
	calls  string
	errno  errno
	reason string
	way    string
}

const useVM = `tier="fullvm" has a kernel of its own for this`

var refusals = []refusal{
	{"mount umount2 pivot_root open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick mount_setattr", ePERM,
		"mounting is done by the node when the sandbox is made", "put the files into a layer, or mounts=; " + useVM},
	{"setns", ePERM, "joining other namespaces is not needed to build or test", useVM},
	{"clone3", eNOSYS, "its flags cannot be read by a filter; libraries fall back to clone", "nothing: clone works"},
	{"io_uring_setup io_uring_enter io_uring_register", eNOSYS,
		"io_uring does what the filter cannot see and has a history of kernel holes", "programs fall back to epoll or threads"},
	{"userfaultfd", ePERM, "it lets a process stop the kernel in the middle of a copy", useVM},
	{"bpf", ePERM, "programs in the kernel are not needed to build or test", useVM},
	{"perf_event_open", ePERM, "it shows the whole machine and has a history of kernel holes", "profile with a tool that samples itself; " + useVM},
	{"kexec_load kexec_file_load reboot", ePERM, "they would end the machine", useVM},
	{"init_module finit_module delete_module", ePERM, "kernel modules would change the machine", useVM},
	{"add_key request_key keyctl", eNOSYS, "key rings are shared by user number, not by sandbox", "programs go on without a key ring"},
	{"open_by_handle_at", ePERM, "it opens files outside the sandbox's root", "open by path"},
	{"quotactl quotactl_fd", ePERM, "the disk limit belongs to the node", "limits.disk="},
	{"file_setattr", ePERM, "it changes how the host's file system stores a file, quota project included", "nothing is needed for it"},
	{"swapon swapoff acct", ePERM, "they change the whole machine", useVM},
	{"settimeofday clock_settime adjtimex clock_adjtime", ePERM, "there is one clock for the whole machine", "libfaketime, or TZ= for the zone"},
	{"sethostname setdomainname", ePERM, "the host name is set when the sandbox is made", "hostname="},
	{"syslog", ePERM, "the kernel log is the machine's", "dsec why ID shows what concerns a sandbox"},
	{"iopl ioperm", ePERM, "they give access to the hardware", useVM},
	{"vhangup", ePERM, "terminals belong to the node", "nothing is needed for it"},
	{"move_pages migrate_pages", ePERM, "memory placement belongs to the node", "programs go on without"},
	{"fanotify_init fanotify_mark", eNOSYS, "it can stop other processes' file accesses", "inotify works"},
	{"modify_ldt", eNOSYS, "16-bit segments are not needed to build or test", useVM},
	{"memfd_secret", eNOSYS, "memory that cannot be reclaimed is not needed to build or test", "memfd_create works"},
	{"lsm_set_self_attr listns", eNOSYS, "not needed to build or test", useVM},
	{"_sysctl uselib ustat sysfs lookup_dcookie nfsservctl create_module get_kernel_syms query_module getpmsg putpmsg afs_syscall tuxcall security vserver epoll_ctl_old epoll_wait_old sync_file_range2", eNOSYS,
		"obsolete", "nothing is needed for it"},
	{"sync", ignored, "it would write back every sandbox's data", "fsync and syncfs work"},
}

// tracing is what Debug allows and Build does not.
var tracing = refusal{"ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd", ePERM,
	"it gives one process control of another and has a history of kernel holes; what runs as one user can still write its memory by /proc", `profile="debug" and "pwn" allow gdb, strace and leak checkers; a grader runs as another user`}
