// Package hold is the process that outlives the node agent, and the client the
// agent talks to it with.
//
// A hold (cmd/dsec-hold) owns the processes of the sandboxes of one machine: it
// is their parent, reaps them, pumps what they write into bounded spools, lets
// their deadlines fire and keeps named descriptors, so that the agent can die
// and come back without a sandbox noticing. It knows nothing of images, limits
// or networks: the agent makes those and hands in descriptors and paths.
//
// A sandbox is made in two steps. Spawn makes namespaces with a PID 1 in them
// that has seen nothing of any image yet; its user namespace is given back, so
// that the agent can make idmapped mounts. Enter gives that PID 1 its root and a
// list of mounts. Then Exec runs commands. If the hold dies, the kernel kills
// every PID 1 of its sandboxes and with it everything inside.
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
