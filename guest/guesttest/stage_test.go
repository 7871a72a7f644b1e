package guesttest

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const stageVariable = "GUESTTEST_STAGE"

// stage is what becomes of this program before it becomes the agent: what an
// initramfs and a VMM make of a machine.
type stage struct {
	Group string // v2 directory that is the root of the machine's hierarchy
	Dir   string // where the machine's root is mounted
	Agent string
	Base  string // what the sandbox is made of
	Disk  string
}

var agentBinary string

func TestMain(m *testing.M) {
	if text := os.Getenv(stageVariable); text != "" {
		runtime.LockOSThread()
		fmt.Fprintln(os.Stderr, "guesttest stage:", enterStage(text))
		os.Exit(1)
	}
	os.Exit(runTests(m))
}

// runTests builds the agent first.
func runTests(m *testing.M) int {
	if os.Geteuid() != 0 {
		fmt.Println("guesttest: namespaces and mounts need root, uid is", os.Geteuid())
		return 0
	}
	dir, err := os.MkdirTemp("", "guesttest-")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer os.RemoveAll(dir) //nolint:errcheck // what is left is seen
	agentBinary = filepath.Join(dir, "dsec-guest")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", agentBinary, "github.com/opendsec/dsec/cmd/dsec-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Printf("build the agent: %v\n%s", err, out)
		return 1
	}
	baseDir = filepath.Join(dir, "base")
	if err := fillBase(baseDir); err != nil {
		fmt.Println(err)
		return 1
	}
	code := m.Run()
	if root := testGroups.root; root != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := root.RemoveAll(ctx); err != nil {
			fmt.Println("remove control groups:", err)
			return 1
		}
	}
	return code
}

func enterStage(text string) error {
	var s stage
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(s.Group, "cgroup.procs"), []byte("0"), 0); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", s.Dir, "tmpfs", 0, "mode=0755,size=16m"); err != nil {
		return err
	}
	for _, d := range []string{"proc", "sys", "dev", "tmp", "run", "lower", "disk", "controllers"} {
		if err := os.Mkdir(filepath.Join(s.Dir, d), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(s.Dir, "init"), nil, 0o755); err != nil {
		return err
	}
	for from, to := range map[string]string{s.Base: "lower", s.Disk: "disk", "/sys/fs/cgroup": "controllers", s.Agent: "init"} {
		if err := unix.Mount(from, filepath.Join(s.Dir, to), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind %s: %w", from, err)
		}
	}
	if err := unix.Chdir(s.Dir); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return err
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return err
	}
	// The clock is not the machine's own, as it is in a virtual one.
	if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_TIME, 0, 0, 0); err != nil {
		return err
	}
	return unix.Exec("/init", []string{"init"}, []string{"DSEC_CHANNEL=fd:3"})
}

var baseDir string

const applets = `sh cat echo false head id kill mkdir nc printf pwd rm seq setsid sleep tail test true yes ls stat mknod dd env ps
	nproc hostname touch mount umount ln mv chmod chown sync wc grep sed tr dmesg ip ping readlink tty stty cp du chroot od cut sort uname find md5sum`

func fillBase(dir string) error {
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return fmt.Errorf("Debian's busybox-static is needed: %w", err)
	}
	for _, d := range []struct {
		name string
		mode os.FileMode
	}{{"", 0o755}, {"bin", 0o755}, {"etc", 0o755}, {"tmp", 0o777 | os.ModeSticky}, {"root", 0o700}, {"home", 0o755}, {"home/user", 0o755}} {
		if err := os.Mkdir(filepath.Join(dir, d.name), 0o755); err != nil {
			return err
		}
		if err := os.Chmod(filepath.Join(dir, d.name), d.mode); err != nil {
			return err
		}
	}
	for name, content := range map[string]string{
		"etc/passwd":     "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n",
		"etc/group":      "root:x:0:\nuser:x:1000:\nextra:x:1234:user\n",
		"etc/machine-id": "uninitialized\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "bin/busybox"), busybox, 0o755); err != nil {
		return err
	}
	for _, a := range fields(applets) {
		if err := os.Symlink("busybox", filepath.Join(dir, "bin", a)); err != nil {
			return err
		}
	}
	return os.Chown(filepath.Join(dir, "home/user"), 1000, 1000)
}
