// Command dsec-guest is PID 1 of a virtual machine of dsec; see package
// guest/agent. It is started by a kernel, never by hand.
package main

import (
	"os"

	"github.com/opendsec/dsec/guest/agent"
)

func main() { os.Exit(agent.Main(os.Args[1:])) }
