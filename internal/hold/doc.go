// Package hold is the process that outlives the node agent, and the client the
// agent talks to it with.
//
// A hold (cmd/dsec-hold) owns the processes of the sandboxes of one machine: it
// is their parent, reaps them, pumps what they write into bounded spools, lets
// their deadlines fire and keeps named descriptors, so that the agent can die
// and come back without a sandbox noticing. It knows nothing of images, limits
// or networks: the agent makes those and hands in descriptors and paths.
//
// A sandbox is made in two steps. Spawn makes a shell: namespaces with a PID 1
// in them, which mounts what needs no root (/proc, /sys, /dev) and has seen
// nothing of any image yet; its user namespace is given back, so that the agent
// can make idmapped mounts. Enter gives that PID 1 its root and a list of mounts,
// and the sandbox its id, if the shell had another. Then Exec runs commands. If
// the hold dies, the kernel kills every PID 1 of its sandboxes and with it
// everything inside.
//
// Beside sandboxes a hold is the parent of plain processes, which the node needs for itself
// and which are to outlive the agent as well: started with descriptors, watched, ended.
//
// A hold that runs another program than the agent brought becomes that program
// (Ensure): in the same process, with all it has, and no sandbox notices. Until
// the new program runs, every failure leaves the old one as it was.
//
// There is one client at a time. Everything survives the client: commands run
// on, deadlines fire, output is kept, and ends are reported to the next client
// until it acknowledges them. Paths in specs are paths of the hold's, that is
// the machine's, mount namespace.
//
// Errors are *dsec.Error. Every call may be used concurrently and ends when its
// context does; a call that makes something and whose context ends has either
// made it, and it is listed, or nothing is left of it.
package hold
