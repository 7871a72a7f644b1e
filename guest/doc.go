// Package guest is how a node speaks to the agent inside a virtual machine:
// the protocol of docs/formats/guest.md, the node's end of it (Client) and what
// the agent's end is made of (Serve).
//
// A Client is one session over one connection to the machine's channel. It
// gives commands as process.Process and files as files.FS. When the connection
// breaks, the other end misbehaves, or another session takes its place, every
// call on it errs with Unavailable; a new Client over a new connection finds
// the commands again, by their ids.
//
// The other end is hostile: its root may be the task's. Nothing that comes from
// there makes a Client panic, hang past its context or keep more than the
// format says. What it answers is only as true as the guest is sound.
//
// The agent itself is in the folder agent, and is the program cmd/dsec-guest.
package guest
