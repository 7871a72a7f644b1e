// Package worker converts images in a process of its own, so that a source that
// is a bomb, or that finds a defect in a parser, costs a job and not the node.
//
// The program starts itself with Verb as its only argument; its main calls Main
// when it sees that. The worker gets descriptors, never paths: the files to
// write, and of a source what this side could open. Before it reads a byte of
// the source it has moved into a control group of its own with limits on memory
// and tasks, has no network unless it pulls, sees an empty root directory (the
// name server's and the certificates' files if it pulls), and runs as a user
// that owns nothing, without capabilities and with no_new_privs. A tree on this
// machine (image.KindDirectory) needs no parser and needs the right to read it:
// it is converted in the calling process.
//
// The job goes to the worker's standard input as one line of JSON and its
// answers come from its standard output, one a line: progress, then a result or
// an error. The input stays open; its end tells the worker that nobody waits.
package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/cgroup"
)

// Verb is the hidden argument.
const Verb = "image-worker"

// Options of the workers; zero values are the defaults.
type Options struct {
	Exe     string       // default: this program
	Cgroups *cgroup.Root // nil: without limits of the kernel, for a caller that may not set them
	UID     int          // default 65533; used if this process is root
	GID     int          // default 65533
	Memory  int64        // bytes; default 2 GiB
	Pids    int64        // default 128
	Log     *slog.Logger
}

// Worker runs jobs, each in a process of its own.
type Worker struct{ opts Options }

// New returns a Worker.
func New(opts Options) *Worker {
	if opts.Exe == "" {
		opts.Exe = "/proc/self/exe"
	}
	if opts.UID == 0 {
		opts.UID = 65533
	}
	if opts.GID == 0 {
		opts.GID = 65533
	}
	if opts.Memory == 0 {
		opts.Memory = 2 << 30
	}
	if opts.Pids == 0 {
		opts.Pids = 128
	}
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	return &Worker{opts}
}

// job is what the worker is told.
type job struct {
	Location image.Location `json:"location"`
	Options  image.Options  `json:"options"`
	Root     string         `json:"root"` // to chroot to
	UID      int            `json:"uid"`  // 0: stay who you are
	GID      int            `json:"gid"`
	Memory   int64          `json:"memory"`
	Tasks    int            `json:"tasks"` // number of control group files among the descriptors
	Input    bool           `json:"input"` // whether a source file is among the descriptors
}

// answer is one line of the worker.
type answer struct {
	Progress *image.Progress `json:"progress,omitempty"`
	Result   *image.Result   `json:"result,omitempty"`
	Error    *failure        `json:"error,omitempty"`
}

type failure struct {
	Class  dsec.Class `json:"class"`
	Op     string     `json:"op"`
	Object string     `json:"object"`
	Text   string     `json:"text"`
}

// maxAnswers bounds what a worker that went mad can make this side read.
const maxAnswers = 64 << 20

// Convert is image.Convert in a worker.
func (w *Worker) Convert(ctx context.Context, loc image.Location, files image.Files, opts image.Options) (image.Result, error) {
	const op = "convert image"
	if loc.Kind == image.KindDirectory {
		return image.Convert(ctx, loc, files, opts)
	}
	if loc.Kind == image.KindFile && files.Input == nil {
		f, err := os.Open(loc.Path)
		if err != nil {
			return image.Result{}, dsec.E(fileClass(err), op, loc.Source, err)
		}
		defer f.Close()
		files.Input = f
	}
	given := files.Input
	loc, files, err := readable(loc, files)
	if err != nil {
		return image.Result{}, dsec.E(fileClass(err), op, loc.Source, err)
	}
	if files.Input != given {
		defer files.Input.Close()
	}
	if loc.Kind == image.KindRegistry && opts.Credentials == nil {
		opts.Credentials = image.FindCredentials(loc.Source, opts)
	}
	if files.Scratch == nil {
		return image.Result{}, dsec.Errorf(dsec.Internal, op, loc.Source, "no scratch file")
	}
	root, err := makeRoot(scratchDir(files), loc.Kind == image.KindRegistry)
	if err != nil {
		return image.Result{}, dsec.E(dsec.Internal, op, loc.Source, err)
	}
	defer os.RemoveAll(root)
	res, err := w.run(ctx, root, job{Location: loc, Options: opts}, files)
	if err != nil {
		if _, ok := errors.AsType[*dsec.Error](err); ok {
			return res, err
		}
		return res, dsec.E(dsec.ClassOf(err), op, loc.Source, err)
	}
	return res, nil
}

// scratchDir is beside the files, where what a killed program leaves is swept.
func scratchDir(f image.Files) string { return filepath.Dir(f.Meta.Name()) }

func fileClass(err error) dsec.Class {
	switch {
	case errors.Is(err, os.ErrNotExist):
		return dsec.NotFound
	case errors.Is(err, os.ErrPermission):
		return dsec.PermissionDenied
	}
	return dsec.Internal
}

