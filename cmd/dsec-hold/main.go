// Command dsec-hold owns the processes of the sandboxes of one machine and
// outlives the agent that asked for them; see package internal/hold. It is
// started by the agent, never by hand.
package main

import (
	"os"

	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/internal/hold"
)

func main() { os.Exit(hold.Main(os.Args[1:], files.Main)) }
