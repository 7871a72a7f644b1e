// Package vm boots Debian's Linux 6.1 under QEMU and runs programs in it: the
// oldest kernel that is supported, with pure cgroup v2, which the machines of
// the tests do not have. It needs no KVM and no root, and touches nothing of
// the machine but its cache directory.
//
// The kernel and what all guests have of their initramfs are made by
// runtime/microvm/boot, out of what the machine's apt can fetch.
//
// A Job is a few files and a shell script. The guest is an initramfs of
// busybox, the kernel modules asked for and those files, with an empty disk
// at /dev/vda; it powers off when the script ends. Whatever happens in it, Run
// returns by its context's end.
package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

// Job is what to run.
type Job struct {
	Script  string            // for /bin/sh (busybox), as root, in /
	Files   map[string]string // path in the guest → path here; modes are kept
	Tools   []string          // dynamic programs of this machine, looked up in PATH, copied with their libraries
	Modules []string          // loaded before the script, with what they need
	Memory  int               // MiB; 0: 2048
	Disk    int64             // bytes of /dev/vda; 0: 1 GiB
	Append  string            // to the kernel's command line
}

// Result is how it went.
type Result struct {
	Output  string // of the script, both streams
	Exit    int    // its status
	Console string // what the kernel said
}

// exitMark begins the last line of the output.
const exitMark = "dsec-vm-exit "

// Run boots the kernel, runs the job and returns when the machine is off. An
// error means that the script's status is not known.
func (k *Kernel) Run(ctx context.Context, j Job) (Result, error) {
	dir, err := os.MkdirTemp("", "dsec-vm-")
	if err != nil {
		return Result{}, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	image, initrd, err := k.initrd(ctx, dir, j)
	if err != nil {
		return Result{}, err
	}
	disk := filepath.Join(dir, "disk")
	f, err := os.Create(disk)
	if err != nil {
		return Result{}, err
	}
	if err := errors.Join(f.Truncate(or(j.Disk, 1<<30)), f.Close()); err != nil {
		return Result{}, err
	}
	console, output := filepath.Join(dir, "console"), filepath.Join(dir, "output")
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2",
		"-m", strconv.Itoa(or(j.Memory, 2048)), "-display", "none", "-monitor", "none", "-no-reboot", "-nic", "none",
		"-kernel", image, "-initrd", initrd,
		"-append", "console=ttyS0 panic=-1 cgroup_no_v1=all loglevel=5 random.trust_cpu=on "+j.Append,
		"-drive", "file="+disk+",format=raw,if=virtio,cache=unsafe,discard=unmap",
		"-serial", "file:"+console, "-serial", "file:"+output)
	// The guest ends with this process; for the kernel that is the thread that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	said, runErr := cmd.CombinedOutput()
	r := Result{Console: tail(console), Exit: -1}
	r.Output, r.Exit, err = parseOutput(output)
	switch {
	case err == nil:
		return r, nil
	case ctx.Err() != nil:
		return r, fmt.Errorf("run in a VM: %w", context.Cause(ctx))
	case runErr != nil:
		return r, fmt.Errorf("run in a VM: qemu: %w: %s", runErr, bytes.TrimSpace(said))
	}
	return r, fmt.Errorf("run in a VM: %w; the console ends with: %s", err, last(r.Console, 800))
}

func or[T comparable](v, otherwise T) T {
	var zero T
	if v == zero {
		return otherwise
	}
	return v
}

func parseOutput(file string) (string, int, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return "", -1, err
	}
	text := string(b)
	at := strings.LastIndex(text, exitMark)
	if at < 0 {
		return text, -1, errors.New("the script did not end")
	}
	status, err := strconv.Atoi(strings.TrimSpace(text[at+len(exitMark):]))
	return text[:at], status, err
}

func tail(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	return last(string(b), 64<<10)
}

func last(s string, n int) string { return s[max(0, len(s)-n):] }
