// Package dsec is the vocabulary of the system: what a sandbox is asked to be
// (Spec), what it can be (State), how it ended (Result), what happened to it
// (Event), how things are named (SandboxID, NodeID) and how calls go wrong
// (Error). It imports the standard library only, performs no I/O, reads no
// clock, and every value in it means the same on every machine.
//
// All durations in JSON are seconds as a number, all sizes are bytes, all
// times are RFC 3339 in UTC.
package dsec
