// Command helper stands for the file helper in tests.
package main

import (
	"fmt"
	"net"
	"os"

	"github.com/opendsec/dsec/internal/hold"
)

func main() {
	hold.MainIfAsked(func(c net.Conn) error {
		b := make([]byte, 100)
		for {
			n, err := c.Read(b)
			if err != nil {
				return nil
			}
			if _, err := fmt.Fprintf(c, "%d %s", os.Getuid(), b[:n]); err != nil {
				return err
			}
		}
	})
}
