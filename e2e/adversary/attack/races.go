package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// flip exchanges two names for ever, thousands of times a second. A quota that
// is said to be exceeded does not end it: btrfs counts what a rename may need
// until its next commit, and says so of a small disk that has room.
func flip(a, b string) {
	for {
		err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
		if err != nil && !errors.Is(err, unix.EDQUOT) {
			fmt.Println("got nothing:", err)
			return
		}
	}
}

var seen atomic.Int64

// watch opens the program, and lists the descriptors, of every process that comes:
// whoever starts a command passes through here before it is the command.
func watch() {
	own := strconv.Itoa(os.Getpid())
	for {
		all, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			return
		}
		for _, dir := range all {
			if pid := filepath.Base(dir); pid != own {
				watchOne(dir)
			}
		}
	}
}

func watchOne(dir string) {
	seen.Add(1)
	to, err := os.Readlink(dir + "/exe")
	if err == nil {
		if f, err := os.Open(dir + "/exe"); err == nil {
			_ = f.Close()
			if _, err := os.Stat(to); err != nil || strings.Contains(to, "memfd") {
				fmt.Println("got: opened", to)
			}
		}
	}
	links, _ := filepath.Glob(dir + "/fd/*")
	for _, l := range links {
		to, err := os.Readlink(l)
		if err == nil && filepath.Base(l) > "2" && !strings.HasPrefix(to, "/attack") && !strings.HasPrefix(to, "anon_inode:[event") {
			if f, err := os.Open(l); err == nil {
				fmt.Println("got: opened a descriptor", l, to)
				_ = f.Close()
			}
		}
	}
}

// probe says how long one sleep with a little work takes, for so many seconds.
func probe(seconds string) {
	n, err := strconv.ParseFloat(seconds, 64)
	if err != nil {
		n = 1
	}
	for end := time.Now().Add(time.Duration(n * float64(time.Second))); time.Now().Before(end); {
		begun := time.Now()
		time.Sleep(10 * time.Millisecond)
		sum := 0
		for i := range 400_000 {
			sum += i * i
		}
		if err := os.WriteFile("probe", []byte(strconv.Itoa(sum)), 0o600); err != nil {
			fmt.Println("error", err)
			return
		}
		if b, err := os.ReadFile("probe"); err != nil || string(b) != strconv.Itoa(sum) {
			fmt.Println("error", err, string(b))
			return
		}
		fmt.Println(time.Since(begun).Microseconds())
	}
}
