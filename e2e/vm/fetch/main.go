// Command fetch puts the kernel of virtual machines into a cache, through the machine's own
// apt: dsec fetches it by itself where it may reach Debian's archive.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/opendsec/dsec/e2e/vm"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: fetch DIRECTORY")
		os.Exit(2)
	}
	k, err := vm.Fetch(context.Background(), os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "fetch kernel:", err)
		os.Exit(1)
	}
	k.Close()
}
