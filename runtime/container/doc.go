// Package container is the tier that isolates a sandbox with the kernel of the
// machine itself: namespaces, a uid range of its own, an overlay over shared
// read-only layers, control groups, seccomp and a wall around devices.
//
// # Who owns what
//
// The processes of a sandbox belong to the hold, which outlives this one. What
// a sandbox is made of has names derived from its id, so that all of it can be
// found and removed whatever happened:
//
//	<Dir>/<id>/state    record of what was asked for; written first, removed last
//	<Dir>/<id>/*.out    kept output of its commands, *.err likewise
//	disk pool <id>      upper and work directory, owned by its uid range
//	control group <id>  limits, accounts, the device wall
//	hold <id>           PID 1, commands, namespaces
//	hold <id>.disk      the same for the file service of a stopped sandbox
//
// A network namespace and everything in it ends with the processes in it.
//
// A shell is what of a sandbox needs no image: uid range, control group and a
// PID 1 without a root. Some are made ahead. One that is taken keeps the name of
// its control group, which the state file has then; in the hold it gets the
// sandbox's id with its root. One that nobody took has no state file, and the
// next process removes it.
//
// # Creation
//
// Create is a list of steps, each with an undo; Destroy is all the undos, by
// name. A sandbox is running when PID 1 has its root, and the main process, if
// one was asked for, has been started.
package container
