// Command hog opens as many inotify instances as its argument says, prints how
// many it got, and keeps them until its input ends.
package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"syscall"
)

func main() {
	want, err := strconv.Atoi(os.Args[1])
	got := 0
	for err == nil && got < want {
		if _, err = syscall.InotifyInit(); err == nil {
			got++
		}
	}
	fmt.Println(got)
	_, _ = io.Copy(io.Discard, os.Stdin)
}
