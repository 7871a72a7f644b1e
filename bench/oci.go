package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// OCI is a contender that runs an OCI runtime the way its users do: `NAME run`
// on a bundle. The root file system is given mounted and is shared by all its
// containers, which favours the peer: dsec mounts one overlay for each.
func OCI(binary, rootfs, dir string, argv []string) (Contender, error) {
	path, err := exec.LookPath(binary)
	if err != nil {
		return Contender{}, err
	}
	bundle := filepath.Join(dir, binary)
	if err := os.MkdirAll(bundle, 0o755); err != nil {
		return Contender{}, err
	}
	if err := writeBundle(bundle, rootfs, argv); err != nil {
		return Contender{}, err
	}
	return Contender{Name: binary, Worker: func(i int) (Worker, error) {
		return newOCIWorker(path, bundle, i)
	}}, nil
}

func writeBundle(bundle, rootfs string, argv []string) error {
	cmd := exec.Command("runc", "spec")
	cmd.Dir = bundle
	if _, err := os.Stat(filepath.Join(bundle, "config.json")); err == nil {
		return nil
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("runc spec: %w: %s", err, out)
	}
	text, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return err
	}
	var c map[string]any
	if err := json.Unmarshal(text, &c); err != nil {
		return err
	}
	proc := c["process"].(map[string]any)
	proc["terminal"], proc["args"] = false, argv
	c["root"] = map[string]any{"path": rootfs, "readonly": false}
	// The same limits that dsec sets; all that `runc spec` has is kept.
	linux := c["linux"].(map[string]any)
	linux["resources"] = map[string]any{
		"memory":  map[string]any{"limit": int64(1 << 30)},
		"pids":    map[string]any{"limit": 512},
		"cpu":     map[string]any{"quota": 100000, "period": 100000},
		"devices": []any{map[string]any{"allow": false, "access": "rwm"}},
	}
	text, err = json.Marshal(c)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(bundle, "config.json"), text, 0o644)
}

// ociWorker owns an OS thread in a mount namespace without the controller-less
// v2 tree: crun refuses machines that have both.
type ociWorker struct {
	calls chan func()
	path  string
	dir   string
	index int
}

func newOCIWorker(path, bundle string, index int) (*ociWorker, error) {
	w := &ociWorker{calls: make(chan func()), path: path, dir: bundle, index: index}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		ready <- hideUnified()
		for f := range w.calls {
			f()
		}
	}()
	return w, <-ready
}

func hideUnified() error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	err := unix.Unmount("/sys/fs/cgroup/unified", unix.MNT_DETACH)
	if err != nil && err != unix.EINVAL && err != unix.ENOENT {
		return fmt.Errorf("hide the v2 tree: %w", err)
	}
	return nil
}

func (w *ociWorker) Cycle(ctx context.Context, n int) (first time.Duration, err error) {
	done := make(chan struct{})
	w.calls <- func() {
		defer close(done)
		id := fmt.Sprintf("bench%d-%d-%d-%d", os.Getpid(), w.index, n, time.Now().UnixNano()%1e6)
		var stderr bytes.Buffer
		cmd := exec.CommandContext(ctx, w.path, "run", id)
		cmd.Dir, cmd.Stderr = w.dir, &stderr
		begin := time.Now()
		err = cmd.Run() // returns when the command has ended and the container is deleted
		first = time.Since(begin)
		if err != nil {
			err = fmt.Errorf("%s run: %w: %s", w.path, err, bytes.TrimSpace(stderr.Bytes()))
		}
	}
	<-done
	return first, err
}

func (w *ociWorker) Close() error {
	close(w.calls)
	return nil
}
