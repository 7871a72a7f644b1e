// Command dsec-hold owns the processes of the sandboxes of one machine and
// outlives the agent that asked for them; see package internal/hold. It is
// started by the agent, never by hand.
package main

import (
	"context"
	"net"
	"os"
	"time"

	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/internal/hold"
)

// filesIdle is how long a file helper without work stays.
const filesIdle = 5 * time.Second

func main() { os.Exit(hold.Main(os.Args[1:], serveFiles)) }

// serveFiles is the file helper: its root is the sandbox's, its user the one
// that asked.
func serveFiles(c net.Conn) error {
	root, err := files.NewLocal("/")
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	return files.Serve(context.Background(), c, root, filesIdle)
}
