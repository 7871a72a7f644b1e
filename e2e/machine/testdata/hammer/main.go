// Hammer sends to each of its arguments, network:address, for as long as it
// lives: a datagram, or a byte of a connection, every few milliseconds. What is
// refused is tried again.
package main

import (
	"net"
	"os"
	"strings"
	"time"
)

func main() {
	for _, target := range os.Args[1:] {
		network, addr, _ := strings.Cut(target, ":")
		go func() {
			for {
				send(network, addr)
				time.Sleep(5 * time.Millisecond)
			}
		}()
	}
	select {}
}

// send goes on until something is refused.
func send(network, addr string) {
	c, err := net.DialTimeout(network, addr, 300*time.Millisecond)
	if err != nil {
		return
	}
	defer c.Close()
	for range time.Tick(5 * time.Millisecond) {
		if _, err := c.Write([]byte{1}); err != nil {
			return
		}
	}
}
