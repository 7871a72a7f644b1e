// Package runtimetest is the conformance suite of the runtime contract, and an
// in-memory fake that passes it.
//
// A tier's test is a few lines:
//
//	func TestConformance(t *testing.T) {
//		runtimetest.Run(t, func(t *testing.T) *runtimetest.Env { … })
//	}
//
// The suite speaks to a sandbox in a small vocabulary that Env promises: a
// POSIX shell at /bin/sh and the commands cat, echo, false, head, id, kill,
// mkdir, nc, printf, pwd, rm, seq, setsid, sleep, tail, test, true, yes as busybox
// has them, root and a user "user" with uid 1000 and home /home/user in
// /etc/passwd, and a world-writable /tmp. A layer with a static busybox does.
//
// The main process of a sandbox with a Command is the command with id "main".
//
// The fake knows just that vocabulary: an interpreter runs it in goroutines
// over a file system in memory. Its sandboxes live in a Machine, which outlives
// the Fake opened on it as a real sandbox outlives the agent.
package runtimetest
