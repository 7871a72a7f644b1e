// Package dsec is the vocabulary of the system: what a sandbox is asked to be
// (Spec), what it can be (State), how it ended (Result), what happened to it
// (Event), how things are named (SandboxID, NodeID) and how calls go wrong
// (Error). It imports the standard library only, performs no I/O, reads no
// clock, and every value in it means the same on every machine.
//
// In JSON, which is what a node keeps on its disk, durations are nanoseconds,
// sizes are bytes and times are RFC 3339. The wire (api) and the command line
// have seconds instead.
package dsec
