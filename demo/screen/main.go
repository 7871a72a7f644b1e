// Command screen is the program on the screen of the demo's disk image: a button
// that counts clicks, a line that shows what is typed, a number that the wheel turns
// and a trace of what is dragged. It draws on /dev/fb0, reads every /dev/input/event*,
// and writes what it shows to a file, which tests compare the screen with.
package main

import (
	"fmt"
	"os"
	"time"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: screen FONT.psf STATE")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "screen:", err)
		os.Exit(1)
	}
}

func run(fontFile, stateFile string) error {
	letters, err := readFont(fontFile)
	if err != nil {
		return err
	}
	fb, err := openFramebuffer(30 * time.Second)
	if err != nil {
		return err
	}
	s := &scene{fb: fb, font: letters, x: fb.width / 2, y: fb.height / 2, file: stateFile}
	s.draw()
	events := make(chan event, 256)
	go watchInputs(events)
	for e := range events {
		s.handle(e)
		for more := true; more; { // one drawing for all that came at once
			select {
			case e := <-events:
				s.handle(e)
			default:
				more = false
			}
		}
		s.draw()
	}
	return nil
}
