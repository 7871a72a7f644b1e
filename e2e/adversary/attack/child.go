package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// child is what this program does where a technique needs another process.
func child(what string, args []string) {
	switch what {
	case "-wait": // until stdin ends
		_, _ = os.Stdin.Read(make([]byte, 1))
	case "-secret": // has one in its memory until stdin ends, and says where
		held := bytes.Repeat([]byte("secret"), 8)
		fmt.Printf("%p\n", held)
		_, _ = os.Stdin.Read(make([]byte, 1))
		runtime.KeepAlive(held)
	case "-entry": // calls the kernel by the 32-bit entry
		fmt.Println(oldEntry(20)) // getpid
	case "-deaf": // ignores every signal that can be ignored, and has a child that does
		deaf(args)
	case "-vfork":
		vfork()
	case "-flip": // exchanges two names until stdin ends
		go flip(args[0], args[1])
		_, _ = os.Stdin.Read(make([]byte, 1))
	case "-watch": // looks at every process that appears until stdin ends
		go watch()
		_, _ = os.Stdin.Read(make([]byte, 1))
		fmt.Println(seen.Load(), "looks")
	case "-probe": // one line for each 10 ms of sleep and 1 ms of work, with how long they took
		probe(args[0])
	case "-spin":
		for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		}
	default:
		fmt.Println("no such part:", what)
		os.Exit(2)
	}
}

// run starts a program that does nothing with attributes and waits for it.
func run(attr *syscall.SysProcAttr) error {
	cmd := exec.Command("/bin/true")
	cmd.SysProcAttr = attr
	return cmd.Run()
}

// victim is another process, of whom one wants something: the first process of a
// sandbox, or the child that a control has been given.
func victim() int {
	if control {
		return number("ATTACK_VICTIM")
	}
	return 1
}

func number(env string) int {
	n := 0
	if _, err := fmt.Sscan(os.Getenv(env), &n); err != nil {
		fmt.Println("untried: no", env)
		os.Exit(4)
	}
	return n
}
