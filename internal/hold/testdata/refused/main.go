// Command refused makes system calls and prints the errno of each, one a line: "number
// argument,argument… errno". Arguments are such calls; "repeat=N" makes each N times,
// "wait" waits for a line on stdin before the first, "for=N" goes on for N ms and
// prints how many it made.
package main

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	repeat, ms := 1, 0
	for _, word := range os.Args[1:] {
		key, value, _ := strings.Cut(word, "=")
		n, _ := strconv.Atoi(value)
		switch key {
		case "repeat":
			repeat = n
		case "for":
			ms = n
		case "wait":
			_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		default:
			call(word, repeat, time.Duration(ms)*time.Millisecond)
		}
	}
}

func call(word string, repeat int, long time.Duration) {
	nr, list, _ := strings.Cut(word, ":")
	var a [7]uint64
	a[0], _ = strconv.ParseUint(nr, 0, 64)
	for i, s := range strings.Split(list, ",") {
		a[i+1], _ = strconv.ParseUint(s, 0, 64)
	}
	var errno syscall.Errno
	made := 0
	for start := time.Now(); made < repeat || time.Since(start) < long; made++ {
		_, _, errno = syscall.Syscall6(uintptr(a[0]), uintptr(a[1]), uintptr(a[2]), uintptr(a[3]), uintptr(a[4]), uintptr(a[5]), uintptr(a[6]))
	}
	if long > 0 {
		fmt.Println("made", made)
	}
	fmt.Println(nr, list, int(errno))
}
