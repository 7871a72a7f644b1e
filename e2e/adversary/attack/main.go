// Command attack tries one technique of an adversary and says what came of it.
// It is what the tests of e2e/adversary run inside sandboxes and, as a control,
// where nothing stops it.
//
//	attack NAME      tries it
//	attack -list     prints all names
//
// The last line says what happened and so does the exit code: 0, "blocked: …"
// with the answer of the kernel; 3, "got: …" with what proves that it worked; 4,
// "untried: …" with the reason. What a technique does where it works is as
// harmless as it can be while it still proves the power to do harm: it writes
// back what it has read.
package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// What ended a technique, beside the errors that stopped it.
type (
	worked  string // it did: the evidence
	untried string // it could not be tried: the reason
)

func (w worked) Error() string  { return string(w) }
func (u untried) Error() string { return string(u) }

// technique returns worked, untried, or what stopped it; never nil.
type technique func() error

// control says that nothing is to stop it here: the test has made a place for it.
var control = os.Getenv("ATTACK_CONTROL") != ""

func main() {
	runtime.LockOSThread() // what is joined, and given up, is a thread's
	all := techniques()
	switch {
	case len(os.Args) == 2 && os.Args[1] == "-list":
		fmt.Println(strings.Join(slices.Sorted(maps.Keys(all)), "\n"))
	case len(os.Args) >= 2 && strings.HasPrefix(os.Args[1], "-"):
		child(os.Args[1], os.Args[2:])
	case len(os.Args) == 2 && all[os.Args[1]] != nil:
		os.Exit(tell(all[os.Args[1]]()))
	default:
		fmt.Println("want the name of a technique, or -list")
		os.Exit(2)
	}
}

func techniques() map[string]technique {
	all := map[string]technique{}
	for _, class := range []map[string]technique{calls(), sockets(), namespaces(), mounts, processes, kernelFiles(), devices,
		controls(), files, leaks, network, terminals, damage} {
		for name, t := range class {
			if all[name] != nil {
				panic("two techniques " + name)
			}
			all[name] = t
		}
	}
	return all
}

// tell prints what came of it and returns the exit code.
func tell(err error) int {
	var w worked
	var u untried
	switch {
	case err == nil:
		fmt.Println("nothing was said")
		return 5
	case errors.As(err, &w):
		fmt.Println("got:", w)
		return 3
	case errors.As(err, &u):
		fmt.Println("untried:", u)
		return 4
	}
	if control && absent(err) {
		fmt.Println("untried: this machine has none:", named(err))
		return 4
	}
	fmt.Println("blocked:", named(err))
	return 0
}

// absent says that a kernel has not got what is tried, which only a control may say.
func absent(err error) bool {
	for _, e := range []error{unix.ENOENT, unix.ENOSYS, unix.ENODEV, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// named adds the name of the errno.
func named(err error) string {
	var e syscall.Errno
	if errors.As(err, &e) {
		return unix.ErrnoName(e) + " " + err.Error()
	}
	return err.Error()
}

// did is worked if nothing stopped it.
func did(err error, evidence string) error {
	if err == nil {
		return worked(evidence)
	}
	return err
}

// reached is for calls that are to be refused whatever their arguments: any other
// answer means that the kernel's own code has looked at them.
func reached(call string, e syscall.Errno) error {
	switch e {
	case unix.EPERM, unix.EACCES, unix.ENOSYS, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT:
		return os.NewSyscallError(call, e)
	case 0:
		return worked(call + " succeeds")
	}
	return worked(call + " is answered by the kernel: " + unix.ErrnoName(e))
}

// self is this program again, to do one thing as a child; see child.
func self() string {
	if control {
		return "/proc/self/exe"
	}
	return "/attack"
}
