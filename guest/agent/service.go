package agent

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// servicePort is the one of a machine that has an init of its own.
const servicePort = "/dev/virtio-ports/org.dsec.agent"

// serviceMain is the agent as a service of such a machine: it mounts nothing, loads nothing, and
// commands run among all others. The argument is another port.
func serviceMain(args []string) error {
	name := servicePort
	if len(args) > 0 {
		name = args[0]
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return os.NewSyscallError("close_range", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return err
	}
	unix.Umask(0o022)
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0); err != nil {
		log.Warn("the kernel may kill the agent when memory is short", "err", err)
	}
	if err := os.MkdirAll(ourDir, 0o700); err != nil {
		return err
	}
	at, err := serviceGroup()
	if err != nil {
		return fmt.Errorf("control groups: %w", err)
	}
	groups, err := ourGroup(at)
	if err != nil {
		return fmt.Errorf("control groups: %w", err)
	}
	channel, err := waitPort(name)
	if err != nil {
		return fmt.Errorf("channel: %w", err)
	}
	a := newAgent(ourDir, groups, log)
	a.service = true
	return a.serve(channel)
}

// serviceGroup is the control group that the init of the machine gave to the service, to do with as it
// likes (Delegate=yes).
func serviceGroup() (group, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			// One that was started again is in the group that it had made.
			return group(filepath.Join("/sys/fs/cgroup", strings.TrimSuffix(path, "/agent"))), nil
		}
	}
	return "", errors.New("there is no unified hierarchy")
}

// waitPort waits until the machine's device manager has made a port.
func waitPort(name string) (io.ReadWriter, error) {
	for deadline := time.Now().Add(channelWait); ; time.Sleep(20 * time.Millisecond) {
		p, err := openPort(name)
		if !errors.Is(err, os.ErrNotExist) || time.Now().After(deadline) {
			return p, err
		}
	}
}
