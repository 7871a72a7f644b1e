// Package linux gives the kernel's newer mount, path, namespace and loop device
// interfaces Go types: a descriptor is an *os.File that closes on exec, a
// failed call says what it was tried on, EINTR is retried. It holds no state
// and no policy, and nothing in it waits except for the kernel.
//
// Calls that change the namespaces of a thread go through OnThread, so that no
// goroutine ever runs on a thread that is somewhere else by accident.
package linux