// run starts the process, feeds it and reads it until it ends.
func (w *Worker) run(ctx context.Context, root string, j job, files image.Files) (image.Result, error) {
	cmd := exec.CommandContext(ctx, w.opts.Exe, Verb)
	cmd.Env = environment()
	cmd.Dir = "/"
	cmd.WaitDelay = 5 * time.Second
	cmd.ExtraFiles = []*os.File{files.Meta, files.Data, files.Scratch}
	if j.Input = files.Input != nil; j.Input {
		cmd.ExtraFiles = append(cmd.ExtraFiles, files.Input)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	j.Root, j.Memory = root, w.opts.Memory
	if os.Geteuid() == 0 {
		j.UID, j.GID = w.opts.UID, w.opts.GID
		cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
		if j.Location.Kind != image.KindRegistry {
			cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWNET
		}
	}
	group, err := w.confine(cmd, &j)
	if err != nil {
		return image.Result{}, err
	}
	defer group.remove(w.opts.Log)
	return w.talk(ctx, cmd, j, group)
}

func (w *Worker) talk(ctx context.Context, cmd *exec.Cmd, j job, group *group) (image.Result, error) {
	line, err := json.Marshal(j)
	if err != nil {
		return image.Result{}, err
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		return image.Result{}, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return image.Result{}, err
	}
	var complaint tail
	cmd.Stderr = &complaint
	if err := cmd.Start(); err != nil {
		return image.Result{}, err
	}
	group.started()
	_, writeErr := in.Write(append(line, '\n'))
	last := readAnswers(out, j.Options.Progress)
	waitErr := errors.Join(in.Close(), cmd.Wait())
	switch {
	case ctx.Err() != nil:
		return image.Result{}, ctx.Err()
	case last.Error != nil:
		f := last.Error
		return image.Result{}, dsec.E(f.Class, f.Op, f.Object, errors.New(f.Text))
	case last.Result != nil && waitErr == nil:
		return *last.Result, nil
	case group.oom():
		return image.Result{}, dsec.Errorf(dsec.Invalid, "convert image", j.Location.Source, "takes more than %d bytes of memory", w.opts.Memory)
	}
	return image.Result{}, dsec.Errorf(dsec.Internal, "convert image", j.Location.Source, "worker ended: %w: %s", errors.Join(writeErr, waitErr), complaint.b)
}

// readAnswers reads until the worker closes its output and returns its last word.
func readAnswers(r io.Reader, progress func(image.Progress)) (last answer) {
	d := json.NewDecoder(io.LimitReader(r, maxAnswers))
	for {
		var a answer
		if d.Decode(&a) != nil {
			_, _ = io.Copy(io.Discard, r) // a worker that talks on must not block
			return last
		}
		if a.Progress != nil && progress != nil {
			progress(*a.Progress)
		}
		if a.Result != nil || a.Error != nil {
			last = a
		}
	}
}

// tail keeps the first KiB of what a worker says before it dies.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p[:min(len(p), 1024-len(t.b))]...)
	return len(p), nil
}

// makeRoot makes the directory that the worker sees as its root.
func makeRoot(dir string, network bool) (string, error) {
	root, err := os.MkdirTemp(dir, "root-*")
	if err != nil {
		return "", err
	}
	err = os.Chmod(root, 0o755)
	if err == nil && network {
		for _, name := range []string{"/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl/certs/ca-certificates.crt"} {
			if err = copyIfThere(root, name); err != nil {
				break
			}
		}
	}
	if err != nil {
		return "", errors.Join(err, os.RemoveAll(root))
	}
	return root, nil
}

func copyIfThere(root, name string) error {
	b, err := os.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	to := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, bytes.Clone(b), 0o644)
}

// group is the control group of one job.
type group struct {
	root    *cgroup.Root
	g       *cgroup.Group
	handles *cgroup.Handles
}

// confine makes the job's group and arranges that the process starts in it.
func (w *Worker) confine(cmd *exec.Cmd, j *job) (*group, error) {
	if w.opts.Cgroups == nil {
		return &group{}, nil
	}
	name := "image." + strconv.FormatInt(time.Now().UnixNano(), 36)
	g, err := w.opts.Cgroups.Create(name, cgroup.Limits{CPU: 4, Weight: 50, Memory: w.opts.Memory, Pids: w.opts.Pids})
	if err != nil {
		return nil, err
	}
	h, err := g.Handles()
	if err != nil {
		return nil, errors.Join(err, g.Remove(context.WithoutCancel(context.Background())))
	}
	cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(h.Unified.Fd())
	j.Tasks = len(h.Tasks)
	cmd.ExtraFiles = append(cmd.ExtraFiles, h.Tasks...)
	return &group{root: w.opts.Cgroups, g: g, handles: h}, nil
}

func (g *group) started() {
	if g.handles != nil {
		g.handles.Close()
	}
}

func (g *group) oom() bool {
	if g.g == nil {
		return false
	}
	n, err := g.g.OOMKills()
	return err == nil && n > 0
}

func (g *group) remove(log *slog.Logger) {
	if g.g == nil {
		return
	}
	g.started()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := g.g.Remove(ctx); err != nil {
		log.Warn("control group of an image worker stays", "group", g.g.Name(), "error", strings.TrimSpace(err.Error()))
	}
}

// environment is what a worker needs of ours: the way to registries. The
// resolver of libc would load libraries that its root does not have.
func environment() []string {
	env := []string{"GODEBUG=netdns=go"}
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}
