// Command mortal is the PID 1 of a machine whose agent can be killed: by a file in its sandbox.
package main

import (
	"os"
	"os/exec"
	"syscall"
	"time"
)

func main() {
	cmd := exec.Command("/agent")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr // there is no /dev/null yet
	if err := cmd.Start(); err != nil {
		return
	}
	for {
		if _, err := os.Stat("/run/dsec/mnt/disk/upper/die"); err == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			return // the kernel ends with PID 1
		}
		var ws syscall.WaitStatus
		for {
			if pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil); err != nil || pid <= 0 {
				break
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
}
