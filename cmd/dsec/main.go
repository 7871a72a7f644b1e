// Command dsec gives agents the computers they work in: it serves sandboxes on
// a machine (up) and is the command line of their users. Exit codes: that of
// the command for run and exec, 124 after a timeout, 125 for dsec's own errors
// there, 126 and 127 as a shell has them; elsewhere 1, and 2 for wrong usage.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/opendsec/dsec/image/worker"
	"github.com/opendsec/dsec/runtime/function/wasm"
)

func main() {
	if len(os.Args) == 2 && os.Args[1] == worker.Verb {
		os.Exit(worker.Main())
	}
	if len(os.Args) > 1 && os.Args[1] == wasm.Verb {
		os.Exit(wasm.Main(os.Args[2:]))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newRoot().ExecuteContext(ctx)
	stop()
	os.Exit(finish(err))
}
