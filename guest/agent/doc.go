// Package agent is what runs inside a virtual machine of dsec: PID 1 of the
// machine, which mounts, reaps, keeps one sandbox and answers a node over a
// channel in the protocol of package guest.
//
// The program is three, by its first argument: none is the agent (Main), "init"
// PID 1 of the sandbox, which only reaps, "files" the file service of one user
// in the sandbox's root.
//
// Commands are children of the agent and run in the namespaces of the sandbox,
// in which nothing of the agent is: no process, descriptor or mount. They are
// started from threads that have joined those namespaces and given up for good
// what no command may have. Their output goes into spools in memory, which
// outlive the node's connection; the clocks of their time limits stand still
// while the sandbox is frozen.
package agent
