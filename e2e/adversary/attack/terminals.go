package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// What is done with a terminal: to type into the shell of who looks at it, or to
// load a line discipline, which are full of holes.
var terminals = map[string]technique{
	"tty-type":           func() error { return onTerminal("TIOCSTI", 0x5412, text("x")) },
	"tty-linux":          func() error { return onTerminal("TIOCLINUX", 0x541c, at(1)) },
	"tty-discipline":     func() error { return onTerminal("TIOCSETD", 0x5423, at(0)) },
	"tty-console":        func() error { return onTerminal("TIOCCONS", 0x541d, 0) },
	"tty-type-high-bits": func() error { return onTerminal("TIOCSTI", 0x5412|1<<40, text("x")) },
}

func onTerminal(name string, nr, arg uintptr) error {
	m, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	n, err := unix.IoctlGetInt(int(m.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(m.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		return err
	}
	s, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	_, _, e := unix.Syscall(unix.SYS_IOCTL, s.Fd(), nr, arg)
	return reached("ioctl "+name, e)
}
