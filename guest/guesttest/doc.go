// Package guesttest tests the guest agent without a virtual machine: the built
// program runs as PID 1 of fresh namespaces, over a channel that behaves as that
// of a VMM does, one host after the other in whatever state the last one left it.
// The conformance suite of the runtime contract runs over it.
package guesttest
