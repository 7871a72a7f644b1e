// Command dsec-hold owns the processes of the sandboxes of one machine and
// outlives the agent that asked for them; see package internal/hold. It is
// started by the agent, never by hand. Beside and inside gVisor sandboxes the same
// binary is in other roles; see package runtime/gvisor/inside.
package main

import (
	"os"
	"strings"

	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/runtime/gvisor/inside"
)

func main() {
	if len(os.Args) > 1 && strings.HasPrefix(os.Args[1], inside.Prefix) {
		os.Exit(inside.Main(os.Args[1:]))
	}
	os.Exit(hold.Main(os.Args[1:], files.Main))
}
