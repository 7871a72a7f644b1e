package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// held starts a process that has a secret in its memory, as a user or as this one.
func held(attr *syscall.SysProcAttr) (cmd *exec.Cmd, at uint64, err error) {
	cmd = exec.Command(self(), "-secret")
	cmd.SysProcAttr = attr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, 0, err
	}
	if _, err = cmd.StdinPipe(); err != nil {
		return nil, 0, err
	}
	if err = cmd.Start(); err != nil {
		return nil, 0, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err == nil {
		_, err = fmt.Sscanf(strings.TrimSpace(line), "0x%x", &at)
	}
	return cmd, at, err
}

// memoryOfSameUser reads what another process of one's own user has in memory.
func memoryOfSameUser() error {
	cmd, at, err := held(nil)
	if err != nil {
		return untried(err.Error())
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", cmd.Process.Pid), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, 6)
	if _, err := f.ReadAt(b, int64(at)); err != nil {
		return err
	}
	if string(b) != "secret" {
		return blockedBy(fmt.Sprintf("read %q", b))
	}
	return worked("read the memory of a process of the same user")
}

// memoryOfOtherUser reads what a process of another user has in memory: the
// unprivileged user of root's. Root reads as if it were that user.
func memoryOfOtherUser() error {
	if os.Getuid() == 0 && !control {
		return untried("root of a sandbox is every user in it")
	}
	pid := victim()
	_, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	return did(err, "read the mappings of another user's process")
}
