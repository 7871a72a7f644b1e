package hold

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// A plain process is begun as a copy of this program (rolePlain), in its namespaces and
// v2 cgroup, as a child of the thread that owns all others. It gives up what it
// must not have, one step after the other, and becomes the program. What goes wrong
// comes through a pipe that the program does not inherit.

// plainStart bounds the start of a plain process.
const plainStart = 20 * time.Second

// begins is what the copy says when only execve is left; an error follows, or nothing.
const begins = "begins\n"

// plainFDs is how many descriptors it may have.
const plainFDs = 4096

// plainConfig is what the copy is told.
type plainConfig struct {
	Spec   wirePlain
	Parent int
}

// birth is a plain process on its way.
type birth struct {
	path, role string
	attr       syscall.ProcAttr
	opened     []*os.File // ours, closed with it
	report     *os.File   // and the end of the pipe that is the process's
	theirs     *os.File
	born       chan error
	pid        int
}

func newBirth(p *plain, files []*os.File) (_ *birth, err error) {
	b := &birth{born: make(chan error, 1)}
	defer func() {
		if err != nil {
			b.close()
		}
	}()
	open := func(f *os.File, err error) (*os.File, error) {
		if err == nil {
			b.opened = append(b.opened, f)
		}
		return f, err
	}
	null, err := open(openPlain(os.DevNull, unix.O_RDONLY))
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(plainConfig{Spec: p.spec, Parent: os.Getpid()})
	if err != nil {
		return nil, err
	}
	config, err := open(linux.SealedFile("plain", text))
	if err != nil {
		return nil, err
	}
	if b.report, b.theirs, err = os.Pipe(); err != nil {
		return nil, err
	}
	b.opened = append(b.opened, b.report, b.theirs)
	all := append([]*os.File{null, files[0], files[0]}, files[1:]...)
	all = append(all, config, b.theirs)
	for _, f := range all {
		b.attr.Files = append(b.attr.Files, uintptr(fdOf(f)))
	}
	b.attr.Dir, b.attr.Env = "/", []string{}
	b.attr.Sys = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL, Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS}
	if p.spec.Cgroup != "" {
		group, err := open(openPlain(p.spec.Cgroup, unix.O_RDONLY|unix.O_DIRECTORY))
		if err != nil {
			return nil, err
		}
		b.attr.Sys.UseCgroupFD, b.attr.Sys.CgroupFD = true, fdOf(group)
	}
	// A number that none of its descriptors gets.
	fd, err := unix.FcntlInt(uintptr(fdOf(p.s.binary)), unix.F_DUPFD_CLOEXEC, readyFD+maxPlainFiles+2)
	if err != nil {
		return nil, os.NewSyscallError("dup", err)
	}
	binary, _ := open(os.NewFile(uintptr(fd), "helper"), nil)
	b.path, b.role = fmt.Sprintf("/proc/self/fd/%d", fdOf(binary)), strconv.Itoa(len(files)-1)
	return b, nil
}

// begin runs on the thread that owns all children.
func (b *birth) begin() {
	pid, err := syscall.ForkExec(b.path, []string{"dsec-hold", rolePlain, b.role}, &b.attr)
	b.pid = pid
	_ = b.theirs.Close() // it ends when the process has closed its own
	b.born <- err
}

// await returns when the process runs its program.
func (b *birth) await(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = b.report.SetReadDeadline(aLongTimeAgo) })
	defer stop()
	said, err := io.ReadAll(io.LimitReader(b.report, 8192))
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return err
	}
	rest, ok := bytes.CutPrefix(said, []byte(begins))
	switch {
	case len(rest) > 0:
		return decodeError(rest)
	case !ok:
		return errors.New("it ended on its way")
	}
	return nil
}

func (b *birth) close() { closeAll(b.opened) }

// runPlain is the copy. It returns only an error.
func runPlain(args []string) error {
	if len(args) < 2 {
		return errors.New("no number of descriptors")
	}
	n, err := strconv.Atoi(args[1])
	if err != nil || n < 0 || n > maxPlainFiles {
		return errors.New("what it is to start is not said")
	}
	config, report := readyFD+n, readyFD+n+1
	// These two, and what whoever started the hold left open.
	if err := unix.CloseRange(uint(config), ^uint(0)>>32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return os.NewSyscallError("close_range", err)
	}
	say := os.NewFile(uintptr(report), "report")
	err = becomePlain(os.NewFile(uintptr(config), "config"), say)
	_, _ = say.Write(encodeError(err)) // to a hold that may be gone
	return err
}

func becomePlain(config, say *os.File) error {
	text, err := io.ReadAll(io.NewSectionReader(config, 0, 1<<20))
	if err != nil {
		return err
	}
	var c plainConfig
	if err := json.Unmarshal(text, &c); err != nil {
		return err
	}
	w := c.Spec
	fail := func(what string, err error) error {
		class := dsec.Internal
		if e, ok := errors.AsType[syscall.Errno](err); ok {
			class = errnoClass(e)
		}
		return dsec.E(class, "start process", w.Name, fmt.Errorf("%s: %w", what, err))
	}
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(w.OOMScoreAdj)), 0); err != nil {
		return fail("set oom_score_adj", err)
	}
	for _, t := range w.Tasks { // this thread, the only one that is left in the end
		if err := writePlain(t, "0"); err != nil {
			return fail("join control group", err)
		}
	}
	unix.Umask(0o077)
	for what, lim := range map[int]uint64{unix.RLIMIT_NOFILE: plainFDs, unix.RLIMIT_CORE: 0} {
		if err := unix.Setrlimit(what, &unix.Rlimit{Cur: lim, Max: lim}); err != nil {
			return fail("set limit", err)
		}
	}
	if err := shed(w); err != nil {
		return fail("give up rights", err)
	}
	// Changing the user took it away. Who became an orphan before has another parent.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fail("set signal", err)
	}
	if os.Getppid() != c.Parent {
		return fail("find parent", unix.ESRCH)
	}
	if _, err := say.WriteString(begins); err != nil {
		return err
	}
	hearSignals()
	argv := append([]string{string(w.Path)}, fromRaw(w.Args)...)
	return fail("run "+dsec.Quote(string(w.Path)), syscall.Exec(string(w.Path), argv, []string{}))
}

// hearSignals ends the ignoring of signals by whoever started the hold, which a program
// would go on with. The library does not know of all of them.
func hearSignals() {
	var dfl [4]uint64 // handler, flags, restorer, mask
	for sig := uintptr(1); sig <= 64; sig++ {
		// Of two the kernel refuses it: they are never ignored.
		_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&dfl)), 0, 8, 0, 0)
	}
}

// shed makes this thread one of a user without capabilities, which nothing that it
// runs can get back. The others of this process end with execve.
func shed(w wirePlain) error {
	runtime.LockOSThread()
	for c := range 64 {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil {
			if err == unix.EINVAL && c > unix.CAP_MKNOD {
				break // the kernel knows no more
			}
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	groups := append([]uint32{}, w.Groups...)
	groups = append(groups, 0) // only for its address
	uid, gid := uintptr(w.UID), uintptr(w.GID)
	// Of this thread: the library's would be of all, and not with every libc.
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(w.Groups)), uintptr(unsafe.Pointer(&groups[0])), 0); e != 0 {
		return fmt.Errorf("set groups: %w", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, gid, gid, gid); e != 0 {
		return fmt.Errorf("set group %d: %w", w.GID, e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); e != 0 {
		return fmt.Errorf("set user %d: %w", w.UID, e)
	}
	var none [2]unix.CapUserData
	if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	return nil
}
